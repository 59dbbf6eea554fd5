"""Dropout in a partitioned model: replicated activations are dropped alike, sharded ones independently."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nonempty import nonempty
from reordered_graphs import reordering_backend
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.engines.base import Engine
from toolkit.engines.dropout import DropoutStream
from toolkit.model_init.build_model import build_model
from toolkit.model_init.model_partition import ModelPartition
from toolkit.parallel.groups import ParallelGroups
from toolkit.parallel.shard import shard_of
from toolkit.parallel.tensor.region import Region
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import Tolerance, compare_curves
from toolkit.parity.run.train_in_memory import train_in_memory

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
Masks = dict[str, torch.Tensor]
DROPOUT = {"overrides__resid_pdrop": 0.2, "overrides__embd_pdrop": 0.2, "overrides__attn_pdrop": 0.2}
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence-parallel"])
WAYS = pytest.mark.parametrize(
    ("sequence_parallel", "gathers"), [(False, False), (True, True)], ids=["split", "gathered"]
)
"""The blocks that change the stream: ranks then hold others inside than outside."""


ORDER = ("embedding", "0 scores", "0 residual", "0 mlp", "1 scores", "1 residual", "1 mlp")
"""What a GPT-2 of two layers drops."""


def drop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x after dropout, which of it was kept)."""
    y = F.dropout(x, 0.5)
    return y, y.detach() != 0


def region(*, sequence_parallel: bool = False, gathers: bool = False, place: int = 0) -> Region:
    group = dist.group.WORLD
    return Region(group, sequence_parallel=sequence_parallel, dropout=True, gathers=gathers, place=place)


def seed_as_between_blocks(seed: int, *, sequence_parallel: bool) -> None:
    """Ranks that hold different positions have streams of their own."""
    torch.manual_seed(seed + (dist.get_rank() if sequence_parallel else 0))


def masks_around(sequence_parallel: bool = False, gathers: bool = False, training: bool = True) -> Masks:
    """What is dropped before, in and behind a region."""
    block, x = nn.Module().train(training), torch.ones(2, 8, 8)
    place = region(sequence_parallel=sequence_parallel, gathers=gathers)
    seed_as_between_blocks(5, sequence_parallel=sequence_parallel)
    kept = {"before": drop(x)[1]}
    inside = place.enter(x, block)
    kept["inside"] = drop(torch.ones(2, 8, 8))[1]
    place.leave(inside, block)
    kept["behind"] = drop(x)[1]
    return kept


@pytest.mark.parametrize(("where", "alike"), [("before", True), ("inside", False), ("behind", True)])
def test_ranks_drop_their_own_activations_only_inside_a_region(ranks: Ranks, where: str, alike: bool) -> None:
    first, second = ranks(masks_around, 2)
    assert torch.equal(first[where], second[where]) is alike


@pytest.mark.parametrize(("where", "alike"), [("before", False), ("inside", True), ("behind", False)])
def test_with_a_split_sequence_ranks_drop_alike_only_where_all_compute_the_same(
    ranks: Ranks, where: str, alike: bool
) -> None:
    first, second = ranks(masks_around, 2, True, True)
    assert torch.equal(first[where], second[where]) is alike


@pytest.mark.parametrize(
    ("sequence_parallel", "gathers", "alike"), [(True, False, False), (False, True, True)], ids=["split", "gathered"]
)
def test_a_block_keeps_the_stream_that_is_right_for_it_already(
    ranks: Ranks, sequence_parallel: bool, gathers: bool, alike: bool
) -> None:
    first, second = ranks(masks_around, 2, sequence_parallel, gathers)
    assert torch.equal(first["inside"], second["inside"]) is alike


def test_evaluation_leaves_the_stream_alone(ranks: Ranks) -> None:
    first, second = ranks(masks_around, 2, False, False, False)
    assert torch.equal(first["inside"], second["inside"])


def dropped_around(place: Region, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What dropout leaves of x before, in and behind a region, multiplied."""
    inside = place.enter(F.dropout(x, 0.1), block)
    behind: torch.Tensor = F.dropout(place.leave(F.dropout(inside, 0.1), block), 0.1)
    return behind


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.whole)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_graph_without_breaks_drops_what_eager_code_drops(
    ranks: Ranks, sequence_parallel: bool, backend: str
) -> None:
    def results(is_compiled: bool) -> list[torch.Tensor]:
        options = {"fallback_random": True} if backend == "inductor" else None
        compute = dropped_around
        if is_compiled:
            compute = torch.compile(dropped_around, backend=backend, fullgraph=True, options=options)
        block = nn.Module()
        place = region(sequence_parallel=sequence_parallel, gathers=sequence_parallel)
        seed_as_between_blocks(5, sequence_parallel=sequence_parallel)
        outcomes = []
        for _ in range(2):
            x = torch.ones(2, 8, 8, requires_grad=True)
            y = compute(place, block, x)
            y.square().sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            outcomes += [y.detach(), x.grad, torch.rand(3)]
        return outcomes

    for compiled, eager in zip(ranks(results, 2, True), ranks(results, 2, False), strict=True):
        assert all(map(torch.equal, compiled, eager))


def dropped_beside(first: Region, second: Region, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What dropout leaves of x in and behind two regions that both take x, and outside of them, stacked."""
    attended = F.dropout(first.leave(F.dropout(first.enter(x, block), 0.1), block), 0.2)
    outside = F.dropout(x, 0.3)
    hidden = F.dropout(second.leave(F.dropout(second.enter(x, block), 0.4), block), 0.5)
    return torch.stack([attended, outside, hidden, F.dropout(x, 0.6)])


def results_beside(backend: Any) -> list[torch.Tensor]:
    """Outputs, gradients and what is drawn next; `backend` None: of eager code."""
    compute = dropped_beside
    if backend is not None:
        compute = torch.compile(dropped_beside, backend=backend, fullgraph=True)
    block = nn.Module()
    places = [region(place=0), region(place=1)]
    torch.manual_seed(5)
    outcomes = []
    for _ in range(2):
        x = torch.ones(2, 8, 8, requires_grad=True)
        y = compute(*places, block, x)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        outcomes += [y.detach(), x.grad, torch.rand(3)]
    return outcomes


@pytest.mark.parametrize("keeps_draws", [True, False])
def test_a_compiler_that_puts_the_last_first_drops_what_eager_code_drops(ranks: Ranks, keeps_draws: bool) -> None:
    """Without the pass that lets draws follow each other it does not: entrances of one x are in any order."""
    backend = reordering_backend(keeps_draws=keeps_draws)
    for compiled, eager in zip(ranks(results_beside, 2, backend), ranks(results_beside, 2, None), strict=True):
        assert all(map(torch.equal, compiled, eager)) is keeps_draws


def test_a_graph_has_each_of_two_entrances_of_one_tensor(ranks: Ranks) -> None:
    for compiled, eager in zip(ranks(results_beside, 2, "aot_eager"), ranks(results_beside, 2, None), strict=True):
        assert all(map(torch.equal, compiled, eager))


def test_a_draw_without_inputs_that_could_follow_another_is_refused() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1) + torch.rand(3)

    compiled = torch.compile(draw, backend=reordering_backend())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="in an order that no compiler keeps"):
        compiled(torch.ones(3, requires_grad=True))


def test_two_regions_after_one_another_do_not_drop_alike(ranks: Ranks) -> None:
    def masks() -> list[torch.Tensor]:
        torch.manual_seed(0)
        place, block, found, x = region(), nn.Module(), [], torch.ones(1, 8, 8)
        for _ in range(2):
            inside = place.enter(x, block)
            found.append(drop(inside)[1])
            place.leave(inside, block)
        return found

    assert not any(torch.equal(*found) for found in nonempty(ranks(masks, 2)))


def test_a_region_that_two_layers_enter_changes_the_stream_once(ranks: Ranks) -> None:
    def states() -> list[torch.Tensor]:
        torch.manual_seed(0)
        place, x, found = region(), torch.ones(1, 8, 8), []
        for layer in (nn.Module(), nn.Module()):
            inside = place.enter(x, layer)
            found.append(torch.get_rng_state())
        place.leave(inside, layer)
        return [*found, torch.get_rng_state()]

    first, second = ranks(states, 2)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], second[2])


@WAYS
@pytest.mark.parametrize("drops_behind", [True, False], ids=["dropout-behind", "nothing-behind"])
def test_recomputation_drops_the_same_again(
    ranks: Ranks, sequence_parallel: bool, gathers: bool, drops_behind: bool
) -> None:
    def masks() -> list[list[torch.Tensor]]:
        """Per step all masks, in order: those of the forward pass, then those of its recomputation."""
        place, block = region(sequence_parallel=sequence_parallel, gathers=gathers), nn.Module()
        weight, steps = torch.ones(8, 8, requires_grad=True), []

        def layer(x: torch.Tensor) -> torch.Tensor:
            inside, kept = drop(place.enter(x, block))
            steps[-1].append(kept)
            # Where nothing behind is needed for the backward pass, recomputation stops here and never leaves.
            y = place.leave(F.linear(inside * inside, weight), block)
            if drops_behind:
                y, kept = drop(y)
                steps[-1].append(kept)
                y = y * y
            return y

        for step in range(3):
            steps.append([])
            seed_as_between_blocks(step, sequence_parallel=sequence_parallel)
            x = torch.ones(2, 4, 8, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False).sum().backward()
        return steps

    for steps in nonempty(ranks(masks, 2)):
        for kept in nonempty(steps):
            half = len(kept) // 2
            assert half == 1 + drops_behind
            assert all(torch.equal(a, b) for a, b in nonempty(zip(kept[:half], kept[half:], strict=True)))


def masks_of_model(recipe: Recipe, seeds: tuple[int, ...]) -> list[Masks]:
    """What a tensor-parallel GPT-2 drops in a forward pass with each seed, by the name in ORDER."""
    device = torch.device("cpu")
    job = Job.of(recipe, dist.get_world_size())
    groups = ParallelGroups.create(job.layout)
    partition = ModelPartition(job, groups, device)
    model = build_model(recipe, partition=partition).train()
    stream = DropoutStream(model, device, sequence_group=groups.tensor if groups.layout.sequence_parallel else None)
    kept: list[torch.Tensor] = []
    dropout = F.dropout

    def recording(x: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        y = dropout(x, *arguments, **keywords)
        kept.append(((y != 0) | (x == 0)).detach())
        return y

    F.dropout = recording  # in this rank alone, which ends with this function
    found = []
    for seed in seeds:
        kept.clear()
        stream.start(seed)
        model(input_ids=torch.arange(64).view(2, 32), use_cache=False)
        found.append(dict(zip(ORDER, kept, strict=True)))
    return found


def tensor_recipe(make_recipe: Make, *, sequence_parallel: bool = False, **changes: Any) -> Recipe:
    parallel = {"tp": 2, "sequence_parallel": sequence_parallel}
    recipe = make_recipe(parallel=parallel, **DROPOUT, **changes)
    # Other attention drops inside its kernel.
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"attn_implementation": "eager"})})


@pytest.mark.parametrize(
    ("sequence_parallel", "alike"),
    [
        (False, {"embedding", "0 residual", "0 mlp", "1 residual", "1 mlp"}),
        (True, {"embedding"}),  # the sequence is split behind it
    ],
    ids=["replicated", "sequence-parallel"],
)
def test_ranks_drop_the_same_activations_exactly_where_they_are_replicated(
    make_recipe: Make, ranks: Ranks, sequence_parallel: bool, alike: set[str]
) -> None:
    recipe = tensor_recipe(make_recipe, sequence_parallel=sequence_parallel)
    first, second = (found[0] for found in ranks(masks_of_model, 2, recipe, (1,)))
    assert {name for name in ORDER if torch.equal(first[name], second[name])} == alike


@SEQUENCE
def test_one_seed_drops_the_same_twice_and_another_seed_something_else(
    make_recipe: Make, ranks: Ranks, sequence_parallel: bool
) -> None:
    recipe = tensor_recipe(make_recipe, sequence_parallel=sequence_parallel)
    for once, other, again in nonempty(ranks(masks_of_model, 2, recipe, (1, 2, 1))):
        assert all(torch.equal(once[name], again[name]) for name in nonempty(once))
        assert not any(torch.equal(once[name], other[name]) for name in nonempty(once))


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [({"pp": 2, "zero_stage": 1}, 4), ({"pp": 2, "recompute": "full"}, 2)],
    ids=["dp2-pp2", "pp2-recompute"],
)
def test_pipeline_stages_drop_what_the_whole_model_does(
    make_recipe: Make, ranks: Ranks, parallel: dict[str, Any], world_size: int
) -> None:
    changes = DROPOUT | {"batch__micro_batch_size": 2, "train__steps": 4}
    reference = ranks(train_in_memory, 1, make_recipe(train__engine="reference", **changes))[0]
    found = ranks(train_in_memory, world_size, make_recipe(parallel=parallel, **changes))[0]
    report = compare_curves(found.curve, reference.curve, Tolerance.fp32())
    assert report.passed, str(report)


def replicated_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    whole = ((shard_of(p), p) for p in engine.model.parameters())
    return {shard.name: p.detach().clone() for shard, p in whole if not shard.is_split}


@pytest.mark.parametrize(("sequence_parallel", "zero_stage"), [(False, 0), (True, 1)], ids=["z0", "sequence-z1"])
def test_what_tensor_parallel_ranks_both_hold_stays_bitwise_the_same_while_they_drop(
    make_recipe: Make, ranks: Ranks, sequence_parallel: bool, zero_stage: int
) -> None:
    parallel = {"tp": 2, "sequence_parallel": sequence_parallel, "zero_stage": zero_stage}
    recipe = make_recipe(parallel=parallel, train__steps=3, **DROPOUT)
    first, second = (found.inspected for found in ranks(train_in_memory, 2, recipe, replicated_parameters))
    assert "transformer.wpe.weight" in first
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.whole), "full"])
def test_blocks_that_every_rank_computes_whole_keep_their_copies_the_same(
    make_recipe: Make, ranks: Ranks, tmp_path: Path, recompute: str
) -> None:
    """Inkling's attention is not sharded; between blocks, ranks have streams of their own."""
    tiny_config("inkling_text", vocab_size=322, attention_dropout=0.3).save_pretrained(tmp_path)
    parallel = {"tp": 2, "sequence_parallel": True, "zero_stage": 1, "recompute": recompute}
    recipe = make_recipe(model={"name_or_path": str(tmp_path)}, parallel=parallel, train__steps=3)
    first, second = (run.inspected for run in ranks(train_in_memory, 2, recipe, replicated_parameters))
    assert any("self_attn" in name for name in first)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@SEQUENCE
def test_recomputation_changes_no_gradient_of_a_tensor_parallel_run(
    make_recipe: Make, ranks: Ranks, sequence_parallel: bool
) -> None:
    # One step of four micro-batches; nothing is dropped behind the MLP, so recomputation stops inside it.
    changes = DROPOUT | {"overrides__resid_pdrop": 0.0, "train__steps": 1}
    parallel = {"tp": 2, "sequence_parallel": sequence_parallel}
    plain, recomputed = (
        ranks(train_in_memory, 2, make_recipe(parallel=parallel | more, **changes))[0].first_gradients
        for more in ({}, {"recompute": "full"})
    )
    assert [name for name in plain if not np.array_equal(plain[name], recomputed[name])] == []
