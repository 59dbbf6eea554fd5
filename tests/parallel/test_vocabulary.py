"""Embedding, head and loss over a split vocabulary, against those over the whole one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import SavedForBackward
from nonempty import nonempty
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from toolkit.parallel.loss import IGNORE, token_loss_sum
from toolkit.parallel.shard import shard_of
from toolkit.parallel.tensor.vocabulary import (
    VocabularyShard,
    shard_embedding,
    shard_head,
    vocab_parallel_token_loss_sum,
)

Ranks = Callable[..., list[Any]]
SPLITS = pytest.mark.parametrize(("size", "entries"), [(2, 8), (3, 7), (4, 99), (4, 7), (4, 3)])
"""(4, 7) leaves the last rank a row and padding, (4, 3) padding alone."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(entries: int, *, seed: int = 0) -> torch.Tensor:
    """[2, 6] tokens; the first and the last of the vocabulary are there."""
    ids = torch.randint(entries, (2, 6), generator=torch.Generator().manual_seed(seed))
    ids[0, 0], ids[1, -1] = 0, entries - 1
    return ids


def embedding(entries: int, *, kind: type[nn.Embedding] = nn.Embedding, **keywords: Any) -> nn.Embedding:
    layer = kind(entries, 5, **keywords).double()
    with torch.no_grad():
        layer.weight.copy_(draw(entries, 5))
    return layer


def check_embedding(whole: nn.Embedding) -> bool:
    layer = copy.deepcopy(whole)
    shard_embedding(layer, "embed", dist.group.WORLD)
    ids, gradient = tokens(whole.num_embeddings), draw(2, 6, 5, seed=1)
    expected, found = whole(ids), layer(ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    expected.backward(gradient)
    found.backward(gradient)
    torch.testing.assert_close(layer.weight.grad, shard_of(layer.weight).take(whole.weight.grad))
    return True


@SPLITS
def test_a_split_embedding_looks_up_and_learns_what_the_whole_does(ranks: Ranks, size: int, entries: int) -> None:
    assert all(nonempty(ranks(check_embedding, size, embedding(entries))))


@pytest.mark.parametrize("padding", [0, 3, 6])
def test_the_padding_token_does_not_learn_wherever_it_lies(ranks: Ranks, padding: int) -> None:
    assert all(nonempty(ranks(check_embedding, 3, embedding(7, padding_idx=padding))))


def test_a_family_that_scales_its_embedding_still_does(ranks: Ranks) -> None:
    whole = embedding(7, kind=Gemma3TextScaledWordEmbedding, padding_idx=0, embed_scale=8.0)
    assert all(nonempty(ranks(check_embedding, 3, whole)))


def test_an_idle_embedding_gives_zeros_of_the_right_shape(ranks: Ranks) -> None:
    def lookup() -> torch.Tensor:
        layer = embedding(7)
        shard_embedding(layer, "embed", dist.group.WORLD, is_idle=True)
        return layer(tokens(7)).detach().clone()

    assert all(torch.equal(found, torch.zeros(2, 6, 5, dtype=torch.float64)) for found in nonempty(ranks(lookup, 2)))


@SPLITS
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_a_split_head_computes_its_logits_of_the_whole(ranks: Ranks, size: int, entries: int, bias: bool) -> None:
    def check() -> bool:
        whole = nn.Linear(5, entries, bias=bias).double()
        with torch.no_grad():
            for seed, parameter in enumerate(whole.parameters()):
                parameter.copy_(draw(*parameter.shape, seed=seed))
        layer = copy.deepcopy(whole)
        shard_head(layer, "head", dist.group.WORLD)
        rows = shard_of(layer.weight)
        hidden, own_hidden = (draw(2, 6, 5).requires_grad_() for _ in range(2))
        gradient = draw(2, 6, entries, seed=9)

        def own(logits: torch.Tensor) -> torch.Tensor:
            padding = logits.new_zeros(2, 6, rows.padding)
            return torch.cat([*(logits.narrow(-1, *piece) for piece in rows.pieces), padding], -1)

        expected, found = whole(hidden), layer(own_hidden)
        torch.testing.assert_close(found, own(expected))
        expected.backward(gradient)
        found.backward(own(gradient))
        torch.testing.assert_close(own_hidden.grad, hidden.grad)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, shard_of(parameter).take(whole.get_parameter(name).grad))
        return True

    assert all(nonempty(ranks(check, size)))


def test_a_tied_head_keeps_the_rows_of_the_embedding(ranks: Ranks) -> None:
    def is_tied() -> bool:
        embed, head = embedding(7), nn.Linear(5, 7, bias=False)
        shard_embedding(embed, "embed", dist.group.WORLD)
        shard_head(head, "head", dist.group.WORLD, tied_to=embed.weight)
        return head.weight is embed.weight and shard_of(head.weight).name == "embed.weight"

    assert ranks(is_tied, 2) == [True, True]


def own_logits(whole: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """This rank's logits; padding holds what a head with rows of zeros would give it: anything must do."""
    padding = whole.new_full((*whole.shape[:-1], shard.rows - shard.real_rows), 50.0)
    return torch.cat([whole[..., shard.start : shard.start + shard.real_rows], padding], -1)


def losses(logits: torch.Tensor, labels: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """((loss, gradient) of the whole logits, the same of this rank's), the upstream gradient being 0.5."""
    whole = logits.clone().requires_grad_()
    shard = VocabularyShard.of(logits.shape[-1], dist.group.WORLD)
    own = own_logits(logits, shard).requires_grad_()
    expected = token_loss_sum(whole, labels)
    found = vocab_parallel_token_loss_sum(own, labels, shard, dist.group.WORLD, ignore=IGNORE)
    for loss in (expected, found):
        (0.5 * loss).backward()
    assert whole.grad is not None
    assert own.grad is not None
    expected_gradient = own_logits(whole.grad, shard)
    expected_gradient[..., shard.real_rows :] = 0.0
    return (expected.detach(), expected_gradient), (found.detach(), own.grad)


def labels_with_ignored(entries: int) -> torch.Tensor:
    labels = tokens(entries, seed=3)
    labels[0, 1:3] = IGNORE
    return labels


@SPLITS
def test_the_split_loss_is_that_of_the_whole_logits(ranks: Ranks, size: int, entries: int) -> None:
    def check() -> bool:
        logits = draw(2, 6, entries, dtype=torch.float32)
        for changed in (logits, logits * 1e4, logits + 1e4, logits - 1e4):
            expected, found = losses(changed, labels_with_ignored(entries))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        return True

    assert all(nonempty(ranks(check, size)))


@SPLITS
def test_bf16_logits_lose_nothing_on_the_way_to_the_loss(ranks: Ranks, size: int, entries: int) -> None:
    def check() -> bool:
        expected, found = losses(draw(2, 6, entries, dtype=torch.bfloat16) * 3, labels_with_ignored(entries))
        assert found[0].dtype == torch.float32
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
        # One rounding of the same fp32 gradient: a unit in the last place of bf16 at most.
        torch.testing.assert_close(found[1], expected[1], rtol=2**-7, atol=1e-8)
        return True

    assert all(nonempty(ranks(check, size)))


@pytest.mark.parametrize("entries", [7, 3])
def test_padding_gets_exactly_no_gradient(ranks: Ranks, entries: int) -> None:
    def padding_gradient() -> torch.Tensor:
        _, (_, gradient) = losses(draw(2, 6, entries, dtype=torch.float32), labels_with_ignored(entries))
        return gradient[..., VocabularyShard.of(entries, dist.group.WORLD).real_rows :]

    found = ranks(padding_gradient, 4)
    assert found[-1].numel()
    assert not any(gradient.count_nonzero() for gradient in found)


def test_ignored_positions_get_exactly_no_gradient(ranks: Ranks) -> None:
    def gradient() -> torch.Tensor:
        return losses(draw(2, 6, 7, dtype=torch.float32), labels_with_ignored(7))[1][1]

    assert not any(found[0, 1:3].count_nonzero() for found in nonempty(ranks(gradient, 2)))


def test_a_micro_batch_without_targets_has_no_loss_and_no_gradient(ranks: Ranks) -> None:
    def outcome() -> tuple[torch.Tensor, ...]:
        return losses(draw(2, 6, 7, dtype=torch.float32), torch.full((2, 6), IGNORE))[1]

    assert not any(value.count_nonzero() for found in nonempty(ranks(outcome, 2)) for value in nonempty(found))


def test_every_rank_has_the_same_loss_to_the_bit(ranks: Ranks) -> None:
    def loss() -> float:
        return losses(draw(2, 6, 99, dtype=torch.float32), labels_with_ignored(99))[1][0].item()

    assert len(set(ranks(loss, 4))) == 1


@pytest.mark.parametrize("entries", [8, 7], ids=["no-padding", "padding"])
def test_the_callers_logits_stay_as_they_are(ranks: Ranks, entries: int) -> None:
    def is_unchanged() -> bool:
        shard = VocabularyShard.of(entries, dist.group.WORLD)
        logits = own_logits(draw(2, 6, entries, dtype=torch.float32), shard)
        before = logits.clone()
        vocab_parallel_token_loss_sum(logits, labels_with_ignored(entries), shard, dist.group.WORLD, ignore=IGNORE)
        return torch.equal(logits, before)

    assert ranks(is_unchanged, 4) == [True] * 4


def test_head_and_loss_together_learn_what_the_whole_head_does(ranks: Ranks) -> None:
    def check() -> bool:
        entries, labels = 7, labels_with_ignored(7)
        whole = nn.Linear(5, entries, bias=False)
        with torch.no_grad():
            whole.weight.copy_(draw(entries, 5, dtype=torch.float32))
        layer = copy.deepcopy(whole)
        shard_head(layer, "head", dist.group.WORLD)
        hidden, own_hidden = (draw(2, 6, 5, seed=1, dtype=torch.float32).requires_grad_() for _ in range(2))
        shard = VocabularyShard.of(entries, dist.group.WORLD)
        token_loss_sum(whole(hidden), labels).backward()
        vocab_parallel_token_loss_sum(layer(own_hidden), labels, shard, dist.group.WORLD, ignore=IGNORE).backward()
        torch.testing.assert_close(own_hidden.grad, hidden.grad)
        torch.testing.assert_close(layer.weight.grad, shard_of(layer.weight).take(whole.weight.grad))
        return True

    assert all(nonempty(ranks(check, 4)))


def test_what_is_kept_does_not_depend_on_where_the_targets_are(ranks: Ranks) -> None:
    def kept() -> list[int]:
        shard = VocabularyShard.of(99, dist.group.WORLD)
        logits = own_logits(draw(2, 6, 99, dtype=torch.float32), shard).requires_grad_()
        found = []
        for labels in (torch.zeros(2, 6, dtype=torch.long), tokens(99), torch.full((2, 6), 98)):
            with SavedForBackward(nn.Identity()) as saved:
                vocab_parallel_token_loss_sum(logits, labels, shard, dist.group.WORLD)
            found.append(saved.bytes)
        return found

    for found in nonempty(ranks(kept, 2)):
        assert found == [4 * 12 * 50 + 8 * 12] * 3, "the softmax, and the labels, which are not copied"
