"""A loss over chunks of tokens: closed forms of what the recording has, and what of published charts it explains."""

import pytest
from training_setups import changed, rank_pass

from toolkit.estimate.recorded.activations import Activations
from toolkit.estimate.recorded.recording import RankPass, config_text
from toolkit.estimate.recorded.recordings import activations
from toolkit.parallel.tiny_model import tiny_config

CONFIG = tiny_config("llama", hidden_size=64, vocab_size=5000, tie_word_embeddings=False)
WHOLE = rank_pass(config_text(CONFIG.to_dict()), device="cuda")
LAYERS = range(CONFIG.num_hidden_layers)
SAMPLES, POSITIONS = 4, 512


def at(chosen: RankPass) -> Activations:
    return activations(chosen, SAMPLES, POSITIONS)


@pytest.mark.parametrize("chunk", [128, 1024])
def test_the_loss_has_logits_of_a_chunk_and_the_gradients_of_hidden_states_and_head(chunk: int) -> None:
    found = at(changed(WHOLE, loss_chunk=chunk))
    hidden, head, losses = 2 * SAMPLES * POSITIONS * 64, 2 * 5000 * 64, 4 * SAMPLES * POSITIONS
    # While the gradient of the head's weight is added, its newest part is there too.
    assert found.loss.peak == pytest.approx(2 * chunk * 5000 + hidden + 2 * head + losses, rel=0.01)
    assert found.head.delta < at(WHOLE).head.delta - 2 * SAMPLES * POSITIONS * 5000 + 2 * hidden


def test_logits_that_are_never_whole_save_most_of_a_large_vocabulary() -> None:
    logits = SAMPLES * POSITIONS * 5000
    saved = at(WHOLE).worst_moment(LAYERS).total - at(changed(WHOLE, loss_chunk=128)).worst_moment(LAYERS).total
    assert 9 * logits < saved < 12 * logits


def test_a_frozen_head_has_no_gradient() -> None:
    lora = changed(WHOLE, loss_chunk=128, trainable="*layers*")
    assert at(changed(WHOLE, loss_chunk=128)).loss.delta - at(lora).loss.delta == 2 * 5000 * 64


def test_under_autocast_a_chunks_logits_are_in_16_bits() -> None:
    autocast = changed(WHOLE, loss_chunk=1024, precision="autocast")
    more = at(autocast).loss.peak - at(changed(autocast, loss_chunk=512)).loss.peak
    assert 2 * 512 * 5000 <= more < 3 * 512 * 5000
