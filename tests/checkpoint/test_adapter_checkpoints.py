"""Checkpoints of LoRA runs hold adapters alone: peft loads them, every layout resumes from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import SETTINGS, STEPS, assert_same_bits, interrupt, tensors, timeless
from plain_fine_tuning import save_base

from toolkit.checkpoint.verify import verify
from toolkit.cli.sample import GenerativeModel
from toolkit.convert.export_model import export_checkpoint
from toolkit.errors import ToolkitError

Train = Callable[..., str]
INTERRUPTED = 5
LORA = {"r": 4, "targets": ["all-linear"]}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "z0": ({"zero_stage": 0}, 2),
    "z1": ({"zero_stage": 1}, 2),
    "z3": ({"zero_stage": 3}, 2),
    "tp2-sp": ({"tp": 2, "sequence_parallel": True, "zero_stage": 1}, 2),
    "tp2-pp2": ({"tp": 2, "pp": 2, "zero_stage": 1}, 4),
    "pp2": ({"pp": 2, "zero_stage": 0}, 2),
}
WHOLE = pytest.mark.whole


def changes(folder: Path, family: str, layout: str, **lora: Any) -> dict[str, Any]:
    section, world_size = LAYOUTS[layout]
    model = {"name_or_path": str(save_base(folder / "published", family)), "init": "random", "lora": LORA | lora}
    return {"model": model, "parallel": section, "world_size": world_size, "batch__micro_batch_size": 2}


@pytest.mark.parametrize(
    ("family", "before", "after", "lora"),
    [
        ("gpt2", "z3", "tp2-pp2", {"dora": True}),
        pytest.param("llama", "tp2-pp2", "z3", {"dora": True}, marks=WHOLE),
        pytest.param("gpt2", "z3", "tp2-pp2", {}, marks=WHOLE),
        pytest.param("llama", "tp2-pp2", "z3", {}, marks=WHOLE),
        pytest.param("qwen3", "z1", "tp2-sp", {}, marks=WHOLE),
        pytest.param("gpt2", "tp2-sp", "pp2", {}, marks=WHOLE),
        pytest.param("llama", "pp2", "z0", {}, marks=WHOLE),
    ],
)
def test_adapters_resume_in_another_layout(
    train: Train, tmp_path: Path, family: str, before: str, after: str, lora: dict[str, bool]
) -> None:
    train("run_dir=run", *SETTINGS, **changes(tmp_path, family, before, **lora))
    start = tmp_path / "run" / f"step-{INTERRUPTED:08d}"
    assert verify(start) == []
    assert {name.split(" ")[0] for name in tensors(start)} == {"adapter_model", "exp_avg", "exp_avg_sq"}
    assert all("lora_" in name for name in tensors(start))
    train("run_dir=on", *SETTINGS, "--resume", str(start), **changes(tmp_path, family, after, **lora))
    resumed, whole = timeless(tmp_path / "on"), timeless(tmp_path / "run")[INTERRUPTED:]
    assert [step["loss"] for step in resumed] == pytest.approx([step["loss"] for step in whole], rel=1e-6)
    assert [step["grad_norm"] for step in resumed] == pytest.approx([step["grad_norm"] for step in whole], rel=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("layout", ["z1", "tp2-pp2", "z3"])
def test_the_same_layout_resumes_adapters_bit_for_bit(train: Train, tmp_path: Path, layout: str) -> None:
    """With dropout of the adapters' inputs."""
    fields = changes(tmp_path, "llama", layout, dropout=0.2)
    train("run_dir=run", *SETTINGS, **fields)
    uninterrupted = timeless(tmp_path / "run")
    interrupt(tmp_path / "run", INTERRUPTED)
    train("run_dir=run", *SETTINGS, "--resume", "auto", **fields)
    assert timeless(tmp_path / "run") == uninterrupted
    last = f"step-{STEPS:08d}"
    assert_same_bits(tmp_path / "run" / last, tmp_path / f"later-{last}")


@pytest.mark.parametrize("layout", ["tp2-pp2", pytest.param("z3", marks=WHOLE)])
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=WHOLE), pytest.param("qwen3", marks=WHOLE)])
def test_peft_loads_the_trained_adapters_beside_weights_that_were_never_published(
    train: Train, tmp_path: Path, family: str, layout: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train("run_dir=run", "checkpoint.every=2", **changes(tmp_path, family, layout))
    run = tmp_path / "run"
    config = json.loads((run / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run / "base")
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    ids = torch.arange(24).reshape(2, 12)
    before = base(input_ids=ids).logits.detach().clone()
    logits = []
    for folder in (run / "model", run / "step-00000004"):
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run / "base"), folder).eval()
        assert any(bool(p.any()) for name, p in loaded.named_parameters() if "lora_B" in name)
        logits.append(loaded(input_ids=ids).logits.detach())
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], before)


@pytest.mark.parametrize(
    ("family", "layout", "lora"),
    [
        ("gpt2", "z1", {"dora": True}),
        pytest.param("llama", "tp2-pp2", {"dora": True}, marks=WHOLE),
        pytest.param("llama", "z1", {"rslora": True}, marks=WHOLE),
        pytest.param("qwen3", "z1", {}, marks=WHOLE),
    ],
)
def test_merged_weights_compute_what_peft_computes(
    train: Train, tmp_path: Path, family: str, layout: str, lora: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train("run_dir=first", *SETTINGS, "optimizer.lr=0.02", **changes(tmp_path, family, layout, **lora))
    run = (tmp_path / "first").rename(tmp_path / "run")  # adapter_config.json names a directory that is gone
    merged = tmp_path / "merged"
    export_checkpoint(run / "model", merged, merge=True)
    export_checkpoint(run, tmp_path / "adapters")
    ids = torch.arange(24).reshape(2, 12)
    base = AutoModelForCausalLM.from_pretrained(run / "base").eval()
    plain = base(input_ids=ids).logits.detach()
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    expected = adapted(input_ids=ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(merged).eval()
    found = loaded(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (found - plain).abs().max() > 1e-2 * expected.abs().max()
    for name, weight in adapted.merge_and_unload().named_parameters():
        assert torch.allclose(loaded.get_parameter(name), weight, rtol=0, atol=1e-6 * float(weight.abs().max())), name
    text = GenerativeModel(str(run)).continue_text("The", tokens=4, temperature=0)
    assert text == GenerativeModel(str(merged)).continue_text("The", tokens=4, temperature=0)
    with pytest.raises(ToolkitError, match="no adapters to merge"):
        export_checkpoint(merged, tmp_path / "again", merge=True)
