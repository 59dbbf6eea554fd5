"""Muon in one process against PyTorch's, what it applies to, and how its work is shared out."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn

from toolkit.config.recipe import AdjustLr, OptimizerSection, Recipe
from toolkit.engines.optimizer import connect_optimizer, parameter_groups, torch_optimizer
from toolkit.engines.optimizer_states import PlainStates, state_kinds
from toolkit.engines.optimizers.muon import Muon, orthogonalize
from toolkit.models.hidden_matrices import is_hidden_matrix
from toolkit.parallel.matrix_exchange import MatrixExchange, _assign, fragments_of
from toolkit.parallel.shard import Shard


class Model(nn.Module):
    """An embedding, two layers of a wide and a tall matrix, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 20), "down": nn.Linear(20, 8)}) for _ in "ab")

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def trained(*optimizers: Any, model: Model) -> dict[str, torch.Tensor]:
    for step in range(5):
        model.set_gradients(step)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("adjust_lr", get_args(AdjustLr))
def test_one_process_trains_what_torch_optim_muon_does(make_recipe: Callable[..., Recipe], adjust_lr: AdjustLr) -> None:
    settings = {"name": "muon", "lr": 0.02, "adamw_lr": 0.005, "weight_decay": 0.1, "adjust_lr": adjust_lr}
    torch.manual_seed(0)
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    recipe = make_recipe(optimizer=settings, precision="bf16")  # whose products are in bf16, as theirs always are
    optimizer = torch_optimizer(recipe, parameter_groups(ours.named_parameters(), recipe.optimizer), on_gpu=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * group["lr_ratio"]
    connect_optimizer(PlainStates(optimizer, state_kinds("muon", 0.0)), ours.named_parameters())
    hidden = [p for name, p in theirs.named_parameters() if is_hidden_matrix(name, p.shape)]
    other = [p for name, p in theirs.named_parameters() if not is_hidden_matrix(name, p.shape)]
    peers = (
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust_lr),
        torch.optim.AdamW([p for p in other if p.ndim > 1], lr=0.005, weight_decay=0.1),
        torch.optim.AdamW([p for p in other if p.ndim == 1], lr=0.005, weight_decay=0.0),
    )
    assert len(hidden) == 4
    wanted = trained(*peers, model=theirs)
    for name, value in trained(optimizer, model=ours).items():
        assert torch.allclose(value, wanted[name], atol=1e-6), name


def test_orthogonal_matrices_are_what_is_subtracted() -> None:
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    for found, matrix in zip(orthogonalize(matrices), matrices, strict=True):
        assert torch.linalg.svdvals(found).sub(0.95).abs().max() < 0.3
        assert torch.allclose(found, orthogonalize(matrix.mT[None])[0].mT, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.mlp.up_proj.weight", (20, 8), True),
        ("transformer.h.11.attn.c_attn.weight", (8, 24), True),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 8), True),
        ("model.layers.3.mlp.experts.gate_up_proj", (4, 8, 20), True),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (4, 20), False),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 8), False),
        ("model.layers.3.conv.weight", (8, 1, 3), False),
        ("model.layers.3.mixer.A_log", (8, 4), False),
        ("model.layers.3.input_layernorm.weight", (8,), False),
        ("model.embed_tokens.weight", (24, 8), False),
        ("lm_head.weight", (24, 8), False),
    ],
)
def test_matrices_of_layers_are_updated_by_muon_and_nothing_else(
    name: str, shape: tuple[int, ...], wanted: bool
) -> None:
    assert is_hidden_matrix(name, shape) == wanted


def test_a_stack_of_experts_has_one_fragment_for_each_expert() -> None:
    """Of experts 2 and 3 of four, each half of its columns, this rank has the last 7 of 12 elements in a partition."""
    whole_experts = Shard(name="e", shape=(4, 3, 2), dim=0, pieces=((2, 2),))
    found = list(fragments_of(whole_experts, start=5, length=7, tensor=0, offset=100))
    assert [(one.index, one.start, one.length, one.offset) for one in found] == [(2, 5, 1, 100), (3, 0, 6, 101)]
    halves = Shard(name="e", shape=(4, 3, 2), dim=2, pieces=((1, 1),))
    found = list(fragments_of(halves, start=0, length=12, tensor=0, offset=0))
    assert [(one.index, one.start, one.length, one.part_shape) for one in found] == [
        (i, 0, 3, (3, 1)) for i in range(4)
    ]


def test_work_is_shared_out_by_cost() -> None:
    shapes = {("a", i): (64, 64) for i in range(6)} | {("b", i): (64, 256) for i in range(6)}
    owners = _assign(shapes, 4)
    cost = {matrix: rows * columns * min(rows, columns) for matrix, (rows, columns) in shapes.items()}
    loads = [sum(cost[matrix] for matrix, owner in owners.items() if owner == rank) for rank in range(4)]
    assert max(loads) <= 1.1 * sum(cost.values()) / 4


def test_a_round_has_no_more_than_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.parallel.matrix_exchange.UPDATE_CHUNK_ELEMENTS", 100)
    shards = [Shard(name=f"m{i}", shape=(6, 7)) for i in range(5)]
    fragments = [one for s in shards for one in fragments_of(s, start=0, length=42, tensor=0, offset=0)]
    exchange = MatrixExchange(fragments, None)
    assert [len(one.borrowed) for one in exchange.rounds] == [2, 2, 1]


def test_nothing_moves_before_the_optimizer_knows_where_matrices_are() -> None:
    """DeepSpeed takes a step with zero gradients while it is built."""
    model = Model()
    section = OptimizerSection(name="muon", lr=0.1, weight_decay=0.5)
    groups = [group for group in parameter_groups(model.named_parameters(), section) if group["muon"]]
    optimizer = Muon(
        groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8, momentum=0.9, adjust_lr="original", dtype=torch.float32
    )
    before = [parameter.detach().clone() for group in groups for parameter in group["params"]]
    model.set_gradients(0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, groups[0]["params"], strict=True))
