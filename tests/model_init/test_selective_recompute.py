"""Selective recomputation of any family: the same gradients from fewer bytes, or a refusal before anything is built."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allocations import SavedForBackward
from config_jobs import job
from family_check import situations, tiny_model
from refusals import refused
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.checkpoint.trainer_state import TrainerState
from toolkit.config import recipe_problems
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.trainer import trainer_config
from toolkit.errors import ConfigError, ModelError
from toolkit.model_init.build_model import build_model
from toolkit.model_init.selective_recompute import recompute_attention
from toolkit.models.families.registry import FAMILIES, find_spec
from toolkit.parallel.loss import token_loss_sum
from toolkit.parallel.tiny_model import tiny_config

Make = Callable[..., Recipe]
DAILY = ("gpt2", "llama", "gemma3_text", "mixtral", "gpt_oss")


def dropping(model: PreTrainedModel) -> PreTrainedModel:
    """In training mode; whatever can be dropped is."""
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.1
    return model


def one_pass(model: PreTrainedModel) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Bytes kept for backward, loss and gradients."""
    torch.manual_seed(3)
    model.zero_grad()
    _, inputs, labels = next(situations(model))
    with SavedForBackward(model) as saved:
        loss = token_loss_sum(model(input_ids=inputs[0], use_cache=False).logits, labels)
    kept = saved.bytes
    loss.backward()
    return kept, loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_family(family: str) -> None:
    model = dropping(tiny_model(family))
    kept, loss, gradients = one_pass(model)
    recompute_attention(model)
    kept_now, loss_now, gradients_now = one_pass(model)
    assert loss_now == loss
    assert [name for name, value in gradients.items() if not torch.equal(value, gradients_now[name])] == []
    assert kept_now < kept


@pytest.mark.parametrize("family", DAILY)
def test_gradients_are_the_same_from_fewer_bytes(family: str) -> None:
    check_family(family)


@pytest.mark.whole
@pytest.mark.parametrize(
    "family", sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if find_spec(name).attention == "interface")
)
def test_gradients_of_any_family_are_the_same_from_fewer_bytes(family: str) -> None:
    try:
        one_pass(dropping(tiny_model(family)))
    except (ModelError, RuntimeError) as error:
        pytest.skip(f"the tiny model does not train: {error}")
    check_family(family)


def test_the_families_that_are_refused_are_those_without_the_interface() -> None:
    """All that do not import it, but for those that are made of another family's layers."""
    models = Path(transformers.__file__).parent / "models"
    without = {
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if not any(
            "ALL_ATTENTION_FUNCTIONS" in path.read_text(encoding="utf-8")
            for path in (models / model_type_to_module_name(name)).glob("modeling_*.py")
        )
    }
    composed = {"fuyu", "got_ocr2", "gpt-sw3", "internlm3", "iquestcoder"}
    assistants = {"gemma4_assistant", "gemma4_unified_assistant"}
    # GIT's tower for images goes through the interface, and its decoder does not.
    named = {name for name, spec in FAMILIES.items() if spec.attention != "interface"}
    assert without - composed - assistants == named - {"git"}


@pytest.mark.parametrize("family", ["bloom", "falcon", "gpt_neo", "gptj"])
def test_a_model_that_cannot_be_reached_is_refused_even_where_nobody_looked_before(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    remedy = ("parallel.recompute", "full or none")
    with refused(ModelError, "parallel.recompute", "model_type", remedy=remedy):
        recompute_attention(model)


def test_a_family_that_nobody_listed_is_refused_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "gptj")
    model = AutoModelForCausalLM.from_config(tiny_config("gptj"))
    with refused(ModelError, "parallel.recompute", "model_type"):
        recompute_attention(model)


def test_another_model_of_the_same_process_is_left_alone() -> None:
    recomputed, other = (dropping(tiny_model("llama")) for _ in range(2))
    before = one_pass(other)[0]
    recompute_attention(recomputed)
    assert one_pass(other)[0] == before


def test_evaluation_computes_attention_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").eval()
    recompute_attention(model)
    monkeypatch.setattr("toolkit.model_init.selective_recompute.checkpoint", pytest.fail)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"name_or_path": "bloom-560m"}},
            (
                "parallel.recompute=selective with model.name_or_path=bloom-560m: bloom computes attention in its own "
                "layers, not through the attention interface of transformers. Set parallel.recompute to full or none."
            ),
        ),
        (
            {"model": {"name_or_path": "bloom-560m"}, "train__engine": "ddp"},
            "parallel.recompute=selective with model.name_or_path=bloom-560m: bloom computes attention",
        ),
        (
            {"model__attn_implementation": "eager", "overrides__reorder_and_upcast_attn": True},
            "parallel.recompute=selective with model.name_or_path=gpt2-tiny: reorder_and_upcast_attn=true with eager",
        ),
    ],
)
def test_a_recipe_is_refused_before_its_model_is_built(
    make_recipe: Make, changes: dict[str, Any], message: str
) -> None:
    found = recipe_problems(make_recipe(parallel={"recompute": "selective"}, **changes))
    assert [line for line in found if line.startswith(message)] != []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_recipe_that_names_it_trains_with_it(make_recipe: Make, attention: str) -> None:
    make = {"model__attn_implementation": attention, "overrides__attn_pdrop": 0.1}
    kept = {
        recompute: one_pass(build_model(make_recipe(**make, parallel={"recompute": recompute})).train())[0]
        for recompute in ("none", "selective")
    }
    assert kept["selective"] < kept["none"]


def test_the_trainer_is_not_told_to_recompute_something_else() -> None:
    with refused(ConfigError, "parallel.recompute", remedy=("parallel.recompute", "full or none")):
        trainer_config(job(parallel={"recompute": "selective"}))


@pytest.mark.parametrize(("before", "after"), [("none", "selective"), ("selective", "full"), ("selective", "none")])
def test_a_run_may_go_on_with_another_recomputation(make_recipe: Make, before: str, after: str) -> None:
    old, new = (make_recipe(parallel={"recompute": recompute}) for recompute in (before, after))
    facts = dict.fromkeys(("samples", "tokens", "updates", "micro_batch_size", "accumulation", "seed"), 1)
    texts = dict.fromkeys(("layout", "precision", "engine", "contents"), "")
    state = TrainerState(
        step=1, learning_rate=0.1, loss_scale={}, states=[], versions={}, recipe=old.model_dump(mode="json"),
        **facts, **texts,
    )  # fmt: skip
    state.check(new, "", path="x")
