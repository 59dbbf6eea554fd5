"""Mixtures: which source each sample is from, and which of its samples, against a plain loop with exact fractions."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from refusals import refused

from toolkit.config.data_section import DataSection
from toolkit.data.samples.document_samples import DocumentSamples
from toolkit.data.samples.interleaving import Interleaving
from toolkit.data.samples.mixture import MixtureSamples, choose_weights
from toolkit.data.samples.samples import Samples
from toolkit.errors import DataError
from toolkit.parallel.loss import IGNORE

SEQ_LEN, GLOBAL_BATCH = 4, 6
LENGTH = ["train.steps", "batch.global_batch_size"]


def corpus(lengths: Sequence[int], first: int) -> Any:
    """Documents of tokens that no other corpus has; of each, the second half is trained on where that matters."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    stream = np.arange(first, first + ends[-1], dtype=np.uint32)
    trained = np.concatenate([np.arange(length) >= length // 2 for length in lengths]).astype(np.uint8)
    return SimpleNamespace(
        eos_id=0,
        tokenizer_vocab_size=10_000,
        tokens=lambda split: stream,
        document_offsets=lambda split: ends,
        weights=lambda split: None,
        trained=lambda split: trained,
    )


def text(lengths: Sequence[int], first: int = 1, **fields: Any) -> Samples:
    defaults: dict[str, Any] = {"packing": "packed", "split": "train", "seed": 7, "global_batch_size": GLOBAL_BATCH}
    return Samples(corpus(lengths, first), seq_len=SEQ_LEN, **{**defaults, **fields})


def chats(lengths: Sequence[int], first: int) -> DocumentSamples:
    fields: dict[str, Any] = {"packing": "packed", "overlong": "truncate", "split": "train", "seed": 7}
    return DocumentSamples(corpus(lengths, first), seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH, **fields)


def mixture(weights: Sequence[int], parts: Sequence[Samples]) -> MixtureSamples:
    named = {f"source {number}": part for number, part in enumerate(parts)}
    return MixtureSamples(named, weights, global_batch_size=GLOBAL_BATCH)


def sources_one_by_one(weights: Sequence[Fraction]) -> Iterator[tuple[int, int]]:
    """The source of one sample after the other, and its number there: each node of the tree counts what it has had."""
    nodes: list[list[Any]] = [[weight, order, order, 0] for order, weight in enumerate(weights) if weight]
    order = len(weights)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: (node[0], node[1]))
        light, heavy, *others = nodes
        order += 1
        nodes = [*others, [light[0] + heavy[0], order, (heavy, light), 0]]
    (root,) = nodes
    while True:
        node = root
        while isinstance(node[2], tuple):
            (first, second), seen = node[2], node[3] + 1
            node[3] = seen
            quota = seen * first[0] / node[0] + Fraction(1, 2)
            node = first if quota.numerator // quota.denominator > first[3] else second
        node[3] += 1
        yield node[2], node[3] - 1


def random_weights(rng: random.Random) -> list[int]:
    return [int(10 ** rng.uniform(0, 5)) for _ in range(rng.randint(1, 8))]


@pytest.mark.parametrize("seed", range(8))
def test_sources_are_those_of_a_loop_with_exact_fractions(seed: int) -> None:
    weights = [*random_weights(random.Random(seed)), 0]
    loop = sources_one_by_one([Fraction(weight) for weight in weights])
    expected = [next(loop) for _ in range(2000)]
    sources, numbers = Interleaving(weights).locate(np.arange(2000))
    assert [*zip(sources.tolist(), numbers.tolist(), strict=True)] == expected


def test_after_any_number_of_samples_every_source_is_within_two_of_its_share() -> None:
    rng = random.Random(3)
    for _ in range(300):
        weights = random_weights(rng)
        sources, _ = Interleaving(weights).locate(np.arange(1000))
        for source, weight in enumerate(weights):
            due = np.arange(1, 1001) * weight / sum(weights)
            assert np.abs(np.cumsum(sources == source) - due).max() < 2


@pytest.mark.parametrize("start", [10**10, 10**10 + 12345])
def test_ten_billion_samples_need_no_state_and_no_rounding(start: int) -> None:
    weights = [7 * 10**9 + 1, 3 * 10**9, 123_456]
    sources, numbers = Interleaving(weights).locate(np.arange(start, start + 500))
    one_by_one = [Interleaving(weights).locate(np.array([n])) for n in range(start, start + 500)]
    assert sources.tolist() == [int(source[0]) for source, _ in one_by_one]
    for source, weight in enumerate(weights[:2]):
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()
        assert abs(int(own[0]) - Fraction(start * weight, sum(weights))) < 3


def test_a_sample_of_the_run_is_the_next_one_of_its_source() -> None:
    parts = [text([30, 4, 9]), text([25, 13], first=1000), chats([3, 9, 5, 2], first=2000)]
    mixed = mixture([5, 3, 2], parts)
    loop = sources_one_by_one([Fraction(weight, 10) for weight in (5, 3, 2)])
    for step in range(12):
        batch = mixed.batch(step, range(GLOBAL_BATCH))
        for place in range(GLOBAL_BATCH):
            source, number = next(loop)
            alone = parts[source].batch(number // GLOBAL_BATCH, [number % GLOBAL_BATCH])
            assert batch.input_ids[place].tolist() == alone.input_ids[0].tolist()
            assert batch.labels[place].tolist() == alone.labels[0].tolist()
            assert batch.sources is not None
            assert batch.sources[place] == source


def test_texts_that_do_not_ask_for_it_keep_plain_positions_beside_packed_chats() -> None:
    parts = [text([40]), chats([3, 3, 2, 3], first=2000)]
    batch = mixture([1, 1], parts).batch(0, range(GLOBAL_BATCH))
    assert batch.position_ids is not None
    assert batch.sources is not None
    plain = [0, 1, 2, 3]
    is_plain = [positions == plain for positions in batch.position_ids.tolist()]
    assert all(is_plain[place] for place in range(GLOBAL_BATCH) if batch.sources[place] == 0)
    assert not all(is_plain)


def test_targets_are_counted_for_each_source() -> None:
    mixed = mixture([3, 2, 2], [text([30, 4, 9], packing="padded"), text([25]), chats([3, 9, 5, 2], first=2000)])
    for step in range(5):
        batch = mixed.batch(step, range(GLOBAL_BATCH))
        assert batch.sources is not None
        targets = (batch.labels != IGNORE).sum(dim=1)
        counts = [int(targets[batch.sources == source].sum()) for source in range(3)]
        assert [*mixed.target_counts(step, np.arange(GLOBAL_BATCH))] == counts
        assert mixed.target_count(step, np.arange(GLOBAL_BATCH)) == sum(counts)


def section(*sources: dict[str, float]) -> DataSection:
    entries = [{"path": f"text{number}"} | fields for number, fields in enumerate(sources)]
    return DataSection.model_validate({"sources": tuple(entries), "seq_len": SEQ_LEN}, strict=False)


def weights_of(parts: Sequence[Samples], *sources: dict[str, float], steps: int) -> list[int]:
    named = {str(number): part for number, part in enumerate(parts)}
    return choose_weights(section(*sources), named, steps=steps, global_batch_size=GLOBAL_BATCH)


def test_epochs_and_tokens_are_read_exactly_and_weights_share_the_rest() -> None:
    parts = [text([41]), text([81], first=1000), text([401], first=2000), text([401], first=3000)]  # 10, 20, 100, 100
    steps = 20
    weights = weights_of(
        parts, {"epochs": 3}, {"tokens": 15.0 * SEQ_LEN}, {"weight": 0.5}, {"weight": 0.25}, steps=steps
    )
    mixed = mixture(weights, parts)
    sources, indices = mixed.locate(np.arange(steps * GLOBAL_BATCH))
    assert Counter(sources.tolist()) == {0: 30, 1: 15, 2: 50, 3: 25}
    assert set(Counter(indices[sources == 0].tolist()).values()) == {3}
    assert [(share.samples, share.epochs) for share in mixed.shares(120)] == [
        (30, 3),
        (15, 0.75),
        (50, 0.5),
        (25, 0.25),
    ]


def test_epochs_alone_fix_the_length_of_the_run() -> None:
    parts = [text([41]), text([81], first=1000)]
    mixed = mixture(weights_of(parts, {"epochs": 2}, {"epochs": 1}, steps=6), parts)
    assert Counter(mixed.locate(np.arange(36))[0].tolist()) == {0: 18, 1: 18}
    for steps in (5, 7):
        with refused(DataError, *LENGTH, remedy=("train.steps", 6)):
            weights_of(parts, {"epochs": 2}, {"epochs": 1}, steps=steps)


def test_epochs_of_packed_chats_count_the_rows_of_each() -> None:
    part = chats([2, 3, 5, 2, 4, 3, 3, 2, 5, 4, 2, 3, 5], first=1)
    rows = [part._epoch(number).end for number in range(3)]
    assert [part.count_of(epochs) for epochs in (1, 2, 3)] == rows


@pytest.mark.parametrize(
    ("sources", "fields"),
    [
        (({"tokens": 11 * SEQ_LEN}, {"weight": 1}), ["data.sources[0].tokens"]),
        (({"tokens": SEQ_LEN - 1}, {"weight": 1}), ["data.sources[0].tokens"]),
        (({"epochs": 0.01}, {"weight": 1}), ["data.sources[0].epochs"]),
        (({"epochs": 1}, {"weight": 1}), ["train.steps"]),
        (({"epochs": 2e9}, {"weight": 1}), ["train.steps"]),
        (({"tokens": 10 * SEQ_LEN}, {"epochs": 1}), LENGTH),
    ],
    ids=str,
)
def test_budgets_that_do_not_make_up_the_run_are_refused(
    sources: tuple[dict[str, float], ...], fields: list[str]
) -> None:
    parts = [text([41]), text([401], first=1000)]
    with refused(DataError, *fields):
        weights_of(parts, *sources, steps=1)
