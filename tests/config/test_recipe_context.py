"""parallel.cp against the rest of a recipe and against the model."""

import json
from functools import partial
from pathlib import Path

import pytest
from checked_recipes import check_conflict
from checked_recipes import recipe as any_recipe
from refusals import refused

from toolkit.config import recipe_problems
from toolkit.config.job import Job
from toolkit.config.layout import Layout
from toolkit.config.strategy import Strategy
from toolkit.dsconfig import build
from toolkit.errors import LayoutError

recipe = partial(any_recipe, model__name_or_path="llama-tiny", parallel__cp=2)
CP = "parallel.cp"
MODEL = "model.name_or_path"
ATTENTION = "model.attn_implementation"
BLOCKS: dict[str, object] = {"model__attn_implementation": "blocks", "parallel__cp": 1, "batch__micro_batch_size": 1}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
LONGROPE = {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0}}
NOT_THERE = [(CP, 1), "see `dstk families`"]

REFUSED: list[tuple[dict[str, object], list[str], list[object]]] = [
    ({"parallel__ulysses": 2}, [CP, "parallel.ulysses"], [("parallel.ulysses", 1), (CP, 1)]),
    (
        {"parallel__zero_stage": 3, "parallel__hpz": 2, "parallel__dp": 2},
        ["parallel.hpz", CP],
        [("parallel.hpz", 1), (CP, 1)],
    ),
    ({"data__seq_len": 126}, ["data.seq_len", CP], [("data.seq_len", "124 or 128"), (CP, 1)]),
    (
        {"parallel__cp": 3, "data__seq_len": 126, "parallel__tp": 4, "parallel__sequence_parallel": True},
        ["data.seq_len", CP, "parallel.sequence_parallel"],
        [("data.seq_len", "120 or 132"), (CP, 1)],
    ),
    (
        {"parallel__cp": 1, "parallel__cp_exchange": "ring"},
        ["parallel.cp_exchange", CP],
        [(CP, "2 or more"), ("parallel.cp_exchange", "auto")],
    ),
    (
        {"model__attn_implementation": "sdpa"},
        ["model.attn_implementation", CP],
        [("model.attn_implementation", "auto"), (CP, 1)],
    ),
    (
        {"model__attn_implementation": "flash_attention_2"},
        ["model.attn_implementation", CP],
        [("model.attn_implementation", "auto"), (CP, 1)],
    ),
    (
        {**BLOCKS, "train__engine": "fsdp"},
        [ATTENTION, "train.engine"],
        [(ATTENTION, "auto"), ("train.engine", "deepspeed")],
    ),
    (
        {**BLOCKS, "parallel__ulysses": 2},
        [ATTENTION, "parallel.ulysses"],
        [(ATTENTION, "auto"), ("parallel.ulysses", 1)],
    ),
    (
        {**BLOCKS, "parallel__recompute": "selective"},
        ["parallel.recompute", ATTENTION],
        [("parallel.recompute", "none or full")],
    ),
    ({**BLOCKS, "model__name_or_path": "bloom-560m"}, [ATTENTION, MODEL], [(ATTENTION, "auto"), "see `dstk families`"]),
    (
        {**BLOCKS, "model__name_or_path": "gpt2", "model__overrides": {"attn_pdrop": 0.1}},
        [ATTENTION, MODEL],
        [(ATTENTION, "auto"), "set model.overrides.attn_pdrop=0.0"],
    ),
    ({"model__kernels": "liger"}, ["model.kernels", CP], [("model.kernels", "torch"), (CP, 1)]),
    (
        {"parallel__recompute": "selective"},
        ["parallel.recompute", CP],
        [("parallel.recompute", "none or full")],
    ),
    (
        {"model__name_or_path": "mixtral-8x7b", "model__expert_capacity_factor": 1.5},
        ["model.expert_capacity_factor", CP],
        [("model.expert_capacity_factor", None), (CP, 1)],
    ),
    (
        {"model__float8": "tensorwise", "precision": "bf16"},
        ["model.float8", CP],
        [(CP, 1), ("model.float8", None)],
    ),
    (
        {"parallel__quantized_weights": True, "parallel__zero_stage": 3},
        ["parallel.quantized_weights", CP],
        [("parallel.quantized_weights", False), (CP, 1)],
    ),
    ({"model__name_or_path": "bloom-560m"}, [CP, MODEL], NOT_THERE),
    ({"model__name_or_path": "falcon-7b"}, [CP, MODEL], NOT_THERE),
    ({"model__name_or_path": "gpt-j-6b"}, [CP, MODEL], NOT_THERE),
    ({"model__overrides": DYNAMIC}, [CP, MODEL], [(CP, 1), "take a model with another one"]),
    ({"model__overrides": LONGROPE}, [CP, MODEL], [(CP, 1), "take a model with another one"]),
    (
        {"model__name_or_path": "gpt2", "model__overrides": {"attn_pdrop": 0.1}},
        [CP, MODEL],
        [(CP, 1), "set model.overrides.attn_pdrop=0.0"],
    ),
    (
        {
            "parallel__cp": 4,
            "parallel__cp_ulysses": 3,
            "model__overrides": {"num_attention_heads": 12, "hidden_size": 96},
        },
        ["parallel.cp_ulysses", CP],
        [("parallel.cp_ulysses", "a divisor of 4"), (CP, "a multiple of 3")],
    ),
    (
        {
            "parallel__cp": 8,
            "parallel__cp_ulysses": 8,
            "model__overrides": {"num_attention_heads": 4, "num_key_value_heads": 4},
        },
        ["parallel.cp_ulysses", "parallel.tp", MODEL],
        [("parallel.cp_ulysses", 1), "lower parallel.tp"],
    ),
    ({"train__engine": "ddp"}, [CP, "train.engine"], [(CP, 1), ("train.engine", "deepspeed")]),
    ({"train__engine": "fsdp"}, [CP, "train.engine"], [(CP, 1), ("train.engine", "deepspeed")]),
    ({"train__engine": "reference"}, [CP, "train.engine"], [(CP, 1), ("train.engine", "deepspeed")]),
]


@pytest.mark.parametrize(("changes", "fields", "remedy"), REFUSED)
def test_what_cannot_run_is_one_conflict(changes: dict[str, object], fields: list[str], remedy: list[object]) -> None:
    check_conflict(recipe(**changes), fields, remedy)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel__cp": 4, "parallel__cp_exchange": "ring"},
        {"parallel__tp": 2, "parallel__sequence_parallel": True, "parallel__zero_stage": 3},
        {"parallel__pp": 2},
        {"parallel__recompute": "full", "parallel__zero_stage": 3},
        {"parallel__offload_optimizer": "cpu", "parallel__zero_stage": 2},
        {"parallel__offload_optimizer": "cpu", "parallel__offload_params": "cpu", "parallel__zero_stage": 3},
        {"parallel__tiled_mlp": True, "parallel__offload_activations": True, "parallel__recompute": "full"},
        {**BLOCKS, "parallel__tp": 2, "parallel__pp": 2},
        {**BLOCKS, "train__compile": True},
        {"train__compile": True},
        {**BLOCKS, "model__overrides": LONGROPE},
        {"model__attn_implementation": "blocks"},
        {"model__name_or_path": "mistral-7b", "model__overrides": {"sliding_window": 16}},
        {"model__name_or_path": "mixtral-8x7b", "parallel__ep": 2},
        {"data__packing": "padded"},
        {"precision": "bf16"},
        {"model__name_or_path": "org/unknown"},
    ],
)
def test_what_runs_has_no_conflict(changes: dict[str, object]) -> None:
    assert recipe_problems(recipe(**changes), 8) == []


def test_code_of_a_models_own_is_refused_under_any_name(tmp_path: Path) -> None:
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (given,) = recipe_problems(recipe(model__name_or_path=str(tmp_path)))
    assert "brings its own code" in given


class TestLayout:
    def test_it_prints_and_parses(self) -> None:
        layout = Layout.parse("dp2-cp4-tp2-z3")
        assert str(layout) == "dp2-cp4-tp2-pp1-z3"
        assert Layout.parse(str(layout)) == layout
        assert (layout.world_size, layout.model_size, layout.replicas) == (16, 8, 8)

    def test_dp_follows_from_the_number_of_ranks(self) -> None:
        assert Layout.parse("cp4-tp2-z3", world_size=32).dp == 4

    def test_context_parallel_ranks_are_neighbors_with_the_same_parameters(self) -> None:
        layout = Layout(dp=2, cp=2, tp=2)
        assert layout.ranks_along("context") == [[0, 2], [4, 6], [1, 3], [5, 7]]
        assert layout.ranks_along("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert [layout.sample_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]

    def test_each_rank_has_one_coordinate(self) -> None:
        layout = Layout(dp=2, cp=3, tp=2, pp=2)
        places = [layout.coordinate(rank) for rank in range(layout.world_size)]
        assert [layout.rank(**place._asdict()) for place in places] == [*range(24)]

    def test_experts_are_shared_out_over_ranks_of_a_sequence_too(self) -> None:
        assert Layout.parse("ep4-cp2").dp == 2
        assert Layout(dp=1, cp=4, ep=4).ranks_along("expert") == [[0, 1, 2, 3]]
        with refused(LayoutError, "ep", "dp", "cp", remedy=("ep", "a divisor of 4")):
            Layout(dp=2, cp=2, ep=8)

    def test_ranks_that_do_not_fit_are_refused(self) -> None:
        with refused(LayoutError, "world_size", "cp", "tp", "pp", remedy="launch 4 or 8 ranks"):
            Layout.parse("cp4", world_size=6)

    def test_zero_ranks_are_refused(self) -> None:
        with refused(LayoutError, "cp", remedy=("cp", "1 or more")):
            Layout(cp=0)

    def test_a_strategy_has_it(self) -> None:
        strategy = Strategy.parse("cp2-tp2-z1-sp")
        assert (strategy.model_size, strategy.world_size(1), strategy.world_size(9)) == (4, 4, 8)
        assert Strategy.parse("cp8-z3").shrunk() == Strategy.parse("cp2-z3")

    @pytest.mark.parametrize("text", ["cp2-cp4", "cp", "cp-2", "ddp-cp2", "cp99999999999999"])
    def test_a_strategy_that_cannot_run_is_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(LayoutError) as caught:
            Strategy.parse(text)
        assert "\n" not in str(caught.value)


def test_deepspeed_counts_ranks_of_a_sequence_as_replicas() -> None:
    config = build(Job.of(recipe(parallel__zero_stage=3), 4), hidden_size=64)
    sizes = [config[name] for name in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    assert sizes == [16, 2]
    assert config["gradient_accumulation_steps"] == 2
