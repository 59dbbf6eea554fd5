"""A recording's events, replayed with all layers, against the sums that the estimate makes of its sections."""

from typing import Any

import pytest
from training_setups import rank_pass

from toolkit.estimate.caching_allocator import CachingAllocator, MemoryBlock
from toolkit.estimate.recorded.activations import UnrecordedInLayer
from toolkit.estimate.recorded.recording import Recording, config_text
from toolkit.estimate.training_step import Live, PassReplay
from toolkit.recorder.record import record

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 7, "vocab_size": 99},
    "llama": {"model_type": "llama", "intermediate_size": 96, "num_hidden_layers": 7, **SMALL},
    # Two kinds of layers, in an order that repeats.
    "gemma3": {"model_type": "gemma3_text", "intermediate_size": 96, "num_hidden_layers": 12, "head_dim": 16, **SMALL},
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 7, "vocab_size": 99},
}


class Counter(CachingAllocator):
    """Counts what is asked for, without rounding."""

    def allocate(self, size: int) -> MemoryBlock:
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return MemoryBlock(0, size, is_small=True)

    def free(self, block: MemoryBlock) -> None:
        self.allocated -= block.size


def recorded(family: str, attention: str | None = None, **changes: Any) -> Recording:
    kind = attention or ("eager" if family == "bloom" else "sdpa")
    return record(rank_pass(config_text(FAMILIES[family]), attention=kind, **changes), 256)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute": "full"}, {"part": "middle"}, {"part": "last", "tp": 2, "sequence_parallel": True}],
    ids=lambda changes: "-".join(map(str, changes.values())) or "whole",
)
def test_a_replay_allocates_what_the_estimate_adds_up(family: str, changes: dict[str, Any]) -> None:
    recording = recorded(family, **changes)
    count = len(recording.pattern)
    layers = {"middle": range(1, count - 1), "last": range(2, count)}.get(changes.get("part", ""), range(count))
    expected, counter = recording.at(2, 512), Counter()
    replay, live = PassReplay(recording, layers, 2, 512, counter), Live()
    sections = [*replay.forward(live)]
    assert len(sections) == 3 + len(layers)
    assert counter.allocated == pytest.approx(expected.kept(layers), rel=1e-3)
    for _ in replay.backward(live):
        left = counter.allocated
    assert counter.peak_allocated == pytest.approx(expected.worst_moment(layers).total, rel=3e-3)
    # What the pass was given, and what it returned, go with the micro-batch.
    assert left < 0.05 * counter.peak_allocated
    assert counter.allocated == 0


def test_a_replay_has_what_a_layer_takes_beside_its_recording() -> None:
    recording = recorded("llama", attention="blocks")
    layer = recording.at(2, 512).backward[0]
    assert layer.at_attention is not None
    room = layer.peak - layer.at_attention
    assert room > 0
    large = 10_000_000
    plain = replayed_peak(recording, UnrecordedInLayer())
    # What attention takes comes at another moment than the worst of the layer, at which there is more.
    assert replayed_peak(recording, UnrecordedInLayer(in_attention=room // 2)) == plain
    in_attention = replayed_peak(recording, UnrecordedInLayer(in_attention=large))
    before_attention = replayed_peak(recording, UnrecordedInLayer(before_attention=large))
    assert in_attention == before_attention - room
    # What is there until attention begins is freed then.
    assert replayed_peak(recording, UnrecordedInLayer(in_attention=large, before_attention=large)) == before_attention


def test_where_another_attention_was_recorded_what_the_toolkits_takes_adds_to_the_peak_of_a_layer() -> None:
    recording = recorded("llama")
    in_attention = replayed_peak(recording, UnrecordedInLayer(in_attention=10_000_000))
    assert in_attention == replayed_peak(recording, UnrecordedInLayer(before_attention=10_000_000))


def replayed_peak(recording: Recording, unrecorded: UnrecordedInLayer) -> int:
    """Return the peak of a replay, which is what the estimate says."""
    counter = Counter()
    replay = PassReplay(recording, range(7), 2, 512, counter, unrecorded=unrecorded)
    live = Live()
    for _ in (*replay.forward(live), *replay.backward(live)):
        pass
    assert counter.allocated == 0
    expected = recording.at(2, 512).worst_moment(range(7), unrecorded=unrecorded)
    assert counter.peak_allocated == pytest.approx(expected.total, rel=3e-3)
    return counter.peak_allocated


def test_a_replay_in_autocast_has_the_copies_of_weights() -> None:
    recording = recorded("llama", precision="autocast")
    kept = {}
    for casts in (True, False):
        counter = Counter()
        replay, live = PassReplay(recording, range(7), 2, 512, counter, casts=casts), Live()
        for _ in replay.forward(live):
            pass
        kept[casts] = counter.allocated
        for _ in replay.backward(live):
            left = counter.allocated
        assert left < 0.05 * counter.peak_allocated
    layer, head = 64 * (64 + 32 + 32 + 64 + 3 * 96), 99 * 64
    assert kept[True] - kept[False] == 2 * (7 * layer + head)
    assert kept[False] == recording.at(2, 512).kept(range(7))


def test_micro_batches_do_not_free_each_others_tensors() -> None:
    counter = Counter()
    replay = PassReplay(recorded("llama"), range(7), 2, 512, counter)
    first, second = Live(), Live()
    for _ in replay.forward(first):
        pass
    kept = counter.allocated
    for _ in replay.forward(second):
        pass
    assert counter.allocated == 2 * kept
    for _ in replay.backward(first):
        pass
    assert counter.allocated == kept


def test_activations_on_the_host_are_not_freed_again() -> None:
    recording, allocator = recorded("gemma3"), CachingAllocator()
    replay = PassReplay(recording, range(len(recording.pattern)), 2, 512, allocator, offloads=True)
    for _ in range(2):
        live = Live()
        for _ in [*replay.forward(live), *replay.backward(live)]:
            assert 0 <= allocator.allocated <= allocator.reserved
    assert allocator.allocated == 0
    reserved = allocator.reserved
    allocator.release_cached()
    assert (allocator.reserved, reserved > 0) == (0, True)
