"""Adafactor in one process against PyTorch's, from parameters that are whole and from parts of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.config.recipe import Recipe
from toolkit.engines.optimizer import connect_optimizer, parameter_groups, torch_optimizer
from toolkit.engines.optimizer_states import PlainStates
from toolkit.engines.optimizers import adafactor
from toolkit.engines.optimizers.adafactor import Adafactor
from toolkit.errors import RunError
from toolkit.parallel.matrix_exchange import Part
from toolkit.parallel.shard import Shard

SHAPES = {
    "matrix": (6, 10),
    "experts": (3, 4, 5),
    "convolution": (8, 1, 3),
    "row": (1, 7),
    "vector": (9,),
    "scalar": (),
}
STEPS = 30


class Model(nn.Module):
    """A parameter of each shape; gradients that grow, so that updates are clipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {name: 1.3**step * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def wanted() -> dict[str, torch.Tensor]:
    """What torch.optim.Adafactor trains."""
    model = Model()
    named = dict(model.named_parameters())
    decayed = {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1}
    others = {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0}
    peer = torch.optim.Adafactor([decayed, others], lr=0.02)
    for step in range(STEPS):
        for name, gradient in model.gradients(step).items():
            named[name].grad = gradient
        peer.step()
    return {name: p.detach().clone() for name, p in named.items()}


def test_one_process_trains_what_torch_optim_adafactor_does(
    make_recipe: Callable[..., Recipe], wanted: dict[str, torch.Tensor]
) -> None:
    recipe = make_recipe(optimizer={"name": "adafactor", "lr": 0.02, "weight_decay": 0.1})
    model = Model()
    optimizer = torch_optimizer(recipe, parameter_groups(model.named_parameters(), recipe.optimizer), on_gpu=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()  # as DeepSpeed does while it is built
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    connect_optimizer(PlainStates(optimizer, ()), model.named_parameters())
    for step in range(STEPS):
        for name, gradient in model.gradients(step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(p, wanted[name], rtol=1e-6, atol=1e-6), name


def parts(name: str) -> list[Shard]:
    """Two halves of it along each dimension that can be halved, in pieces that do not follow each other."""
    shape = SHAPES[name]
    found = []
    for dim, size in enumerate(shape):
        if size > 2:
            pieces = ((0, 1), (2, size - 2)), ((1, 1),)
            found += [Shard(name=f"{name}{dim}", shape=shape, dim=dim, pieces=each) for each in pieces]
    return found or [Shard(name=name, shape=shape)]


def test_parts_of_matrices_are_updated_as_whole_ones(
    wanted: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half is in two tensors, divided within a row, and its fragments end within rows, too."""
    monkeypatch.setattr(adafactor, "UPDATE_CHUNK_ELEMENTS", 7)
    model = Model()
    held: list[tuple[str, Shard, int, torch.Tensor]] = []
    for name in SHAPES:
        for shard in parts(name):
            flat = shard.take(model.get_parameter(name).detach()).reshape(-1)
            half = flat.numel() // 2 if flat.numel() > 5 else flat.numel()
            held += [(name, shard, 0, flat[:half].clone()), (name, shard, half, flat[half:].clone())]
    groups: list[dict[str, Any]] = [
        {"params": [t for name, _, _, t in held if (len(SHAPES[name]) > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = Adafactor(groups, lr=0.02)
    optimizer.connect(
        (Part(tensor=t, shard=shard, start=start, length=t.numel(), offset=0) for _, shard, start, t in held), None
    )
    for step in range(STEPS):
        gradients = model.gradients(step)
        for name, shard, start, tensor in held:
            tensor.grad = shard.take(gradients[name]).reshape(-1)[start : start + tensor.numel()]
        optimizer.step()
    for name, shard, start, tensor in held:
        whole = shard.take(wanted[name]).reshape(-1)[start : start + tensor.numel()]
        assert torch.allclose(tensor, whole, rtol=1e-6, atol=1e-6), shard.name


def test_parts_of_a_matrix_that_are_updated_one_after_the_other_are_refused() -> None:
    """ZeRO-3's sub-groups: a first one's update would need the sums of the second."""
    halves = [torch.ones(30), torch.ones(30)]
    optimizer = Adafactor([{"params": [half]} for half in halves], lr=0.02)
    shard = Shard(name="matrix", shape=(6, 10))
    optimizer.connect(
        (Part(tensor=half, shard=shard, start=30 * index, length=30, offset=0) for index, half in enumerate(halves)),
        None,
    )
    for half in halves:
        half.grad = torch.ones(30)
    with pytest.raises(RunError, match="matrix in two parts"):
        optimizer.step()
    assert all(torch.equal(half, torch.ones(30)) for half in halves)
