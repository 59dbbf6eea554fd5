"""Document masking: a packed document is computed as if it were alone, and models that cannot do that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refused as refused_with
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from toolkit.config.job import Job
from toolkit.config.recipe import ModelSection, Recipe
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.reference_engine import ReferenceEngine
from toolkit.errors import ModelError
from toolkit.model_init.document_masking import check_document_masking
from toolkit.parallel.tiny_model import tiny_config
from toolkit.training.preflight import check_model

Make = Callable[..., Recipe]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
LLAMA = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
WIDTHS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "gpt_neox": {"intermediate_size": 48},
    "qwen3": LLAMA,
    "gemma3_text": LLAMA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {},
    "gpt_oss": LLAMA,
}
EAGER_ONLY = ("gpt_neo", "gpt_oss")
LENGTHS = (5, 7)


def config(family: str) -> Any:
    return AutoConfig.for_model(family, **SIZES, **WIDTHS[family], pad_token_id=0, bos_token_id=1, eos_token_id=2)


def model(family: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config(family), attn_implementation=attention)
    return built.float().eval()


def largest_difference(tiny: PreTrainedModel, make_recipe: Make, *, masked: bool) -> float:
    """Between the logits of documents in a pack of two, and those of each alone."""
    engine = ReferenceEngine(Job.of(make_recipe(train__engine="reference"), 1), tiny, torch.device("cpu"))
    tiny.eval()
    ids = torch.randint(3, 97, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand_as(ids) if masked else None
    with torch.no_grad():
        packed = engine._forward(MicroBatch(input_ids=ids, labels=ids, position_ids=positions, dropout_seed=0)).logits
        alone = [tiny(input_ids=document, use_cache=False).logits for document in ids.split(LENGTHS, dim=1)]
    return (packed - torch.cat(alone, dim=1)).abs().max().item()


def refused(family: str) -> bool:
    try:
        check_document_masking(ModelSection(name_or_path=family), config(family))
    except ModelError:
        return True
    return False


def test_a_config_that_insists_on_a_padding_token_is_checked_too() -> None:
    check_document_masking(ModelSection(name_or_path="modernbert-decoder"), tiny_config("modernbert-decoder"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_masked_document_in_a_pack_has_the_logits_that_it_has_alone(
    make_recipe: Make, family: str, attention: str
) -> None:
    assert largest_difference(model(family, attention), make_recipe, masked=True) < 1e-6


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_document_in_a_plain_pack_has_other_logits(make_recipe: Make, family: str) -> None:
    assert largest_difference(model(family, "sdpa"), make_recipe, masked=False) > 1e-2


@pytest.mark.parametrize("family", WIDTHS)
def test_a_family_is_refused_exactly_where_its_documents_see_each_other(make_recipe: Make, family: str) -> None:
    tiny = model(family, "eager" if family in EAGER_ONLY else "sdpa")
    assert refused(family) is (largest_difference(tiny, make_recipe, masked=True) > 1e-6)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "takes no position_ids"),
        ("opt", "does not pass position_ids to its attention mask"),
        ("mamba", "has layers of type linear_attention"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(family: str, reason: str) -> None:
    off = ("data.document_masking", False)
    with refused_with(ModelError, "data.document_masking", "model.name_or_path", remedy=off) as found:
        check_document_masking(ModelSection(name_or_path=family), AutoConfig.for_model(family))
    assert reason in found[0].reason


def test_flash_attention_is_refused() -> None:
    section = ModelSection(name_or_path="llama", attn_implementation="flash_attention_2")
    fields = ("data.document_masking", "model.attn_implementation")
    with refused_with(ModelError, *fields, remedy=("model.attn_implementation", "sdpa")):
        check_document_masking(section, config("llama"))


def test_the_model_check_asks_for_document_masking_only_where_the_recipe_does(make_recipe: Make) -> None:
    name = {"name_or_path": "bloom-560m"}
    check_model(make_recipe(model=name), torch.device("cpu"))
    with refused_with(ModelError, "data.document_masking", "model.name_or_path"):
        check_model(make_recipe(model=name, data__document_masking=True), torch.device("cpu"))


def test_the_check_leaves_the_config_as_it_was() -> None:
    given = config("gpt2")
    before = given.to_dict()
    check_document_masking(ModelSection(name_or_path="gpt2"), given)
    assert given.to_dict() == before
