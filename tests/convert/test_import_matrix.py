"""Whole training states of other programs by family: bitwise their weights and moments, and their next losses."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daily import daily
from plain_deepspeed import KINDS, Truth, make_universal
from test_import_distributed import LLAMA, PLAIN, SAVED_STEP, STEPS, WIDE, losses, whole
from titan_runs import model_of, train_with_titan
from trainer_runs import train_with_trainer
from trainer_zero3 import train_with_zero3

from toolkit.checkpoint.reader import CheckpointReader
from toolkit.config.recipe import Recipe
from toolkit.convert.export_state import export_state
from toolkit.convert.import_run import import_run
from toolkit.model_init.build_model import load_config

Train = Callable[..., str]
Ranks = Callable[..., list[Any]]
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "name_or_path": "gpt2-tiny",
        "overrides": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 321},
    },
    "llama": LLAMA,
    "qwen3": {"name_or_path": "qwen3-0.6b", "overrides": LLAMA["overrides"]},
    "mixtral": {
        "name_or_path": "mixtral-8x7b",
        "overrides": {
            **WIDE,
            "head_dim": 12,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "sliding_window": None,
            "router_aux_loss_coef": 0.0,  # which the Trainer's loss of trainer_runs.py leaves out
        },
    },
}
LAYOUTS = {"gpt2": {"pp": 2}, "llama": {"tp": 2}, "qwen3": {"tp": 2}, "mixtral": {"ep": 2}}
"""In which a state goes on here: another one than that in which it was written."""
OUR_KINDS = {"fp32": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Written(NamedTuple):
    """What another program left: where, the losses of all its steps, and its states at the saved one."""

    place: Path
    losses: list[float]
    states: Truth


def write_by_fsdp2(ranks: Ranks, tmp_path: Path, recipe: Recipe) -> Written:
    folder = tmp_path / "theirs"
    curve = ranks(train_with_trainer, 2, str(folder), recipe, 2, SAVED_STEP)[0]
    place = folder / f"checkpoint-{SAVED_STEP}"
    weights = whole(place / "pytorch_model_fsdp_0", tmp_path)["model"]
    moments = whole(place / "optimizer_0", tmp_path)["optimizer"]["state"]
    states = {
        name: {"fp32": weights[name]} | {kind: state[kind] for kind in KINDS[1:]} for name, state in moments.items()
    }
    return Written(place=place, losses=curve, states=states)


def write_by_zero3(ranks: Ranks, tmp_path: Path, recipe: Recipe) -> Written:
    folder = tmp_path / "theirs"
    curve, states = ranks(train_with_zero3, 2, str(folder), recipe, SAVED_STEP)[0]
    return Written(place=folder / f"checkpoint-{SAVED_STEP}", losses=curve, states=states)


def write_universal(ranks: Ranks, tmp_path: Path, recipe: Recipe) -> Written:
    written = write_by_zero3(ranks, tmp_path, recipe)
    return written._replace(place=make_universal(written.place / f"global_step{SAVED_STEP}"))


WRITERS: dict[str, Callable[[Ranks, Path, Recipe], Written]] = {
    "trainer-fsdp2": write_by_fsdp2,
    "trainer-zero3": write_by_zero3,
    "universal": write_universal,
}


@pytest.mark.parametrize("family", daily(MODELS, lambda i, family: family == "qwen3"))
@pytest.mark.parametrize("writer", daily(WRITERS, lambda i, writer: writer == "trainer-zero3"))
def test_a_state_is_bitwise_that_of_the_writer_and_its_next_losses_follow(
    train: Train, make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, writer: str, family: str
) -> None:
    changes: dict[str, Any] = {"train__steps": STEPS, "model": MODELS[family]}
    recipe = make_recipe(**changes)
    written = WRITERS[writer](ranks, tmp_path, recipe)
    import_run(written.place, tmp_path / "ours", recipe)
    saved = CheckpointReader(tmp_path / "ours" / f"step-{SAVED_STEP:08d}")
    assert set(saved.specs["model"]) == set(written.states)
    for name, states in written.states.items():
        for kind, value in states.items():
            assert torch.equal(saved.tensor(OUR_KINDS[kind], name).clone(), value), f"{kind} of {name}"
    train("run_dir=ours", "--resume", "auto", world_size=2, **(changes | {"parallel": LAYOUTS[family]}))
    assert losses(tmp_path / "ours") == pytest.approx(written.losses[SAVED_STEP:], rel=1e-6)


QWEN3_MOE: dict[str, Any] = {
    "name_or_path": "qwen3-30b-a3b",
    "overrides": {
        **LLAMA["overrides"],
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.0,
    },
}
TITAN_MODELS = {**MODELS, "qwen3_moe": QWEN3_MOE, "mistral": {"name_or_path": "mistral-7b-v0.1", "overrides": WIDE}}
TITAN_FORMS = {"llama": "dcp", "qwen3": "dcp", "qwen3_moe": "dcp", "mixtral": "titan-hf", "mistral": "titan-hf"}
"""The family, and the format of `dstk export` that has torchtitan's names of it. It has no GPT-2."""
TITAN_PROGRAMS = {"dcp": "torchtitan", "titan-hf": "torchtitan (transformers_modeling_backend)"}


@pytest.mark.whole
@pytest.mark.parametrize("family", TITAN_FORMS)
def test_a_run_of_torchtitan_goes_on_here_and_is_bitwise_the_same_when_exported(
    train: Train, make_recipe: Callable[..., Recipe], ranks: Ranks, tmp_path: Path, family: str
) -> None:
    overrides = TITAN_MODELS[family]["overrides"] | {"tie_word_embeddings": False, "rope_parameters": PLAIN}
    changes: dict[str, Any] = {"train__steps": STEPS, "model": TITAN_MODELS[family] | {"overrides": overrides}}
    recipe = make_recipe(**changes)
    theirs = ranks(train_with_titan, 2, str(tmp_path / "theirs"), recipe, SAVED_STEP)[0]
    imported = import_run(tmp_path / "theirs", tmp_path / "ours", recipe)
    program = TITAN_PROGRAMS[TITAN_FORMS[family]]
    assert imported.title == f"{program}, step {SAVED_STEP}"
    assert not any("balanced its experts" in notice for notice in imported.notices)
    export_state(tmp_path / "ours" / f"step-{SAVED_STEP:08d}", tmp_path / "back", form=TITAN_FORMS[family])
    content = whole(tmp_path / "theirs" / f"step-{SAVED_STEP}", tmp_path)
    content |= {f"optimizer.{key}": value for key, value in content.pop("optimizer").items()}
    tensors = {
        key: value for key, value in content.items() if torch.is_tensor(value) and not key.endswith("expert_bias_E")
    }
    back = whole(tmp_path / "back", tmp_path)
    weights = [key for key in tensors if not key.startswith("optimizer.")]
    assert len(tensors) == (2 + len(KINDS[1:])) * len(weights)  # the weight itself, its step and its moments
    for key, value in tensors.items():
        assert torch.equal(back[key], value), key
    train("run_dir=ours", "--resume", "auto", world_size=2, **(changes | {"parallel": LAYOUTS.get(family, {"tp": 2})}))
    assert losses(tmp_path / "ours") == pytest.approx(theirs[SAVED_STEP:], rel=1e-6)


@pytest.mark.daily
def test_old_names_of_torchtitans_experts_are_read_and_biases_of_its_routers_are_mentioned(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = make_recipe(train__steps=STEPS, model=QWEN3_MOE, optimizer__name="sgd")
    states = model_of(load_config(recipe.model)).state_dict()
    renamed = {re.sub(r"routed_experts\.inner_experts\.(w\d)_E..$", r"experts.\1", key): states[key] for key in states}
    assert renamed.keys() != states.keys()
    notices = []
    for number, content in enumerate((states, renamed)):
        content["layers.1.moe.expert_bias_E"] = torch.tensor([0.0, number, 0.0, 0.0])
        dcp.save(content, checkpoint_id=tmp_path / f"theirs-{number}" / f"step-{SAVED_STEP}", no_dist=True)
        imported = import_run(tmp_path / f"theirs-{number}", tmp_path / f"ours-{number}", recipe)
        notices.append([notice for notice in imported.notices if "balanced its experts" in notice])
    assert notices == [[], [ANY]]
    new, old = (CheckpointReader(tmp_path / f"ours-{number}" / f"step-{SAVED_STEP:08d}") for number in range(2))
    for name in new.specs["model"]:
        assert torch.equal(new.tensor("model", name).clone(), old.tensor("model", name).clone()), name
    gate_up = new.tensor("model", "model.layers.1.mlp.experts.gate_up_proj").clone()
    block = "layers.1.moe.routed_experts.inner_experts"
    assert torch.equal(gate_up, torch.cat([states[f"{block}.w1_EFD"], states[f"{block}.w3_EFD"]], dim=1))
