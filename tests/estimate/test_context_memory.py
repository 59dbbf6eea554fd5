"""Memory of long sequences: linear in the positions of a rank, whatever the number of ranks that share them."""

import pytest
from training_setups import memory_request

from toolkit.config.layout import Layout
from toolkit.config.recipe import Precision
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.model_facts import ModelFacts
from toolkit.models.shape import local_config

MODEL = ModelFacts.from_config(local_config("llama-3.1-8b"))
LENGTHS = (65536, 131072, 262144)


def activation_bytes(
    cp: int, seq_len: int, *, model: ModelFacts = MODEL, precision: Precision = "bf16", **more: object
) -> int:
    layout = Layout(dp=8 // cp, cp=cp, zero_stage=3, recompute="full")
    work = {"micro_batch_size": 1, "seq_len": seq_len, **more}
    settings = DeepSpeedSettings(zero_stage=3, precision=precision)
    return memory_request(model, layout, work, settings).peak().activation_total


@pytest.mark.parametrize("cp", [1, 2, 8])
@pytest.mark.parametrize("documents", [False, True])
def test_activations_are_linear_in_the_length_of_a_sequence(cp: int, documents: bool) -> None:
    blocks = cp == 1
    short, middle, long = (activation_bytes(cp, length, documents=documents, blocks=blocks) for length in LENGTHS)
    assert middle / short == pytest.approx(2, rel=0.01)
    assert long / middle == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_windows_and_fp32_have_no_scores_of_whole_sequences(precision: Precision) -> None:
    mistral = ModelFacts.from_config(local_config("mistral-7b"))
    short, long = (activation_bytes(2, length, model=mistral, precision=precision) for length in LENGTHS[:2])
    assert long / short == pytest.approx(2, rel=0.03)


def test_ranks_share_activations_out() -> None:
    assert activation_bytes(8, 524288) == pytest.approx(activation_bytes(1, 65536), rel=0.01)


def test_documents_take_a_mask_unless_attention_makes_none() -> None:
    masked, apart = (activation_bytes(1, 16384, documents=True, blocks=blocks) for blocks in (False, True))
    assert masked - apart == 16384**2
    assert apart == activation_bytes(1, 16384)
