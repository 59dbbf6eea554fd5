"""Recordings are refused where a size that was not fitted contradicts them."""

from typing import Any

import pytest
from training_setups import rank_pass

from toolkit.errors import ModelError
from toolkit.estimate.recorded.recording import config_text
from toolkit.recorder import record as recorder

TINY = config_text({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 4, "vocab_size": 99})


def test_a_single_sample_of_another_length_contradicts_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are fitted at 256, 512 and 768 positions, which determine a polynomial of three terms whatever it is."""
    traced = recorder.trace_pass

    def more_at_another_length(tiny_pass: Any, fake: Any, mode: Any, b: int, s: int) -> Any:
        sections = traced(tiny_pass, fake, mode, b, s)
        if s not in (256, 512, 768):
            number, size = sections[1].events[0]
            sections[1].events[0] = number, size + 2
        return sections

    monkeypatch.setattr(recorder, "trace_pass", more_at_another_length)
    with pytest.raises(ModelError, match="not polynomials"):
        recorder.record(rank_pass(TINY, samples="one"), 64)


def test_a_model_with_too_few_positions_for_three_lengths_is_refused() -> None:
    few = config_text({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 2})
    with pytest.raises(ModelError, match="needs three sequence lengths, and the model has only 2 positions"):
        recorder.record(rank_pass(few), 2)
