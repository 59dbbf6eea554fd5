"""A run that meets a batch whose loss is not finite, or leaps: it stops, leaves the step out, or goes back."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import SETTINGS, assert_same_bits, interrupt, metrics, tensors, timeless

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.samples.samples import Samples
from toolkit.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.engines.full_forward import DataParallelEngine
from toolkit.engines.pipeline_engine import PipelineEngine
from toolkit.errors import NonFiniteError

Train = Callable[..., str]
Z2: dict[str, Any] = {"parallel": {"zero_stage": 2}, "world_size": 2}
BAD = 6
"""The global batch, from 0, whose loss is spoilt."""


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the loss of some global batches what it should not be, on every rank that computes one."""

    def patch(is_bad: Callable[[int], bool], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        target_tokens, losses = MicroBatchLoader.target_tokens, DeepSpeedEngine._losses
        number = [-1]

        def watched(loader: MicroBatchLoader, batch_index: int) -> int:
            number[0] = batch_index
            return target_tokens(loader, batch_index)

        def spoilt(engine: DeepSpeedEngine, output: Any, batch: MicroBatch) -> Any:
            loss, by_sample = losses(engine, output, batch)
            return (change(loss) if engine.model.training and is_bad(number[0]) else loss), by_sample

        monkeypatch.setattr(MicroBatchLoader, "target_tokens", watched)
        monkeypatch.setattr(DeepSpeedEngine, "_losses", spoilt)

    return patch


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def is_nan(loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan


def test_a_step_that_is_skipped_is_reported_and_the_run_goes_on(
    train: Train, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    spoil(lambda batch: batch == BAD, is_nan)
    output = train("run_dir=run", *SETTINGS, "train.on_nonfinite=skip", **Z2)
    steps = metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert [step["step"] for step in steps if step.get("skipped")] == [BAD + 1]
    assert steps[BAD]["loss"] is None
    assert "step 7: the loss is nan on ranks 0, 1. No weight changes in this step" in output
    assert [(event["kind"], event["step"]) for event in events(tmp_path / "run")] == [("skip", BAD + 1)]
    assert all(value.isfinite().all() for value in tensors(tmp_path / "run" / "step-00000008").values())


LAYOUTS = ("z1", "z2", "z3-offload", "z1-offload", "ddp", "fsdp", "tp2-z3", "pp2-z0", "pp2-z1", "tp2-pp2-z1", "u2-z2")
DAILY = ("z2", "z3-offload", "fsdp", "tp2-pp2-z1")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else pytest.mark.whole) for name in LAYOUTS]
)
def test_a_rollback_resumes_with_the_samples_after_the_bad_ones(
    train: Train, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The run equals one whose data never had them: rolled back from step 7 to step 4, without batches 4 to 6.

    The bad step has changed weights and moments before it is found to be bad: all of them must be restored.
    """
    settings = ("checkpoint.every=4", *SETTINGS[1:])
    strategy = Strategy.parse(name)
    where = {
        "parallel": strategy.apply(make_recipe(), 2).parallel.model_dump(exclude_defaults=True),
        "train__engine": strategy.engine,
        "world_size": strategy.world_size(2),
    }
    with monkeypatch.context() as patched:
        batch, count = Samples.batch, Samples.target_count

        def later(step: int) -> int:
            return step + 3 if step >= 4 else step

        patched.setattr(Samples, "batch", lambda own, step, at, **seed: batch(own, later(step), at, **seed))
        patched.setattr(Samples, "target_count", lambda samples, step, at: count(samples, later(step), at))
        train("run_dir=wanted", *settings, **where)
    for engine in (DataParallelEngine, PipelineEngine):
        monkeypatch.setattr(engine, "train_step", fails_after(engine.train_step, BAD + 1))
    output = train("run_dir=run", *settings, "train.on_nonfinite=rollback", **where)
    assert "Rolled back to step-00000004" in output
    assert timeless(tmp_path / "run") == timeless(tmp_path / "wanted")
    assert_same_bits(tmp_path / "run" / "step-00000008", tmp_path / "wanted" / "step-00000008")
    [event] = events(tmp_path / "run")
    assert (event["kind"], event["step"], event["to"], event["skipped_batches"]) == ("rollback", 7, 4, 3)


def fails_after(train_step: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Call number `count` takes its step, and then raises."""
    calls = [0]

    def watched(*arguments: Any, **options: Any) -> Any:
        result = train_step(*arguments, **options)
        calls[0] += 1
        if calls[0] == count:
            raise NonFiniteError("the loss is planted")
        return result

    return watched


def test_a_run_that_rolled_back_resumes_after_a_crash_bit_for_bit(
    train: Train, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    spoil(lambda batch: batch == 2, is_nan)
    settings = ("run_dir=run", *SETTINGS, "train.on_nonfinite=rollback")
    train(*settings, **Z2)
    whole = timeless(tmp_path / "run")
    interrupt(tmp_path / "run", 5)
    train(*settings, "--resume", "auto", **Z2)
    assert timeless(tmp_path / "run") == whole


def test_a_loss_spike_rolls_the_run_back(train: Train, tmp_path: Path, spoil: Callable[..., None]) -> None:
    spoil(lambda batch: batch == 11, lambda loss: 3 * loss)
    settings = ("checkpoint.every=5", "train.steps=14", "train.spike_sigmas=6", "train.spike_window=8")
    train("run_dir=run", *settings, **Z2)
    assert [(event["step"], event["to"]) for event in events(tmp_path / "run")] == [(12, 10)]
    assert [step["step"] for step in metrics(tmp_path / "run")] == list(range(1, 15))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_incidents_without_end_stop_the_run(
    train: Train, tmp_path: Path, spoil: Callable[..., None], policy: str
) -> None:
    spoil(lambda batch: batch >= 2, is_nan)
    with pytest.raises(NonFiniteError, match="Training stopped") as error:
        train("run_dir=run", *SETTINGS, f"train.on_nonfinite={policy}", "train.max_incidents=2", **Z2)
    assert len(str(error.value).splitlines()) == 1
    last = {"skip": 4, "rollback": 2}[policy]
    assert f"step-{last:08d} is of step {last}" in str(error.value)
    assert all(value.isfinite().all() for value in tensors(tmp_path / "run" / f"step-{last:08d}").values())


def test_before_the_first_checkpoint_a_rollback_is_a_skipped_step(
    train: Train, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    spoil(lambda batch: batch == 1, is_nan)
    output = train("run_dir=run", "train.steps=4", "checkpoint.every=3", "train.on_nonfinite=rollback", **Z2)
    assert "There is no checkpoint yet" in output
    assert [bool(step.get("skipped")) for step in metrics(tmp_path / "run")] == [False, True, False, False]
