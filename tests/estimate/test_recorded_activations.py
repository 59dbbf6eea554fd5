"""Activations recorded from a model's own code: sizes that are exact polynomials or refused, and equal to live runs."""

import io
import json
import os
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_activations import SEQ_LEN, Case, kept_bytes, peak_bytes
from training_setups import rank_pass

from toolkit.errors import ModelError, RunError
from toolkit.estimate.recorded import recorder_process, recordings
from toolkit.estimate.recorded.recording import (
    Polynomial,
    Recording,
    config_text,
    model_key,
    monomial_values,
    value_of,
)
from toolkit.models.shape import find_config
from toolkit.recorder import record as recorder
from toolkit.recorder.fit import Size, solve
from toolkit.recorder.parameters import record_parameters
from toolkit.recorder.record import record

TINY = config_text({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 4, "vocab_size": 99})
POINTS = [(2, 64), (2, 192), (3, 64)]
ALL_POINTS = [(b, s) for b in (2, 3) for s in (64, 128, 192)]


@pytest.fixture
def tiny() -> Recording:
    return record(rank_pass(TINY), 64)


@pytest.mark.parametrize(
    ("family", "attention", "recompute"),
    [
        ("gpt2", "eager", "full"),
        ("roc_bert", "eager", "full"),  # an embedding so large that its gradient is the peak
        ("llama", "sdpa", "none"),
        ("olmoe", "eager", "none"),
        ("gemma3_text", "eager", "none"),
    ],
)
def test_a_recording_is_what_a_live_run_keeps_and_allocates(family: str, attention: str, recompute: str) -> None:
    case = Case(family=family, attention=attention, recompute=recompute, drops=False)
    model = case.model()
    live = kept_bytes(case, model), peak_bytes(case, model)
    assert (case.predicted_kept(), case.predicted_peak()) == pytest.approx(live, rel=1e-4)


def test_a_recording_is_the_same_after_it_was_stored(tiny: Recording) -> None:
    assert Recording.decoded(json.loads(json.dumps(tiny.encoded()))) == tiny


def values_at(points: list[Size], size: Polynomial) -> list[int]:
    return [value_of(size, monomial_values(b, s)) for b, s in points]


@pytest.mark.parametrize("size", [(0, 0, 0, 6, 0, 0), (0, 0, 0, 0, 0, 4), (16, 0, 0, 0, 0, 0)])
def test_a_size_of_one_term_is_found_from_three_passes(size: Polynomial) -> None:
    assert solve(POINTS, values_at(POINTS, size)) == size


@pytest.mark.parametrize("size", [(24, 0, 0, 4, 0, 0), (0, 0, 2, 0, 0, 8)])
def test_a_size_of_two_terms_is_found_from_four_passes(size: Polynomial) -> None:
    assert solve([*POINTS, (3, 128)], values_at([*POINTS, (3, 128)], size)) == size


def test_a_size_of_several_terms_needs_six_passes() -> None:
    size = (8, 1, 0, 6, 0, 2)
    assert solve([*POINTS, (3, 128)], values_at([*POINTS, (3, 128)], size)) is None
    assert solve(ALL_POINTS, values_at(ALL_POINTS, size)) == size


def test_a_size_that_is_no_polynomial_is_not_guessed() -> None:
    assert solve(ALL_POINTS, [2**b * s for b, s in ALL_POINTS[:5]] + [7]) is None


def test_a_recording_that_another_size_contradicts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = recorder.trace_pass

    def more_at_the_checked_size(tiny_pass: Any, fake: Any, mode: Any, b: int, s: int) -> Any:
        sections = traced(tiny_pass, fake, mode, b, s)
        if (b, s) == (3, 512):
            number, size = sections[1].events[0]
            sections[1].events[0] = number, size + 2
        return sections

    monkeypatch.setattr(recorder, "trace_pass", more_at_the_checked_size)
    with pytest.raises(ModelError, match="not polynomials"):
        record(rank_pass(TINY), 64)


def test_a_model_of_few_positions_is_recorded_with_more_of_them_where_kernels_round_up() -> None:
    facts = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    few, many = (
        record(rank_pass(config_text({**facts, "max_position_embeddings": count}), tp=2, precision="fp32"), 64)
        for count in (64, 4096)
    )
    assert few == many


def test_the_meta_device_and_fake_tensors_give_the_same_recording(
    tiny: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert recorder.tensors_without_memory(rank_pass(TINY)) == torch.device("meta")
    monkeypatch.setattr(
        recorder, "tensors_without_memory", lambda tiny_pass: FakeTensorMode(allow_non_fake_inputs=True)
    )
    assert record(rank_pass(TINY), 64) == tiny


def test_every_storage_is_freed(tiny: Recording) -> None:
    """Over a whole pass nothing stays: what a layer keeps, its backward pass frees."""
    a, layers = tiny.at(2, SEQ_LEN), range(4)
    backward = sum(a.backward[kind].delta for kind in a.pattern) + a.end_layers[2]
    assert a.kept(layers) + a.head_backward.delta + backward + a.embedding_backward.delta == 0


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSTK_CACHE", str(tmp_path))
    return tmp_path


def test_a_config_is_recorded_once_by_another_process_and_then_read(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_pass = rank_pass(TINY, recompute="full")
    found = recordings.recording(tiny_pass, 64)
    assert found == record(tiny_pass, 64)
    monkeypatch.setattr(recordings, "_ask_recorder", lambda *question: pytest.fail("it is recorded again"))
    assert recordings.recording(tiny_pass, 128) == found


def test_what_other_code_recorded_is_recorded_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_pass = rank_pass(TINY)
    recordings.recording(tiny_pass, 64)
    monkeypatch.setattr(recordings, "versions", lambda: {"transformers": "0"})
    monkeypatch.setattr(recordings, "_ask_recorder", lambda *question: {})
    with pytest.raises(KeyError):
        recordings.recording(tiny_pass, 64)


def test_an_answer_that_was_not_read_is_not_taken_for_the_next(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    process, _ = recorder_process.recorder(os.getpid())
    monkeypatch.setattr(process.stdout, "readline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recordings.recording(rank_pass(TINY, recompute="full"), 32)
    monkeypatch.undo()
    monkeypatch.setenv("DSTK_CACHE", str(empty_cache))
    other = rank_pass(TINY, precision="fp32")
    assert recordings.recording(other, 32) == record(other, 32)


def test_a_file_in_the_current_directory_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformers.py").write_text("raise SystemExit('this is not transformers')")
    monkeypatch.chdir(tmp_path)
    recorder_process.recorder.cache_clear()
    process, _ = recorder_process.recorder(os.getpid())
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=120) == 0
    recorder_process.recorder.cache_clear()


class Stderr(io.StringIO):
    """Knows when something was said."""

    said = threading.Event()

    def write(self, text: str) -> int:
        self.said.set()
        return super().write(text)


def test_a_recording_that_takes_long_is_announced_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Stderr()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setitem(recorder_process.PATIENCE, False, 0.01)
    monkeypatch.setattr(recorder_process, "_answer", lambda *question: {"was said": stderr.said.wait(60)})
    assert recorder_process.ask("", "gpt2") == {"was said": True}
    assert stderr.getvalue().startswith("recording gpt2: ")
    assert stderr.getvalue().count("\n") == 1


def test_a_recording_that_is_quick_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    monkeypatch.setattr(recorder_process, "_answer", lambda *question: {})
    recorder_process.ask("", "gpt2")
    for thread in threading.enumerate()[before:]:
        thread.join()
    assert capsys.readouterr() == ("", "")


def test_a_recorder_that_died_is_named_and_started_again(empty_cache: Path) -> None:
    process, _ = recorder_process.recorder(os.getpid())
    process.kill()
    tiny_pass = rank_pass(TINY, attention="eager")
    with pytest.raises(RunError, match="code -9"):
        recordings.recording(tiny_pass, 48)
    assert recordings.recording(tiny_pass, 48) == record(tiny_pass, 48)


def test_a_cache_that_cannot_be_written_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSTK_CACHE", str(tmp_path / "file"))
    tiny_pass = rank_pass(TINY)
    assert recordings.recording(tiny_pass, 64) == record(tiny_pass, 64)


def test_other_releases_than_those_that_recorded_do_not_use_what_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    (key, *_) = shipped()
    recordings._shipped.cache_clear()
    assert recordings._shipped(key) != {}
    recordings._shipped.cache_clear()
    monkeypatch.setattr(recordings, "_installed", lambda: {"torch": "2.13", "transformers": "5.24"})
    assert recordings._shipped(key) == {}
    recordings._shipped.cache_clear()


def test_a_window_has_a_recording_on_each_side_of_it(empty_cache: Path) -> None:
    config = {"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"intermediate_size": 64, "num_hidden_layers": 4, "sliding_window": 256, "vocab_size": 99}
    tiny_pass = rank_pass(config_text(config))
    inside, beyond = (recordings.recording(tiny_pass, s).positions for s in (128, 512))
    assert (inside, beyond) == ((1, 256), (256, None))
    (cached,) = (empty_cache / "recordings").iterdir()
    assert len(json.loads(cached.read_text())["recordings"]) == 2


def shipped() -> dict[str, Any]:
    with zipfile.ZipFile(recordings.SHIPPED) as archive:
        return {name.removesuffix(".json"): json.loads(archive.read(name)) for name in archive.namelist()}


def test_shipped_recordings_are_of_the_pinned_versions() -> None:
    pinned = dict(
        line.split("==") for line in Path("constraints.txt").read_text().splitlines() if line.count("==") == 1
    )
    assert len(shipped()) > 50
    for content in shipped().values():
        for name in ("torch", "transformers"):
            assert content["versions"][name].partition("+")[0] == pinned[name].partition("+")[0]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt2", {}),
        ("llama-3-8b", {"tp": 4, "recompute": "full"}),
        ("gemma-2-2b", {"samples": "one", "attention": "eager"}),
    ],
)
def test_shipped_recordings_are_what_is_recorded_now(model: str, changes: dict[str, Any]) -> None:
    tiny_pass = rank_pass(config_text(find_config(model) or {}), **changes)
    for stored in shipped()[model_key(tiny_pass.config)]["recordings"][tiny_pass.key]:
        assert Recording.decoded(stored) == record(tiny_pass, stored["positions"][0])


@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b", "deepseek-v3"])
def test_shipped_parameters_are_what_is_recorded_now(model: str) -> None:
    config = config_text(find_config(model) or {})
    recorded = record_parameters(config).encoded()
    assert shipped()[model_key(config)]["parameters"] == json.loads(json.dumps(recorded))
