"""Activations recorded from a model's own code: sizes that are exact polynomials or refused, and equal to live runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from measured_activations import SEQ_LEN, Case
from recorded_activations import errors, kept_bytes, recorded
from recorder import record as recorder
from recorder.fit import solve, value
from recorder.record import record
from recorder.recording import Polynomial, Recording, Setup, config_text

from toolkit.errors import ModelError

TINY = config_text({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 4, "vocab_size": 99})
POINTS = [(2, 64), (2, 192), (3, 64)]
ALL_POINTS = [(b, s) for b in (2, 3) for s in (64, 128, 192)]


@pytest.fixture
def tiny() -> Recording:
    return record(Setup(config=TINY), 64)


@pytest.mark.parametrize(
    ("family", "attention", "recompute"),
    [
        ("gpt2", "eager", "full"),
        ("llama", "sdpa", "none"),
        ("olmoe", "eager", "none"),
        ("gemma3_text", "eager", "none"),
    ],
)
def test_a_recording_is_what_a_live_run_keeps_and_allocates(family: str, attention: str, recompute: str) -> None:
    from measured_activations import peak_bytes

    case = Case(family=family, attention=attention, recompute=recompute, drops=False)
    model = case.model()
    live = kept_bytes(case, model), peak_bytes(case, model)
    assert recorded(case) == pytest.approx(live, rel=1e-4)
    assert errors(recorded, case, (2 * live[0], live[1]))[0] == "-50.00"


def test_a_recording_is_the_same_after_it_was_stored(tiny: Recording) -> None:
    assert Recording.decoded(json.loads(json.dumps(tiny.encoded()))) == tiny


@pytest.mark.parametrize("size", [(0, 0, 0, 6, 0, 0), (0, 0, 0, 0, 0, 4), (16, 0, 0, 0, 0, 0)])
def test_a_size_of_one_term_is_found_from_three_passes(size: Polynomial) -> None:
    assert solve(POINTS, [value(size, at) for at in POINTS]) == size


def test_a_size_of_several_terms_needs_six_passes() -> None:
    size = (8, 1, 0, 6, 0, 2)
    assert solve(POINTS, [value(size, at) for at in POINTS]) is None
    assert solve(ALL_POINTS, [value(size, at) for at in ALL_POINTS]) == size


def test_a_size_that_is_no_polynomial_is_not_guessed() -> None:
    assert solve(ALL_POINTS, [2**b * s for b, s in ALL_POINTS[:5]] + [7]) is None


def test_a_recording_that_another_size_contradicts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = recorder.trace_pass

    def more_at_the_checked_size(setup: Any, fake: Any, mode: Any, b: int, s: int) -> Any:
        sections = traced(setup, fake, mode, b, s)
        if (b, s) == (3, 512):
            number, size = sections[1].events[0]
            sections[1].events[0] = number, size + 2
        return sections

    monkeypatch.setattr(recorder, "trace_pass", more_at_the_checked_size)
    with pytest.raises(ModelError, match="no polynomials"):
        record(Setup(config=TINY), 64)


def test_the_meta_device_and_fake_tensors_give_the_same_recording(
    tiny: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert recorder.tensors_without_memory(Setup(config=TINY)) == torch.device("meta")
    monkeypatch.setattr(recorder, "tensors_without_memory", lambda setup: FakeTensorMode(allow_non_fake_inputs=True))
    assert record(Setup(config=TINY), 64) == tiny


def test_every_storage_is_freed(tiny: Recording) -> None:
    """Over a whole pass nothing stays: what a layer keeps, its backward pass frees."""
    a, layers = tiny.at(2, SEQ_LEN), range(4)
    backward = sum(a.backward[kind].delta for kind in a.pattern) + a.edges[2]
    left = a.kept(layers) + a.turn.delta + backward + a.after.delta
    assert left == pytest.approx(0, abs=a.before.delta)
