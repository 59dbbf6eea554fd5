"""Each pair of collectives against its definition, and as a differentiable function of what all ranks know."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.parallel.tensor import collectives as c

Ranks = Callable[..., list[Any]]
Apply = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def of_rank(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    """A tensor that every process can compute for any rank."""
    chance = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=chance)


def outcome(apply: Apply, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient of the input) of this rank, whose input and output gradient are its own."""
    rank = dist.get_rank()
    x = of_rank(rank, *shape).requires_grad_()
    y = apply(x, dist.group.WORLD)
    y.backward(of_rank(rank, *y.shape, salt=1))
    assert x.grad is not None
    return y.detach(), x.grad


def slices(x: torch.Tensor, size: int, dim: int) -> list[torch.Tensor]:
    return list(x.chunk(size, dim))


def inputs(size: int, *shape: int) -> list[torch.Tensor]:
    return [of_rank(rank, *shape) for rank in range(size)]


def gradients(size: int, *shape: int) -> list[torch.Tensor]:
    return [of_rank(rank, *shape, salt=1) for rank in range(size)]


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def assert_ranks(found: list[tuple[torch.Tensor, torch.Tensor]], forward: list[Any], backward: list[Any]) -> None:
    torch.testing.assert_close([one[0] for one in found], forward)
    torch.testing.assert_close([one[1] for one in found], backward)


def test_f_copies_forward_and_sums_backward(ranks: Ranks) -> None:
    found = ranks(outcome, 3, c.copy_to_tensor_ranks, (2, 5))
    assert_ranks(found, inputs(3, 2, 5), [total(gradients(3, 2, 5))] * 3)


def test_g_sums_forward_and_copies_backward(ranks: Ranks) -> None:
    found = ranks(outcome, 3, c.reduce_from_tensor_ranks, (2, 5))
    assert_ranks(found, [total(inputs(3, 2, 5))] * 3, gradients(3, 2, 5))


@pytest.mark.parametrize(("dim", "whole"), [(-1, (2, 3, 12)), (1, (2, 9, 4)), (0, (6, 3, 4))])
def test_gathering_joins_slices_and_its_gradient_is_the_own_slice(
    ranks: Ranks, dim: int, whole: tuple[int, ...]
) -> None:
    found = ranks(outcome, 3, lambda x, group: c.gather_from_tensor_ranks(x, group, dim=dim), (2, 3, 4))
    backward = [slices(gradient, 3, dim)[rank] for rank, gradient in enumerate(gradients(3, *whole))]
    assert_ranks(found, [torch.cat(inputs(3, 2, 3, 4), dim)] * 3, backward)


@pytest.mark.parametrize(("dim", "part"), [(-1, (6, 3, 2)), (1, (6, 1, 6)), (0, (2, 3, 6))])
def test_scattering_takes_the_own_slice_and_its_gradient_joins_them(
    ranks: Ranks, dim: int, part: tuple[int, ...]
) -> None:
    found = ranks(outcome, 3, lambda x, group: c.scatter_to_tensor_ranks(x, group, dim=dim), (6, 3, 6))
    forward = [slices(x, 3, dim)[rank] for rank, x in enumerate(inputs(3, 6, 3, 6))]
    assert_ranks(found, forward, [torch.cat(gradients(3, *part), dim)] * 3)


@pytest.mark.parametrize(("dim", "whole"), [(1, (2, 6, 4)), (0, (4, 3, 4))])
def test_gathering_a_sequence_joins_slices_and_its_gradient_is_the_own_slice_of_the_sum(
    ranks: Ranks, dim: int, whole: tuple[int, ...]
) -> None:
    found = ranks(outcome, 2, lambda x, group: c.gather_sequence(x, group, dim=dim), (2, 3, 4))
    assert_ranks(found, [torch.cat(inputs(2, 2, 3, 4), dim)] * 2, slices(total(gradients(2, *whole)), 2, dim))


@pytest.mark.parametrize(("dim", "part"), [(1, (6, 2, 5)), (0, (3, 4, 5))])
def test_reduce_scattering_a_sequence_takes_the_own_slice_of_the_sum_and_its_gradient_joins_slices(
    ranks: Ranks, dim: int, part: tuple[int, ...]
) -> None:
    found = ranks(outcome, 2, lambda x, group: c.reduce_scatter_sequence(x, group, dim=dim), (6, 4, 5))
    assert_ranks(found, slices(total(inputs(2, 6, 4, 5)), 2, dim), [torch.cat(gradients(2, *part), dim)] * 2)


ROUND_TRIPS: dict[str, Apply] = {
    # Every rank does other work in between, so a pair that forgets a rank or counts it twice has another derivative.
    "f and g": lambda x, g: c.reduce_from_tensor_ranks((c.copy_to_tensor_ranks(x, g) * (2 + g.rank())).sin(), g),
    "scatter and gather": lambda x, g: c.gather_from_tensor_ranks(
        (c.scatter_to_tensor_ranks(x, g, dim=1) * (2 + g.rank())).sin(), g, dim=1
    ),
    "sequence": lambda x, g: c.gather_from_tensor_ranks(
        c.reduce_scatter_sequence(
            (c.gather_sequence(c.scatter_to_tensor_ranks(x, g, dim=1), g) * (2 + g.rank())).sin(), g
        ),
        g,
        dim=1,
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_a_round_trip_has_the_gradient_of_its_finite_differences(ranks: Ranks, size: int, trip: str) -> None:
    def check() -> bool:
        # The same x on every rank, moved in step.
        x = of_rank(0, 2, 6, 2).requires_grad_()
        return torch.autograd.gradcheck(lambda x: ROUND_TRIPS[trip](x, dist.group.WORLD), x)

    assert ranks(check, size) == [True] * size


EVERY: dict[str, Apply] = {
    "copy": c.copy_to_tensor_ranks,
    "reduce": c.reduce_from_tensor_ranks,
    "gather": lambda x, group: c.gather_from_tensor_ranks(x, group, dim=1),
    "scatter": lambda x, group: c.scatter_to_tensor_ranks(x, group, dim=1),
    "gather_sequence": c.gather_sequence,
    "reduce_scatter_sequence": c.reduce_scatter_sequence,
}


def test_the_callers_tensor_stays_as_it_is(ranks: Ranks) -> None:
    def changed() -> list[str]:
        found = []
        for name, apply in EVERY.items():
            x = of_rank(dist.get_rank(), 2, 4, 2)
            before = x.clone()
            apply(x, dist.group.WORLD)
            found += [] if torch.equal(x, before) else [name]
        return found

    assert ranks(changed, 2) == [[], []]


@pytest.mark.parametrize("samples", [1, 2])
def test_a_model_may_change_the_result_in_place(ranks: Ranks, samples: int) -> None:
    def change() -> int:
        for name, apply in EVERY.items():
            if name != "copy":  # f hands its input on
                x = of_rank(dist.get_rank(), samples, 4, 2).requires_grad_()
                apply(x * 1.0, dist.group.WORLD).add_(1.0).sum().backward()
        return samples

    assert ranks(change, 2) == [samples] * 2


def test_a_group_of_one_costs_nothing(ranks: Ranks) -> None:
    def untouched() -> list[str]:
        x = torch.zeros(2, 2, 2)
        return [name for name, apply in EVERY.items() if apply(x, dist.group.WORLD) is x]

    assert ranks(untouched, 1) == [list(EVERY)]
