"""Rows of whole documents: every trained token is a target once an epoch, in an order that only the seed decides."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.data.samples.document_samples import DocumentSamples
from toolkit.errors import DataError
from toolkit.parallel.loss import IGNORE

PAD = 0


def corpus(lengths, untrained=()):
    """Documents of distinct tokens; the first of each is not trained on, nor are those of `untrained`."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    stream = np.arange(1, ends[-1] + 1, dtype=np.uint32)
    mask = ~np.isin(stream, untrained)
    mask[ends[:-1]] = False
    return SimpleNamespace(
        eos_id=PAD,
        tokenizer_vocab_size=1 << 20,
        tokens=lambda split: stream,
        trained=lambda split: mask.astype(np.uint8),
        document_offsets=lambda split: ends,
        weights=lambda split: None,
    )


def samples(lengths, untrained=(), **fields):
    defaults = {"seq_len": 8, "packing": "packed", "overlong": "truncate", "split": "train"}
    return DocumentSamples(corpus(lengths, untrained), **{**defaults, "seed": 7, "global_batch_size": 6, **fields})


def rows_of_epoch(split, epoch):
    """The rows of an epoch, which ends when as many targets were read as there are."""
    rows, index = [], 0
    for _ in range(epoch + 1):
        rows, left = [], int(split._targets.sum())
        while left > 0:
            rows.append(split.tokens(index))
            left -= int((rows[-1][1] != IGNORE).sum())
            index += 1
    return rows


def targets(rows):
    return sorted(int(label) for _, labels in rows for label in labels if label != IGNORE)


LENGTHS = [3, 9, 2, 5, 4, 7, 3, 3, 6, 2, 8]
ALL_TARGETS = sorted(set(range(1, sum(LENGTHS) + 1)) - {1 + start for start in np.cumsum([0, *LENGTHS[:-1]]).tolist()})


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_trained_token_is_a_target_once_an_epoch(packing, epoch):
    assert targets(rows_of_epoch(samples(LENGTHS, packing=packing), epoch)) == ALL_TARGETS


def test_documents_are_put_into_rows_whole_one_after_the_other():
    split = samples([3, 4, 5, 9, 2], split="eval")  # which is not shuffled
    assert [split.tokens(row)[0].tolist() for row in range(len(split))] == [
        [1, 2, 4, 5, 6, 0, 0, 0],
        [8, 9, 10, 11, 0, 0, 0, 0],
        [13, 14, 15, 16, 17, 18, 19, 20],
        [22, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert split.tokens(0)[1].tolist() == [2, 3, 5, 6, 7, *[IGNORE] * 3]
    assert split.position_ids(0).tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


def test_what_is_not_trained_on_is_read_and_no_target():
    split = samples([6], untrained=(2, 4))
    assert split.tokens(0)[0][:5].tolist() == [1, 2, 3, 4, 5]
    assert split.tokens(0)[1][:5].tolist() == [IGNORE, 3, IGNORE, 5, 6]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_targets_are_counted_as_they_are_read_also_across_epochs(packing):
    split = samples(LENGTHS, untrained=(6, 7, 20), packing=packing)
    for step in range(8):
        labels = split.batch(step, range(6)).labels
        assert split.target_count(step, range(6)) == int((labels != IGNORE).sum()) > 0


def test_a_sample_depends_on_nothing_that_was_read_before():
    """As it must in a resumed run, and on ranks that read other samples."""
    read = samples(LENGTHS)
    in_order = [read.tokens(row)[0].tolist() for row in range(60)]
    assert [samples(LENGTHS).tokens(row)[0].tolist() for row in (59, 3, 31)] == [in_order[row] for row in (59, 3, 31)]
    assert [read.tokens(row)[0].tolist() for row in reversed(range(60))] == in_order[::-1]


def test_epochs_and_seeds_have_orders_of_their_own():
    split = samples(LENGTHS, packing="padded")
    first, second = ([split.tokens(e * 11 + row)[0].tolist() for row in range(11)] for e in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != [samples(LENGTHS, packing="padded", seed=8).tokens(row)[0].tolist() for row in range(11)]


@pytest.mark.parametrize(
    ("overlong", "wanted"),
    [
        ("truncate", [2, 3, *range(5, 13)]),
        ("drop", [2, 3]),
        ("split", [2, 3, *range(5, 24)]),
    ],
)
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_what_becomes_of_a_document_that_is_too_long(overlong, wanted, packing):
    split = samples([3, 20], overlong=overlong, packing=packing)
    assert targets(rows_of_epoch(split, 0)) == wanted
    assert split.overlong_documents == 1


def test_a_document_of_one_token_more_than_a_row_fits():
    assert samples([9]).overlong_documents == 0


def test_what_has_no_target_left_is_left_out():
    split = samples([3, 20], untrained=range(5, 13))
    assert targets(rows_of_epoch(split, 0)) == [2, 3]
    assert split.pieces_without_targets == 1


def test_a_split_without_targets_is_refused():
    with refused(DataError, "data.seq_len"):
        samples([20], untrained=range(10))


def test_packed_documents_have_the_loss_that_each_has_alone():
    """They share rows and see nothing of each other."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()

    def loss(packing):
        split = samples(LENGTHS, untrained=(6, 7, 20), packing=packing, split="eval")
        batch = split.batch(0, range(len(split)))
        with torch.no_grad():
            logits = model(**batch.inputs(), use_cache=False).logits
        return len(split), cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").item()

    (few, packed), (many, alone) = loss("packed"), loss("padded")
    assert few < many
    assert packed == pytest.approx(alone, rel=1e-12)


def test_a_document_of_one_token_takes_no_place():
    assert targets(rows_of_epoch(samples([1, 3, 1]), 0)) == [3, 4]
