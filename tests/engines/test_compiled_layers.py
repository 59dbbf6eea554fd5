"""Compiled decoder layers: what is compiled, and what a run says of it. Parity: tests/parity/test_compiled.py."""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from daily import daily
from nonempty import nonempty
from refusals import refused
from reordered_graphs import reordering_backend

from toolkit import Callback
from toolkit import train as train_job
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.random_order import RandomOrder, draws_numbers
from toolkit.errors import ModelError, RunError
from toolkit.parallel.pipeline.weight_gradients import WeightGradients
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import ParityRun, Tolerance, compare_curves
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.step_metrics import StepMetrics
from toolkit.training.loop import TrainingRun

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
LLAMA = {"name_or_path": "llama-tiny", "overrides": {"num_hidden_layers": 4, "vocab_size": 321}}
DROPOUT = {"overrides__resid_pdrop": 0.1, "overrides__attn_pdrop": 0.1}


@pytest.fixture
def untranslated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured, but run as they are: translating them to C++ takes seconds each."""
    from toolkit.engines import compiled_layers

    monkeypatch.setattr(compiled_layers, "_OPTIONS", {"backend": "aot_eager"})


def compiled_trial(recipe: Recipe) -> ParityRun:
    return train_in_memory(recipe, inspect=lambda engine: engine.compiled and engine.compiled.facts())


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        ("deepspeed", 1),
        pytest.param("ddp", 0, marks=pytest.mark.whole),
        pytest.param("deepspeed", 3, marks=pytest.mark.whole),
        pytest.param("fsdp", 0, marks=pytest.mark.whole),
    ],
)
def test_fused_kernels_drop_the_same_activations(make_recipe: Make, ranks: Ranks, engine: str, stage: int) -> None:
    changes = DROPOUT | {"train__engine": engine, "train__steps": 4, "parallel": {"zero_stage": stage}}
    world_size = 1 if engine == "deepspeed" and stage == 1 else 2
    eager = ranks(compiled_trial, world_size, make_recipe(**changes))[0]
    assert eager.inspected is None
    recipe = make_recipe(**changes, train__compile=True)
    compiled = ranks(compiled_trial, world_size, recipe)[0]
    assert compiled.inspected == {"layers": 2, "graphs": 1, "graph_breaks": {}}
    report = compare_curves(compiled.curve, eager.curve, Tolerance.fp32())
    assert report.passed, str(report)


@pytest.mark.whole
@pytest.mark.usefixtures("untranslated")
def test_zero_3_with_frozen_layers_reduces_every_adapter(make_recipe: Make, ranks: Ranks) -> None:
    """The first layer has no input that requires a gradient, and DeepSpeed waits for one."""
    changes = {"model__lora": {"r": 4}, "train__steps": 4, "parallel": {"zero_stage": 3}}
    eager = ranks(compiled_trial, 2, make_recipe(**changes))[0]
    compiled = ranks(compiled_trial, 2, make_recipe(**changes, train__compile=True))[0]
    report = compare_curves(compiled.curve, eager.curve, Tolerance.fp32())
    assert report.passed, str(report)
    assert not compiled.inspected["graph_breaks"]


@pytest.mark.whole
@pytest.mark.usefixtures("untranslated")
def test_graphs_are_as_many_with_more_layers(make_recipe: Make, ranks: Ranks) -> None:
    changes = DROPOUT | {"train__steps": 2, "parallel": {"tp": 2}, "train__compile": True}
    few, many = (
        ranks(compiled_trial, 2, make_recipe(**changes, overrides__n_layer=layers))[0].inspected for layers in (2, 5)
    )
    assert (few.pop("layers"), many.pop("layers")) == (2, 5)
    assert few == many


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of the layers: `inductor`, as in a run, `aot_eager`, which runs graphs as they are, or `reordered`,
    which runs them in another order."""
    if request.param == "aot_eager":
        request.getfixturevalue("untranslated")
    if request.param == "reordered":
        from toolkit.engines import compiled_layers

        monkeypatch.setattr(compiled_layers, "_OPTIONS", {"backend": reordering_backend()})


@pytest.mark.daily
@pytest.mark.parametrize(
    ("backend", "parallel"),
    [
        ("aot_eager", {"tp": 2}),
        *(
            pytest.param("inductor", parallel, marks=[pytest.mark.whole, NEEDS_COMPILER])
            for parallel in (
                {"tp": 2},
                {"tp": 2, "recompute": "full"},
                {"tp": 2, "pp": 2},
                {"tp": 2, "sequence_parallel": True},
            )
        ),
    ],
    indirect=["backend"],
)
@pytest.mark.usefixtures("backend")
def test_tensor_parallel_ranks_change_their_stream_of_dropout_within_a_graph(
    make_recipe: Make, ranks: Ranks, parallel: dict[str, Any]
) -> None:
    changes = DROPOUT | {"train__steps": 4, "parallel": parallel}
    world_size = 2 * parallel.get("pp", 1)
    eager = ranks(compiled_trial, world_size, make_recipe(**changes))[0]
    compiled = ranks(compiled_trial, world_size, make_recipe(**changes, train__compile=True))[0]
    assert compiled.inspected["graphs"] == 1
    assert not compiled.inspected["graph_breaks"]
    report = compare_curves(compiled.curve, eager.curve, Tolerance.fp32())
    assert report.passed, str(report)


CHAINS = ("biogpt", "bloom", "gpt2", "gpt_bigcode", "llama", "openai-gpt", "opt", "persimmon", "seed_oss", "starcoder2")
"""Families whose decoder layers draw each mask for what follows from the result of the mask before it."""
PARALLEL = ("codegen", "falcon", "gpt_neox", "gptj", "phi")
"""Families with attention beside the MLP. They drop nothing by default, and are made to drop all that they can."""


def with_dropout(family: str, folder: Path) -> dict[str, Any]:
    """The section `model` for a tiny model of a family that drops all that it can."""
    config = tiny_config(family, vocab_size=320)
    for name, value in config.to_dict().items():
        if "drop" in name and name != "layerdrop" and isinstance(value, float):
            setattr(config, name, 0.1)
    config.save_pretrained(folder / family)
    return {"name_or_path": str(folder / family)}


@pytest.mark.parametrize(
    ("backend", "family", "parallel"),
    [
        pytest.param("reordered", "gptj", {"tp": 2}, marks=pytest.mark.daily),
        *(
            pytest.param(backend, family, parallel, marks=[pytest.mark.whole, NEEDS_COMPILER])
            for backend in ("reordered", "inductor", "aot_eager")
            for family in PARALLEL
            for parallel in (
                {"tp": 2},
                {"tp": 2, "recompute": "full"},
                {"tp": 2, "sequence_parallel": True},
                {"dp": 1},
            )
            if (backend, family, parallel) != ("reordered", "gptj", {"tp": 2})
        ),
    ],
    indirect=["backend"],
)
@pytest.mark.usefixtures("backend")
def test_attention_beside_an_mlp_drops_what_eager_layers_drop(
    make_recipe: Make, ranks: Ranks, tmp_path: Path, family: str, parallel: dict[str, Any]
) -> None:
    """One other mask in a step changes the loss by more than a thousandth."""
    changes = {"model": with_dropout(family, tmp_path), "train__steps": 4, "parallel": parallel}
    world_size = parallel.get("tp", 1)
    eager = ranks(compiled_trial, world_size, make_recipe(**changes))[0]
    compiled = ranks(compiled_trial, world_size, make_recipe(**changes, train__compile=True))[0]
    assert not compiled.inspected["graph_breaks"]
    assert compiled.inspected["graphs"] == 1
    report = compare_curves(compiled.curve, eager.curve, Tolerance.fp32())
    assert report.passed, str(report)
    assert report.max_loss_difference <= 1e-6


def chains_of_layers(recipe: Recipe) -> list[list[str]]:
    """What draws from the random stream in each graph of a forward pass, in order. Raises if it is no chain of data."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from toolkit.engines import compiled_layers

    chains: list[list[str]] = []

    def partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        in_code = [node for node in graph.graph.nodes if draws_numbers(node)]
        RandomOrder()(graph.graph)
        assert [node for node in graph.graph.nodes if draws_numbers(node)] == in_code
        return min_cut_rematerialization_partition(graph, inputs, **options)

    def record_chain(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        ancestors: dict[torch.fx.Node, set[torch.fx.Node]] = {}
        chain: list[torch.fx.Node] = []
        for node in graph.graph.nodes:
            ancestors[node] = set().union(*({each} | ancestors[each] for each in node.all_input_nodes))
            if draws_numbers(node):
                assert not chain or chain[-1] in ancestors[node], f"{node} does not follow from {chain[-1]}"
                chain.append(node)
        copies = [str(node.target) for node in graph.graph.nodes if "draw_after" in str(node.target)]
        chains.append([*(str(node.target) for node in chain), *copies])
        return graph

    backend = aot_autograd(fw_compiler=record_chain, bw_compiler=lambda graph, _: graph, partition_fn=partition)
    with mock.patch.object(compiled_layers, "_OPTIONS", {"backend": backend}):
        train_in_memory(recipe)
    return chains


@pytest.mark.parametrize("family", daily((*CHAINS, *PARALLEL), lambda _, family: family in ("gpt2", "gpt_neox")))
def test_what_a_layer_draws_is_a_chain_of_data(make_recipe: Make, ranks: Ranks, tmp_path: Path, family: str) -> None:
    """Only a layer with attention beside its MLP needs copies for that."""
    model = with_dropout(family, tmp_path)
    recipe = make_recipe(model=model, train__steps=1, parallel={"tp": 2}, train__compile=True)
    (chain,) = ranks(chains_of_layers, 2, recipe)[0]
    draws = [name for name in chain if "draw_after" not in name]
    changes = [name.removeprefix("dstk.").partition("_own")[0] for name in draws if name.startswith("dstk.")]
    assert changes == ["enter", "leave"] * (len(changes) // 2)
    assert len(changes) < len(draws)
    assert changes
    assert (len(chain) > len(draws)) is (family in PARALLEL)


MIXTURE = {
    "name_or_path": "qwen3-30b-a3b",
    "overrides": {
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 320,
    },
}


def train_mixture(recipe: Recipe) -> tuple[list[StepMetrics], dict[str, Any] | None]:
    """Metrics of all steps, and what was compiled; nothing watches the layers, as in a run."""
    facts: list[dict[str, Any] | None] = []

    class Compiled(Callback):
        def on_run_end(self, run: TrainingRun) -> None:
            facts.append(run.engine.compiled and run.engine.compiled.facts())

    result = train_job(Job.of(recipe, dist.get_world_size()), [Compiled()], in_memory=True)
    return list(result.history), facts[0]


@pytest.mark.usefixtures("untranslated")
def test_experts_that_a_rank_has_all_of_are_part_of_the_graph(make_recipe: Make, ranks: Ranks) -> None:
    """Layers share it, and what routers put out is recorded and reaches their loss all the same."""
    changes = {"model": MIXTURE | {"router_aux_loss": {"coefficient": 0.1}}, "train__steps": 3}
    eager, _ = ranks(train_mixture, 1, make_recipe(**changes))[0]
    compiled, facts = ranks(train_mixture, 1, make_recipe(**changes, train__compile=True))[0]
    assert facts == {"layers": 2, "graphs": 1, "graph_breaks": {}}
    assert_same_steps(compiled, eager)


def assert_same_steps(compiled: list[StepMetrics], eager: list[StepMetrics]) -> None:
    """What routers put out reached the loss, and all numbers of a step are the same."""
    assert all(step.router_aux_loss for step in nonempty(eager))
    for name in ("loss", "grad_norm", "router_aux_loss", "expert_load"):
        values = [getattr(step, name) for step in compiled]
        assert values == pytest.approx([getattr(step, name) for step in eager], rel=1e-5)


SHARED = {
    "name_or_path": "deepseek-v3",
    "overrides": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 320,
    },
}
"""A mixture with a shared expert in each layer, which runs while rows of the others are on their way."""
BIASED = {
    "name_or_path": "gpt-oss-20b",
    "overrides": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "full_attention"],
        "vocab_size": 320,
    },
}
"""A mixture whose experts have biases, the gradients of which ranks sum with sequence parallelism."""


@pytest.mark.parametrize(
    ("backend", "model", "parallel"),
    [
        pytest.param("aot_eager", SHARED, {"dp": 2, "ep": 2, "recompute": "full"}, marks=pytest.mark.daily),
        pytest.param(
            "aot_eager", BIASED, {"tp": 2, "experts": "inner", "sequence_parallel": True}, marks=pytest.mark.whole
        ),
        pytest.param("aot_eager", BIASED, {"cp": 2, "recompute": "full"}, marks=pytest.mark.whole),
        pytest.param("aot_eager", MIXTURE, {"cp": 2, "ep": 2, "cp_exchange": "ring"}, marks=pytest.mark.whole),
        *(
            pytest.param(backend, model, parallel, marks=[pytest.mark.whole, NEEDS_COMPILER])
            for backend in ("aot_eager", "inductor")
            for model in (MIXTURE, SHARED)
            for parallel in (
                {"dp": 2, "ep": 2},
                {"dp": 2, "ep": 2, "recompute": "full", "zero_stage": 3},
                {"tp": 2},
                {"tp": 2, "sequence_parallel": True, "recompute": "full"},
                {"tp": 2, "experts": "inner"},
                {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True, "zero_stage": 2},
                {"dp": 2, "ep": 2, "pp": 2},
            )
        ),
    ],
    indirect=["backend"],
)
@pytest.mark.usefixtures("backend")
def test_experts_that_ranks_share_out_are_one_operation_of_the_graph(
    make_recipe: Make, ranks: Ranks, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    changes = {"model": model | {"router_aux_loss": {"coefficient": 0.1}}, "train__steps": 4, "parallel": parallel}
    world_size = math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    eager, _ = ranks(train_mixture, world_size, make_recipe(**changes))[0]
    compiled, facts = ranks(train_mixture, world_size, make_recipe(**changes, train__compile=True))[0]
    assert facts is not None
    assert not facts["graph_breaks"]
    # The last layer of a pipeline's stage has a class of its own.
    assert facts["graphs"] == (min(facts["layers"], 2) if "pp" in parallel else 1)
    assert_same_steps(compiled, eager)


@pytest.mark.usefixtures("untranslated")
def test_a_run_says_and_records_what_was_compiled(train: Callable[..., str], tmp_path: Path) -> None:
    output = train("run_dir=here", "train.compile=true")
    assert "compiled: 2 decoder layers, graphs: 1, graph breaks: 0\n" in output
    facts = json.loads((tmp_path / "here" / "compile.json").read_text())
    assert facts == {"layers": 2, "graphs": 1, "graph_breaks": {}}


def test_a_compiler_that_is_missing_is_named(train: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with refused(RunError, "train.compile", remedy=("train.compile", False)):
        train("train.compile=true")


def test_zero_3_refuses_gradients_that_it_does_not_wait_for() -> None:
    import torch
    from torch import nn

    from toolkit.engines.compiled_layers import _gather_at_once

    class Layer(nn.Linear):
        def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(hidden_states) * scale

    layer = Layer(2, 2)
    _gather_at_once(layer)
    hidden = torch.ones(1, 2, requires_grad=True)
    layer(hidden, scale=2.0)
    with refused(ModelError, "train.compile", "parallel.zero_stage"):
        layer(hidden_states=hidden)
    with refused(ModelError, "train.compile", "parallel.zero_stage"):
        partial(layer, hidden.detach())()
    with torch.no_grad():
        layer(hidden_states=hidden)


def trial_with_deferred_gradients(recipe: Recipe) -> tuple[ParityRun, int]:
    """Train; return how many weight gradients were left for later, too."""
    count = 0
    keep = WeightGradients.keep

    def counted(queue: WeightGradients, weight: torch.Tensor, of_weight: Callable[[], torch.Tensor]) -> None:
        nonlocal count
        count += 1
        keep(queue, weight, of_weight)

    with mock.patch.object(WeightGradients, "keep", counted):
        return compiled_trial(recipe), count


@pytest.mark.daily
@pytest.mark.parametrize(
    ("backend", "layout", "changes"),
    [
        ("aot_eager", "pp2-zbv-z1", {}),
        *(
            pytest.param(backend, layout, changes, marks=[pytest.mark.whole, NEEDS_COMPILER])
            for backend, layout, changes in (
                ("inductor", "pp2-zbh1-z1", {"model": LLAMA}),  # wrong if Inductor may reuse buffers
                ("inductor", "pp2-zbv-z0-recompute", {}),
                ("inductor", "tp2-pp2-zbh1-z1-sp", {}),
                ("aot_eager", "pp2-zbh1-z1", DROPOUT),
                ("aot_eager", "pp2-zbh1-z1", {"model__lora": {"r": 4}}),
                ("aot_eager", "tp2-pp2-zbv-z1", DROPOUT),
            )
        ),
    ],
    indirect=["backend"],
)
@pytest.mark.usefixtures("backend")
def test_weight_gradients_that_a_schedule_computes_later_break_no_graph(
    make_recipe: Make, ranks: Ranks, layout: str, changes: dict[str, Any]
) -> None:
    strategy = Strategy.parse(layout)
    layers = {} if "model" in changes else {"overrides__n_layer": 4}
    recipe = make_recipe(train__steps=4, **layers, **changes)
    world_size = strategy.world_size(1)
    eager = ranks(trial_with_deferred_gradients, world_size, strategy.apply(recipe, world_size))
    compiling = recipe.changed({"train": {"compile": True}})
    compiled = ranks(trial_with_deferred_gradients, world_size, strategy.apply(compiling, world_size))
    assert [count for _, count in compiled] == [count for _, count in eager]
    assert min(count for _, count in compiled) > 0
    assert not compiled[0][0].inspected["graph_breaks"]
    report = compare_curves(compiled[0][0].curve, eager[0][0].curve, Tolerance.fp32())
    assert report.passed, str(report)
