"""Training states in PyTorch's distributed format, held against PyTorch's own reader and the losses of the writer."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import LiveBytes
from daily import daily
from megatron_runs import (
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    METADATA,
    POSITIONS,
    MegatronLayout,
    equal_in_megatron,
    import_megatron,
    train_with_megatron,
)
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from trainer_runs import samples_of, train_with_trainer
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.checkpoint.reader import CheckpointReader
from toolkit.config.recipe import Recipe
from toolkit.convert.export_state import export_state
from toolkit.convert.import_run import import_run
from toolkit.convert.megatron_states import MegatronForm
from toolkit.errors import CheckpointError
from toolkit.model_init.build_model import load_config

Train = Callable[..., str]
Ranks = Callable[..., list[Any]]
SAVED_STEP, STEPS = 4, 7
VOCABULARY = 328
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CHANGES: dict[str, Any] = {"train__steps": STEPS, "overrides__vocab_size": 321}
WIDE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 321,
}
LLAMA = {"name_or_path": "llama-3.2-1b", "overrides": {**WIDE, "intermediate_size": 64, "head_dim": 12}}
MIXTRAL: dict[str, Any] = {
    "name_or_path": "mixtral-8x7b",
    "overrides": {
        **WIDE,
        "intermediate_size": 64,
        "head_dim": 12,
        "num_local_experts": 4,
        "sliding_window": None,
        "router_aux_loss_coef": 0.0,
    },
}
QWEN3_MOE: dict[str, Any] = {
    "name_or_path": "qwen3-30b-a3b",
    "overrides": {
        **WIDE,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.0,
    },
}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def whole(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """What PyTorch itself reads, nested by the parts of names."""
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    content: dict[str, Any] = torch.load(tmp_path / "whole.pt", weights_only=False)
    return content


@pytest.mark.parametrize(
    ("fsdp", "changes"),
    [
        pytest.param(2, CHANGES, id="fsdp2-gpt2"),
        pytest.param(2, {"train__steps": STEPS, "model": LLAMA}, id="fsdp2-llama"),
    ],
)
def test_a_run_of_the_trainer_with_fsdp_goes_on_here(
    train: Train,
    make_recipe: Callable[..., Recipe],
    ranks: Ranks,
    tmp_path: Path,
    fsdp: int,
    changes: dict[str, Any],
) -> None:
    recipe = make_recipe(**changes)
    theirs = ranks(train_with_trainer, 2, str(tmp_path / "theirs"), recipe, fsdp, SAVED_STEP)[0]
    source = tmp_path / "theirs" / f"checkpoint-{SAVED_STEP}"
    imported = import_run(source, tmp_path / "ours", recipe)
    assert len(imported.notices) == 1, imported.notices
    saved = CheckpointReader(tmp_path / "ours" / f"step-{SAVED_STEP:08d}")
    weights = whole(source / "pytorch_model_fsdp_0", tmp_path)["model"]
    moments = whole(source / "optimizer_0", tmp_path)["optimizer"]["state"]
    for name in saved.specs["model"]:
        assert torch.equal(saved.tensor("model", name).clone(), weights[name])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved.tensor(kind, name).clone(), moments[name][kind])
    train("run_dir=ours", "--resume", "auto", world_size=2, **(changes | {"parallel": {"tp": 2}}))
    assert losses(tmp_path / "ours") == pytest.approx(theirs[SAVED_STEP:], rel=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("fsdp", "kind"),
    [(1, "SHARDED_STATE_DICT"), (2, "FULL_STATE_DICT")],  # FSDP1 of torch 2.13 crashes as it gathers on a CPU
)
def test_a_run_of_either_fsdp_goes_on_here_sharded_or_gathered(
    train: Train,
    make_recipe: Callable[..., Recipe],
    ranks: Ranks,
    tmp_path: Path,
    fsdp: int,
    kind: str,
) -> None:
    recipe = make_recipe(**CHANGES)
    theirs = ranks(train_with_trainer, 2, str(tmp_path / "theirs"), recipe, fsdp, SAVED_STEP, kind)[0]
    source = tmp_path / "theirs" / f"checkpoint-{SAVED_STEP}"
    imported = import_run(source, tmp_path / "ours", recipe)
    assert imported.title == f"FSDP (Trainer or accelerate), step {SAVED_STEP}"
    train("run_dir=ours", "--resume", "auto", world_size=2, **(CHANGES | {"parallel": {"tp": 2}}))
    assert losses(tmp_path / "ours") == pytest.approx(theirs[SAVED_STEP:], rel=1e-6)


def gathered(folder: Path, config: Any, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint of FSDP as one rank gathers it, with random moments; return the weights."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    states = {
        name: {"step": torch.tensor(5.0), "exp_avg": torch.rand_like(value), "exp_avg_sq": torch.rand_like(value)}
        for name, value in weights.items()
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": list(weights)}
    folder.mkdir(parents=True)
    torch.save(weights | changes.pop("weights", {}), folder / "pytorch_model_fsdp.bin")
    torch.save({"state": states | changes, "param_groups": [group]}, folder / "optimizer.bin")
    config.save_pretrained(folder)
    return weights


def test_what_one_rank_of_fsdp_gathered_is_read_by_name(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(**CHANGES)
    weights = gathered(tmp_path / "checkpoint-5", load_config(recipe.model))
    import_run(tmp_path / "checkpoint-5", tmp_path / "ours", recipe)
    saved = CheckpointReader(tmp_path / "ours" / "step-00000005")
    states = torch.load(tmp_path / "checkpoint-5" / "optimizer.bin")["state"]
    for name, value in weights.items():
        assert torch.equal(saved.tensor("model", name).clone(), value)
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved.tensor(kind, name).clone(), states[name][kind])


class RealBytes(LiveBytes):
    """Without tensors of the meta device, which have no memory."""

    def _watch(self, tensor: torch.Tensor, *, counts: bool) -> None:
        super()._watch(tensor, counts=counts and tensor.device.type != "meta")


def test_an_import_has_a_part_and_few_tensors_in_memory(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(**CHANGES)
    weights = gathered(tmp_path / "checkpoint-5", load_config(recipe.model))
    import_run(tmp_path / "checkpoint-5", tmp_path / "ours", recipe)
    export_state(tmp_path / "ours", tmp_path / "step-5", form="dcp")
    with RealBytes() as live:
        written = import_run(tmp_path / "step-5", tmp_path / "again", recipe).written
    largest = max(value.nbytes for value in weights.values())
    # The part that is read, the tensor that it is of, and the one before, which is not written yet.
    assert largest <= live.peak_bytes <= 4 * largest < written.nbytes / 3


@pytest.mark.parametrize("form", ["dcp", "megatron"])
def test_an_export_has_few_tensors_in_memory(make_recipe: Callable[..., Recipe], tmp_path: Path, form: str) -> None:
    recipe = make_recipe(**CHANGES)
    weights = gathered(tmp_path / "checkpoint-5", load_config(recipe.model))
    import_run(tmp_path / "checkpoint-5", tmp_path / "ours", recipe)
    with RealBytes() as live:
        written = export_state(tmp_path / "ours", tmp_path / "out", form=form).written
    largest = max(value.nbytes for value in weights.values())
    # What is read, and what is made of it.
    assert largest <= live.peak_bytes <= 3 * largest < written.nbytes / 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"transformer.wte.weight": torch.zeros(2, 2)}}, r"transformer\.wte\.weight is \[2, 2\] there"),
        ({"weights": {"transformer.wte.weight": "text"}}, "not the weights of a model"),
        ({"transformer.wte.weight": {"exp_avg": torch.zeros(1)}}, r"exp_avg of transformer\.wte\.weight is \[1\]"),
        ({"transformer.wte.weight": 1}, "not the state of an optimizer"),
        ({"transformer.wte.weight": {}}, r"it has no states of transformer\.wte\.weight, which was frozen"),
        ({"transformer.wte.weight": {"exp_avg": torch.zeros(321, 48)}}, r"no exp_avg_sq of transformer\.wte\.weight"),
    ],
)
def test_a_damaged_gathered_state_is_refused_in_one_line(
    make_recipe: Callable[..., Recipe], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    recipe = make_recipe(**CHANGES)
    gathered(tmp_path / "checkpoint-5", load_config(recipe.model), **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        import_run(tmp_path / "checkpoint-5", tmp_path / "ours", recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        pytest.param(CHANGES, {"pp": 2}, id="gpt2"),
        pytest.param({"train__steps": STEPS, "model": MIXTRAL}, {"ep": 2}, id="mixtral"),
        pytest.param({"train__steps": STEPS, "model": QWEN3_MOE}, {"zero_stage": 2}, id="qwen3_moe"),
    ],
)
def test_a_run_of_the_trainer_with_ddp_goes_on_here(
    train: Train,
    make_recipe: Callable[..., Recipe],
    ranks: Ranks,
    tmp_path: Path,
    changes: dict[str, Any],
    parallel: dict[str, int],
) -> None:
    recipe = make_recipe(**changes)
    theirs = ranks(train_with_trainer, 2, str(tmp_path / "theirs"), recipe, 0, SAVED_STEP)[0]
    source = tmp_path / "theirs" / f"checkpoint-{SAVED_STEP}"
    imported = import_run(source, tmp_path / "ours", recipe)
    assert len(imported.notices) == 1, imported.notices
    saved = CheckpointReader(tmp_path / "ours" / f"step-{SAVED_STEP:08d}")
    # save_pretrained stores each expert by itself; transformers puts them together again.
    for name, weight in AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).named_parameters():
        assert torch.equal(saved.tensor("model", name).clone(), weight)
    train("run_dir=ours", "--resume", "auto", world_size=2, **(changes | {"parallel": parallel}))
    assert losses(tmp_path / "ours") == pytest.approx(theirs[SAVED_STEP:], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "removed", "message"),
    [
        ({"num_local_experts": 8}, None, r"mlp\.gate\.weight is \[4, 48\] there, and \[8, 48\]"),
        ({}, "block_sparse_moe.experts.2.w1.weight", r"model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ({}, "block_sparse_moe.gate.weight", r"it has no model\.layers\.0\.mlp\.gate\.weight"),
    ],
)
def test_experts_that_do_not_fit_are_refused_in_one_line(
    make_recipe: Callable[..., Recipe], tmp_path: Path, changes: dict[str, Any], removed: str | None, message: str
) -> None:
    recipe = make_recipe(model=MIXTRAL)
    model = AutoModelForCausalLM.from_config(load_config(recipe.model), dtype=torch.float32)
    source = tmp_path / "checkpoint-4"
    model.save_pretrained(source)
    file = source / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if name != f"model.layers.0.{removed}"}
    save_file(weights, file)
    torch.save(torch.optim.AdamW(model.parameters()).state_dict(), source / "optimizer.pt")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": SAVED_STEP}))
    other = make_recipe(model=MIXTRAL | {"overrides": MIXTRAL["overrides"] | changes})
    with pytest.raises(CheckpointError, match=message) as caught:
        import_run(source, tmp_path / "ours", other)
    assert str(caught.value).isprintable()


GPT2 = {"n_embd": HIDDEN, "n_inner": FFN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "tie_word_embeddings": False},
    "gpt2-tied": {**GPT2, "tie_word_embeddings": True},
    "llama": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "qwen3": {"rms_norm_eps": 1e-5, "rope_parameters": PLAIN, "tie_word_embeddings": False},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_parameters": PLAIN, "num_local_experts": EXPERTS, "sliding_window": None},
}


def megatron_recipe(make_recipe: Callable[..., Recipe], family: str, folder: Path) -> dict[str, Any]:
    """Changes of the small recipe to the model, the optimizer and the schedule of megatron_runs.py."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": POSITIONS,
    }
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "activation_function": "gelu"}
    model_type = family.removesuffix("-tied")
    own = OVERRIDES[family] | (plain if model_type == "gpt2" else sizes)
    AutoConfig.for_model(model_type, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **own).save_pretrained(
        folder
    )
    return {
        "model": {"name_or_path": str(folder), "init": "random"},
        "schedule": {"name": "constant"},
        "train": {"steps": STEPS, "grad_clip": 1.0},
        "batch__global_batch_size": 4,
        "batch__micro_batch_size": 1,
    }


MEGATRON_KINDS = {
    "model": "optimizer.state.param.",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
}
"""Kinds of our states, and what Megatron-Core's keys of them begin with."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that PyTorch itself reads."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    values = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(dict(values), checkpoint_id=folder, no_dist=True)
    return values


def numbers(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All their numbers in order, however they are cut, fused and named. Where each belongs, the next losses show."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).sort().values


@pytest.mark.whole  # megatron-core is not a package of every day: pip install --no-deps megatron-core==0.16.1
@pytest.mark.parametrize("family", daily(list(OVERRIDES), lambda i, family: family in ("gpt2", "qwen3")))
def test_a_run_of_megatron_core_goes_on_here(
    train: Train, make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, family: str
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    import_megatron()
    changes = megatron_recipe(make_recipe, family, tmp_path / "model")
    recipe = make_recipe(**changes)
    samples = torch.stack([torch.cat([s["input_ids"], s["targets"][-1:]]) for s in samples_of(recipe)])
    source = tmp_path / "theirs" / f"iter_{SAVED_STEP:07d}"
    steps = list(samples.split(4))
    theirs = ranks(train_with_megatron, 4, str(source), family, steps, SAVED_STEP, VOCABULARY)[0]
    (source.parent / "latest_checkpointed_iteration.txt").write_text(f"{SAVED_STEP}\n")
    imported = import_run(source.parent, tmp_path / "ours", recipe)
    assert imported.title == f"Megatron-Core, step {SAVED_STEP}"
    assert len(imported.notices) == 1, imported.notices
    saved = CheckpointReader(tmp_path / "ours" / f"step-{SAVED_STEP:08d}")
    written = tensors_of(source)
    for kind, key in MEGATRON_KINDS.items():
        values = [value for name, value in written.items() if name.startswith(key)]
        assert torch.equal(numbers(values), numbers(saved.tensor(kind, name).clone() for name in saved.specs[kind])), (
            kind
        )
    train("run_dir=ours", "--resume", "auto", world_size=2, **(changes | {"parallel": {"zero_stage": 2}}))
    assert losses(tmp_path / "ours") == pytest.approx(theirs[SAVED_STEP:], rel=1e-6)
    # And back: Megatron-Core itself reads the same weights and moments from what is exported, and goes on as it would.
    start = str(tmp_path / "back" / source.name)
    form = MegatronForm(is_local=True)
    export_state(tmp_path / "ours" / f"step-{SAVED_STEP:08d}", tmp_path / "back", form="megatron", megatron=form)
    is_equal = ranks(equal_in_megatron, 4, [str(source), start], family, VOCABULARY)
    assert min(len(of_rank) for of_rank in is_equal) > LAYERS
    assert all(all(of_rank) for of_rank in is_equal)
    resume = partial(train_with_megatron, load=start)
    assert ranks(resume, 4, "", family, steps[SAVED_STEP:], None, VOCABULARY)[0] == theirs[SAVED_STEP:]


@pytest.mark.whole
@pytest.mark.parametrize("has_prefix", [False, True], ids=["one-name-space", "a-prefix-for-each-optimizer"])
def test_a_run_of_megatron_core_with_expert_parallelism_goes_on_here_and_there(
    train: Train, make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, has_prefix: bool
) -> None:
    """Experts have an optimizer of their own there: two lists of parameter groups."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    import_megatron()
    changes = megatron_recipe(make_recipe, "mixtral", tmp_path / "model")
    recipe = make_recipe(**changes)
    samples = torch.stack([torch.cat([s["input_ids"], s["targets"][-1:]]) for s in samples_of(recipe)])
    steps = list(samples.split(4))
    layout = MegatronLayout(ep=2)
    source = tmp_path / "theirs" / f"iter_{SAVED_STEP:07d}"
    write = partial(
        train_with_megatron, layout=layout, metadata=METADATA | {"chained_optim_avoid_prefix": not has_prefix}
    )
    theirs = ranks(write, 2, str(source), "mixtral", steps, SAVED_STEP, VOCABULARY)[0]
    import_run(source, tmp_path / "ours", recipe)
    train("run_dir=ours", "--resume", "auto", world_size=2, **(changes | {"parallel": {"ep": 2}}))
    assert losses(tmp_path / "ours") == pytest.approx(theirs[SAVED_STEP:], rel=1e-6)
    step = tmp_path / "ours" / f"step-{SAVED_STEP:08d}"
    form = MegatronForm(is_local=True, is_expert_parallel=True)
    export_state(step, tmp_path / "back", form="megatron", megatron=form)
    resume = partial(train_with_megatron, load=str(tmp_path / "back" / source.name), layout=layout)
    assert ranks(resume, 2, "", "mixtral", steps[SAVED_STEP:], None, VOCABULARY)[0] == theirs[SAVED_STEP:]
