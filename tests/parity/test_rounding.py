"""Another rounding seed: each result moves by one unit in the last place, and training still works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.parity.run.rounding import round_differently
from toolkit.parity.tolerance import UNIT_ROUNDOFF

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Same(nn.Module):
    def forward(self, value: Any) -> Any:
        return value


def moved(precision: str, value: torch.Tensor, seed: int = 1) -> torch.Tensor:
    module = Same()
    round_differently(module, precision=precision, seed=seed)  # type: ignore[arg-type]
    result: torch.Tensor = module(value)
    return result


@pytest.fixture(params=DTYPES)
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def values(precision: str) -> torch.Tensor:
    return torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(DTYPES[precision])


def test_every_element_moves(precision: str) -> None:
    assert (moved(precision, values(precision)) != values(precision)).all()


def test_none_moves_further_than_the_distance_to_the_next_number_and_its_rounding(precision: str) -> None:
    before, after = values(precision).double(), moved(precision, values(precision)).double()
    unit = UNIT_ROUNDOFF[precision]  # type: ignore[index]
    # What fp16 stores below 6e-5 has fewer bits.
    assert ((after - before).abs() <= (2 * unit * before.abs() + unit * after.abs()) + 2.0**-25).all()


def test_as_many_move_up_as_down(precision: str) -> None:
    before, after = values(precision).abs(), moved(precision, values(precision).abs())
    assert (after > before).double().mean().item() == pytest.approx(0.5, abs=0.02)


def test_the_same_seed_gives_the_same_bits(precision: str) -> None:
    assert torch.equal(moved(precision, values(precision)), moved(precision, values(precision)))


def test_another_seed_gives_other_bits(precision: str) -> None:
    assert not torch.equal(moved(precision, values(precision)), moved(precision, values(precision), seed=2))


def test_a_second_call_draws_anew() -> None:
    module = Same()
    round_differently(module, precision="fp32", seed=1)
    assert not torch.equal(module(values("fp32")), module(values("fp32")))


def test_zero_stays_zero() -> None:
    assert not moved("fp32", torch.zeros(9)).any()


@pytest.mark.parametrize("value", [torch.arange(3), (torch.ones(2),), None], ids=["integers", "a tuple", "nothing"])
def test_what_is_no_tensor_of_numbers_is_left_as_it_is(value: Any) -> None:
    assert moved("fp32", value) is value


def test_only_leaves_are_moved() -> None:
    outer = nn.Sequential(Same())
    round_differently(outer, precision="fp32", seed=1)
    assert torch.equal(outer(values("fp32")), moved("fp32", values("fp32")))


def trained(prepare: Callable[[nn.Module], None]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 8)
    targets = inputs.sum(1, keepdim=True)
    losses = []
    for _ in range(20):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_ends_next_to_where_it_would() -> None:
    plain = trained(lambda model: None)
    other = trained(lambda model: round_differently(model, precision="fp32", seed=1))
    assert other != plain
    assert other == pytest.approx(plain, rel=1e-4)
    assert other[-1] < 0.5 * other[0]
