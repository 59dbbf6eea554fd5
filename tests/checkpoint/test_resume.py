"""A run that is interrupted and resumed equals one that is not: in the same layout to the bit, in others to 1e-6.

That reshaping by itself changes no bit is in tests/engines/test_states.py.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import SETTINGS, STEPS, assert_same_bits, interrupt, metrics, timeless
from refusals import refused

from toolkit.checkpoint.verify import verify
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.engines import deepspeed_patches
from toolkit.engines.base import Update
from toolkit.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.errors import ToolkitError

Train = Callable[..., str]
INTERRUPTED = 5
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.fixture
def fp16_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed refuses fp16 on CPUs because they are slow at it."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    monkeypatch.setattr(kind, "is_fp16_supported", lambda self: True)
    monkeypatch.setattr(kind, "supported_dtypes", lambda self: [torch.float, torch.half, torch.bfloat16])


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(low, marks=pytest.mark.whole) for low in ("bf16", "fp16"))]
)
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ({"zero_stage": 0}, 2),
        ({"zero_stage": 1}, 2),
        ({"zero_stage": 2}, 2),
        ({"zero_stage": 3}, 2),
        ({"zero_stage": 1, "tp": 2, "pp": 2}, 4),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_the_same_layout_resumes_bit_for_bit(
    train: Train, tmp_path: Path, layout: dict[str, int], world_size: int, precision: str, fp16_on_cpus: None
) -> None:
    """With dropout on, in the middle of the warm-up and of an epoch; in fp16 with the state of the loss scaler."""
    changes = {"parallel": layout, "precision": precision, "world_size": world_size}
    changes |= {f"overrides__{name}": value for name, value in DROPOUT.items()}
    train("run_dir=run", *SETTINGS, **changes)
    uninterrupted = timeless(tmp_path / "run")
    interrupt(tmp_path / "run", INTERRUPTED)
    output = train("run_dir=run", *SETTINGS, "--resume", "auto", **changes)
    assert f"step {INTERRUPTED}, same layout" in output
    assert timeless(tmp_path / "run") == uninterrupted
    last = f"step-{STEPS:08d}"
    assert_same_bits(tmp_path / "run" / last, tmp_path / f"later-{last}")


@pytest.mark.parametrize(("layout", "world_size"), [({"zero_stage": 2}, 2), ({"zero_stage": 1, "tp": 2}, 2)])
def test_asynchronous_checkpoints_are_the_same(
    train: Train, tmp_path: Path, layout: dict[str, int], world_size: int
) -> None:
    changes = {"parallel": layout, "world_size": world_size}
    train("run_dir=run", *SETTINGS, **changes)
    train("run_dir=beside", *SETTINGS, "checkpoint.asynchronous=true", **changes)
    names = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert len(names) == STEPS
    assert sorted(path.name for path in (tmp_path / "beside").glob("step-*")) == names
    for name in names:
        assert verify(tmp_path / "beside" / name) == []
        assert_same_bits(tmp_path / "beside" / name, tmp_path / "run" / name)


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        (({"zero_stage": 3}, 2), ({"zero_stage": 1, "tp": 2, "pp": 2}, 4), "adamw"),
        (({"zero_stage": 1, "tp": 2, "pp": 2}, 4), ({"zero_stage": 3}, 4), "adafactor"),
        (({"zero_stage": 2}, 4), ({"zero_stage": 1, "tp": 2, "sequence_parallel": True}, 2), "adamw"),
        (({"zero_stage": 1, "pp": 2}, 2), ({"zero_stage": 0}, 1), "adamw"),
        (
            ({"zero_stage": 1, "pp": 2, "schedule": "zb-h1"}, 2),
            ({"zero_stage": 0, "pp": 2, "schedule": "1f1b"}, 2),
            "adamw",
        ),
        (({"zero_stage": 1}, 1), ({"zero_stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}, 2), "adamw"),
    ],
    ids=[
        "z3 to tp2-pp2-z1",
        "tp2-pp2-z1 to z3",
        "z2 to tp2-sp",
        "pp2 to z0",
        "pp2-zbh1 to pp2-1f1b",
        "z1 to z3-offload",
    ],
)
def test_another_layout_resumes_with_the_same_curve(
    train: Train, tmp_path: Path, before: tuple[dict[str, Any], int], after: tuple[dict[str, Any], int], optimizer: str
) -> None:
    settings = *SETTINGS, f"optimizer.name={optimizer}"
    train("run_dir=run", *settings, parallel=before[0], world_size=before[1])
    uninterrupted = timeless(tmp_path / "run")
    start = f"run/step-{INTERRUPTED:08d}"
    output = train("run_dir=on", *settings, "--resume", start, parallel=after[0], world_size=after[1])
    assert "→" in output
    assert "global batch 16 kept" in output
    resumed = timeless(tmp_path / "on")
    assert [step["step"] for step in resumed] == list(range(INTERRUPTED + 1, STEPS + 1))
    for step, expected in zip(resumed, uninterrupted[INTERRUPTED:], strict=True):
        assert (step["batch"], step["lr"]) == (expected["batch"], expected["lr"])
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)


def test_every_checkpoint_is_a_hugging_face_model(train: Train, tmp_path: Path) -> None:
    train("run_dir=run", *SETTINGS, "precision=bf16", parallel={"zero_stage": 2}, world_size=2)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / f"step-{STEPS:08d}", output_loading_info=True
    )
    assert model.dtype == torch.float32  # the master weights, exactly
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / f"step-{STEPS:08d}").eos_token_id is not None
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(parameter.dtype)), name


def test_auto_starts_a_new_run_where_there_is_no_checkpoint(train: Train, tmp_path: Path) -> None:
    assert "no checkpoint in run: training starts at step 0\n" in train("run_dir=run", "--resume", "auto")
    assert [step["step"] for step in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_is_used(train: Train, tmp_path: Path) -> None:
    train("run_dir=run", *SETTINGS)
    interrupt(tmp_path / "run", INTERRUPTED)
    weights = tmp_path / "run" / f"step-{INTERRUPTED:08d}" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-7] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(ToolkitError, match=r"step-00000005 is damaged: model\.safetensors"):
        train("run_dir=run", *SETTINGS, "--resume", "auto", "--strict")
    output = train("run_dir=run", *SETTINGS, "--resume", "auto")
    (line,) = (line for line in output.splitlines() if "resume  " in line)
    assert "run/step-00000004, checkpoint " in line
    assert "step-00000005 is damaged: model.safetensors" in line
    assert line.endswith("step-00000004 is used")
    assert [step["step"] for step in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_training_can_be_made_longer(train: Train, tmp_path: Path) -> None:
    train("run_dir=run", "checkpoint.every=2", "schedule.name=constant", "schedule.warmup_steps=0", train__steps=4)
    train("run_dir=run", "schedule.name=constant", "schedule.warmup_steps=0", "--resume", "run", train__steps=6)
    assert [step["step"] for step in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_signal_saves_a_checkpoint_that_resumes(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    """One rank of two gets it, in the middle of step 3."""
    changes = {"parallel": {"zero_stage": zero_stage}, "world_size": 2}
    settings = (f"train.steps={STEPS}", "schedule.warmup_steps=0")
    train("run_dir=uninterrupted", *settings, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(MicroBatchLoader, "micro_batches", _signalled(MicroBatchLoader.micro_batches))
        with pytest.raises(ToolkitError, match=r"after step 3 of 8; saved .*step-00000003") as error:
            train("run_dir=run", *settings, **changes)
    assert error.value.exit_code == 75
    assert not list((tmp_path / "run").glob(".lock*"))
    train("run_dir=run", *settings, "--resume", "auto", **changes)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "uninterrupted")


def _signalled(micro_batches: Callable[..., Any]) -> Callable[..., Any]:
    def watched(loader: MicroBatchLoader, step: int, ahead: Any, **place: int) -> Any:
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR1)
        yield from micro_batches(loader, step, ahead, **place)

    return watched


def test_a_skipped_update_is_remembered(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an fp16 overflow: one update fewer than steps, and Adam's bias correction continues from there."""
    update = DeepSpeedEngine._update

    def skipping(engine: DeepSpeedEngine, totals: torch.Tensor) -> Update:
        if engine.engine.global_steps == 0 and not getattr(engine, "skipped", False):
            engine.skipped = True  # type: ignore[attr-defined]
            engine._fp16 = True
            deepspeed_patches.discard_gradients(engine.engine, micro_steps=engine.engine.micro_steps + 1)
            return Update(totals=totals.tolist(), grad_norm=1.0, skipped=True)
        return update(engine, totals)

    monkeypatch.setattr(DeepSpeedEngine, "_update", skipping)
    train("run_dir=run", *SETTINGS, parallel={"zero_stage": 0})
    state = json.loads((tmp_path / "run" / f"step-{INTERRUPTED:08d}" / "trainer_state.json").read_text())
    assert (state["step"], state["updates"]) == (INTERRUPTED, INTERRUPTED - 1)


class TestBadInput:
    """One line each, before anything is written."""

    @pytest.mark.parametrize(
        ("argv", "given", "remedy"),
        [
            (["--resume", "nowhere"], {"--resume": "nowhere"}, None),
            (["--resume", "auto"], {"--resume": "auto", "run_dir": None}, None),
            (
                ["--resume", "run", "batch.global_batch_size=32"],
                {"batch.global_batch_size": 32},
                ("batch.global_batch_size", 16),
            ),
            (["--resume", "run", "train.seed=9"], {"train.seed": 9}, None),
            (["--resume", "run", "data.seq_len=16"], {"data.seq_len": 16}, None),
            (["--resume", "run", "optimizer.name=sgd", "optimizer.lr=0.1"], {"optimizer.name": "sgd"}, None),
            (["--resume", "run", "model.overrides.n_layer=3"], {"model.overrides": None}, None),
            (["--resume", "run", "train.steps=4"], {"train.steps": 4}, ("train.steps", "more than 4")),
            (["--resume", "run/model"], {"--resume": "run/model"}, None),
        ],
    )
    def test_is_rejected_in_one_line(
        self, train: Train, tmp_path: Path, argv: list[str], given: dict[str, object], remedy: object
    ) -> None:
        train("run_dir=run", "checkpoint.every=2")
        before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
        with refused(ToolkitError, *given, remedy=remedy) as found:
            train("train.steps=6", *argv)
        shown = {field: value for field, value in found[0].settings if field != "model.overrides"}
        assert given == {"model.overrides": None} or shown == given
        after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
        assert after == before
