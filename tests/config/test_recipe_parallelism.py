"""tp, pp and sequence parallelism against the rest of a recipe and against the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checked_recipes import check_conflict, recipe

from toolkit.cli.main import main
from toolkit.config import parallel_rules as parallelism
from toolkit.config import recipe_conflicts, recipe_problems
from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError
from toolkit.models.support import Support
from toolkit.parallel.tiny_model import tiny_config

ROOT = Path(__file__).parents[2]

_MIXTURE: dict[str, object] = {"model__name_or_path": "mixtral-8x7b", "model__overrides": {}}
REFUSED: list[tuple[dict[str, object], list[str], list[object]]] = [
    (
        _MIXTURE | {"parallel__ep": 3, "parallel__dp": 3, "batch__global_batch_size": 24, "batch__micro_batch_size": 8},
        ["parallel.ep", "parallel.tp", "model.name_or_path"],
        ["choose a divisor of 8"],
    ),
    (
        _MIXTURE | {"parallel__ep": 2, "train__engine": "ddp"},
        ["parallel.ep", "train.engine"],
        [("parallel.ep", 1), ("train.engine", "deepspeed")],
    ),
    (
        _MIXTURE | {"parallel__experts": "inner"},
        ["parallel.experts", "parallel.tp"],
        [("parallel.tp", "2 or more"), ("parallel.experts", "whole")],
    ),
    (
        {"parallel__ep": 2},
        ["parallel.ep", "model.name_or_path"],
        [("parallel.ep", 1), "see `dstk families`"],
    ),
    (
        {"parallel__tp": 2, "parallel__experts": "inner"},
        ["parallel.experts", "model.name_or_path"],
        [("parallel.experts", "whole"), "see `dstk families`"],
    ),
    (
        {"parallel__tp": 5},
        ["parallel.tp", "model.name_or_path"],
        [("parallel.tp", "1, 2, 3, 4, 6 or 12")],
    ),
    (
        {"parallel__tp": 2, "model__name_or_path": "gpt2-xl"},
        ["parallel.tp", "model.name_or_path"],
        [("parallel.tp", "1, 5 or 25")],
    ),
    (
        {"parallel__tp": 2, "model__overrides": {"n_head": 3}},
        ["parallel.tp", "model.name_or_path"],
        [("parallel.tp", "1 or 3")],
    ),
    (
        {"parallel__pp": 13},
        ["parallel.pp", "model.name_or_path"],
        [("parallel.pp", "12 or less")],
    ),
    (
        {"parallel__pp": 2, "parallel__zero_stage": 2},
        ["parallel.zero_stage", "parallel.pp"],
        [("parallel.zero_stage", "0 or 1"), ("parallel.pp", 1)],
    ),
    (
        {"parallel__pp": 2, "parallel__offload_optimizer": "cpu"},
        ["parallel.offload_optimizer", "parallel.pp"],
        [("parallel.offload_optimizer", "none"), ("parallel.pp", 1)],
    ),
    (
        {"parallel__sequence_parallel": True},
        ["parallel.sequence_parallel", "parallel.tp"],
        [("parallel.tp", "2 or more"), ("parallel.sequence_parallel", False)],
    ),
    (
        {"parallel__sequence_parallel": True, "parallel__tp": 2, "data__seq_len": 127},
        ["data.seq_len", "parallel.sequence_parallel", "parallel.tp"],
        [("data.seq_len", "126 or 128"), ("parallel.sequence_parallel", False)],
    ),
    (
        {
            "parallel__sequence_parallel": True,
            "parallel__tp": 2,
            "data__seq_len": 127,
            "model__name_or_path": "org/unknown",
        },
        ["data.seq_len", "parallel.sequence_parallel", "parallel.tp"],
        [("data.seq_len", "126 or 128"), ("parallel.sequence_parallel", False)],
    ),
    (
        {"parallel__tp": 2, "parallel__zero_stage": 0, "precision": "bf16"},
        ["parallel.zero_stage", "parallel.tp", "precision"],
        [("parallel.zero_stage", 1), ("precision", "fp32")],
    ),
    (
        {"parallel__tp": 2, "parallel__pp": 2, "parallel__zero_stage": 0, "precision": "bf16"},
        ["parallel.zero_stage", "parallel.tp", "parallel.pp", "precision"],
        [("parallel.zero_stage", 1), ("precision", "fp32")],
    ),
    (
        {"parallel__tp": 2, "parallel__zero_stage": 0, "precision": "fp16"},
        ["parallel.zero_stage", "parallel.tp", "precision"],
        [("parallel.zero_stage", 1), ("precision", "fp32")],
    ),
    (
        {"parallel__pp": 2, "parallel__zero_stage": 0, "precision": "fp16"},
        ["parallel.zero_stage", "parallel.pp", "precision"],
        [("parallel.zero_stage", 1), ("precision", "fp32")],
    ),
    (
        {"model__float8": "rowwise"},
        ["model.float8", "precision"],
        [("precision", "bf16"), ("model.float8", None)],
    ),
    (
        {"model__float8": "rowwise", "precision": "bf16", "parallel__tp": 2},
        ["model.float8", "parallel.tp"],
        [("parallel.tp", 1), ("model.float8", None)],
    ),
    (
        {"model__float8": "rowwise", "precision": "bf16", "model__lora": {"r": 4}},
        ["model.float8", "model.lora"],
        [("model.lora", None), ("model.float8", None)],
    ),
    *(
        ({"model__kernels": "liger", "model__name_or_path": "org/unknown"} | other, ["model.kernels", field], remedy)
        for other, field, remedy in (
            (
                {"train__engine": "reference"},
                "train.engine",
                [("train.engine", "deepspeed"), ("model.kernels", "torch")],
            ),
            ({"train__compile": True}, "train.compile", [("train.compile", False), ("model.kernels", "torch")]),
            (
                {"model__float8": "rowwise", "precision": "bf16"},
                "model.float8",
                [("model.float8", None), ("model.kernels", "torch")],
            ),
        )
    ),
    (
        {"model__float8": "tensorwise", "precision": "bf16", "train__engine": "ddp"},
        ["model.float8", "train.engine"],
        [("train.engine", "deepspeed"), ("model.float8", None)],
    ),
    (
        {"parallel__tp": 5, "train__engine": "ddp"},
        ["parallel.tp", "train.engine"],
        [("parallel.tp", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__pp": 13, "train__engine": "ddp"},
        ["parallel.pp", "train.engine"],
        [("parallel.pp", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__sequence_parallel": True, "train__engine": "ddp"},
        ["parallel.sequence_parallel", "train.engine"],
        [("parallel.sequence_parallel", False), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__tp": 5, "train__engine": "fsdp"},
        ["parallel.tp", "train.engine"],
        [("parallel.tp", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__pp": 13, "train__engine": "fsdp"},
        ["parallel.pp", "train.engine"],
        [("parallel.pp", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__sequence_parallel": True, "train__engine": "fsdp"},
        ["parallel.sequence_parallel", "train.engine"],
        [("parallel.sequence_parallel", False), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__tp": 5, "train__engine": "reference"},
        ["parallel.tp", "train.engine"],
        [("parallel.tp", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__pp": 13, "train__engine": "reference"},
        ["parallel.pp", "train.engine"],
        [("parallel.pp", 1), ("train.engine", "deepspeed")],
    ),
    (
        {"parallel__sequence_parallel": True, "train__engine": "reference"},
        ["parallel.sequence_parallel", "train.engine"],
        [("parallel.sequence_parallel", False), ("train.engine", "deepspeed")],
    ),
]


@pytest.mark.parametrize(("changes", "fields", "remedy"), REFUSED)
def test_what_cannot_run_is_one_conflict(changes: dict[str, object], fields: list[str], remedy: list[object]) -> None:
    check_conflict(recipe(**changes), fields, remedy)


RUNS: list[dict[str, object]] = [
    {"parallel__tp": 12},
    {"parallel__pp": 5},
    {"parallel__tp": 2, "parallel__zero_stage": 3},
    {"parallel__tp": 2, "parallel__zero_stage": 2, "parallel__offload_optimizer": "cpu"},
    {"parallel__tp": 2, "parallel__pp": 2, "parallel__sequence_parallel": True},
    {"parallel__tp": 2, "parallel__pp": 2, "parallel__zero_stage": 0},
    {"parallel__tp": 2, "parallel__pp": 2, "precision": "bf16"},
    {"parallel__tp": 2, "parallel__pp": 2, "precision": "fp16"},
    {"parallel__tp": 2, "parallel__pp": 2, "train__compile": True},
    {"model__float8": "rowwise", "precision": "bf16", "parallel__pp": 2},
    _MIXTURE | {"parallel__ep": 2, "parallel__dp": 4, "train__compile": True},
    {"parallel__pp": 2, "parallel__dp": 4},
    {"parallel__tp": 64, "parallel__pp": 500, "model__name_or_path": "org/unknown"},
]


@pytest.mark.parametrize("changes", RUNS)
def test_what_runs_has_no_conflict(changes: dict[str, object]) -> None:
    assert recipe_problems(recipe(**changes)) == []


def test_a_sequence_is_not_made_longer_than_the_models_positions() -> None:
    (given,) = recipe_problems(recipe(parallel__sequence_parallel=True, parallel__tp=3, data__seq_len=1024))
    assert "Set data.seq_len=1023, or parallel.sequence_parallel=false." in given


@pytest.mark.parametrize(
    ("world_size", "axes", "problem"),
    [
        (6, {"tp": 2, "pp": 2}, "6 ranks with parallel.tp=2 and pp=2: the world size must be a multiple"),
        (4, {"tp": 2, "dp": 4}, "4 ranks with parallel.dp=4, tp=2 and pp=1: this layout needs 8 ranks."),
        (2, {"tp": 2, "pp": 1, "dp": 2}, "2 ranks with parallel.dp=2, tp=2 and pp=1: this layout needs 4 ranks."),
        (40, {"pp": 4}, "batch.global_batch_size=8 with micro_batch_size=2 and parallel.dp=10"),
    ],
)
def test_what_does_not_fit_the_world_size_gives_one_line(world_size: int, axes: dict[str, int], problem: str) -> None:
    assert recipe_problems(recipe(parallel=axes)) == []
    (given,) = recipe_problems(recipe(parallel=axes), world_size)
    assert given.startswith(problem)


@pytest.mark.parametrize(
    ("axes", "reported"),
    [
        ({"tp": 2}, ["parallel.tp=2"]),
        ({"pp": 2}, ["parallel.pp=2"]),
        ({"tp": 2, "pp": 2}, ["parallel.tp=2", "parallel.pp=2"]),
        ({"tp": 2, "sequence_parallel": True}, ["parallel.tp=2"]),
        ({"tp": 2, "experts": "inner"}, ["parallel.tp=2"]),
        ({"dp": 2, "ep": 2}, ["parallel.ep=2"]),
        ({"dp": 2}, []),
    ],
)
def test_an_unsupported_family_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], reported: list[str]
) -> None:
    refused = Support(
        model_type="odd",
        pipeline_refusal="its layers carry state",
        tensor_refusal="it has no plan",
        sequence_refusal="it has no plan",
    )
    monkeypatch.setattr(parallelism, "find", {"odd": refused}.get)
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    given = recipe_problems(recipe(model__name_or_path=str(tmp_path), parallel=axes))
    assert [line.split()[0] for line in given] == reported
    assert all(": the family odd does not support it (it" in line for line in given)


@pytest.mark.parametrize(
    ("axis", "refusal"), [("tp", "pipeline_refusal"), ("pp", "tensor_refusal"), ("tp", "sequence_refusal")]
)
def test_a_family_is_refused_only_for_the_axis_that_fails(
    monkeypatch: pytest.MonkeyPatch, axis: str, refusal: str
) -> None:
    reasons = {"pipeline_refusal": None, "tensor_refusal": None, "sequence_refusal": None, refusal: "reasons"}
    monkeypatch.setattr(parallelism, "find", lambda name: Support(model_type=name, **reasons))
    assert recipe_problems(recipe(parallel={axis: 2})) == []


@pytest.mark.parametrize(("wanted", "reported"), [(True, ["parallel.sequence_parallel=true"]), (False, [])])
def test_a_family_without_sequence_parallelism_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, reported: list[str]
) -> None:
    reasons = {"pipeline_refusal": None, "tensor_refusal": None, "sequence_refusal": "its layers mix positions"}
    monkeypatch.setattr(parallelism, "find", lambda name: Support(model_type=name, **reasons))
    given = recipe_problems(recipe(parallel={"tp": 2, "sequence_parallel": wanted}))
    assert [line.split()[0] for line in given] == reported
    assert all(
        line.endswith(
            "does not support it (its layers mix positions). Set parallel.sequence_parallel=false, or see "
            "`dstk families`."
        )
        for line in given
    )


@pytest.mark.parametrize(
    ("family", "changes", "fields"),
    [
        # Its router multiplies fp32 activations by weights that DeepSpeed rounds.
        ("inkling2_text", {"precision": "bf16"}, ["precision", "train.engine", "parallel.zero_stage"]),
        ("inkling2_text", {"precision": "bf16", "parallel": {"zero_stage": 0}}, []),
        ("inkling2_text", {}, []),
        # It adds what autocast rounded to what it did not round.
        ("dbrx", {"precision": "bf16", "train__engine": "ddp"}, ["precision", "train.engine"]),
        ("dbrx", {"precision": "bf16"}, []),
        # Two modules own the bias of its head, and accelerate shards one of them apart.
        ("roberta", {"train__engine": "fsdp"}, ["train.engine"]),
        ("roberta", {"train__engine": "ddp"}, []),
        # Its reversible layers are one function, whose input must have a gradient.
        ("reformer", {"model__lora": {"r": 4}}, ["model.lora"]),
        ("reformer", {}, []),
    ],
)
def test_a_family_is_refused_where_its_code_does_not_run(
    family: str, changes: dict[str, object], fields: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    refusals = recipe_conflicts(recipe(**changes, model__name_or_path=str(tmp_path)))
    named = [[field for field, _ in refusal.settings] for refusal in refusals]
    assert named == ([[*fields, "model.name_or_path"]] if fields else [])


def test_the_numbers_of_an_unsupported_family_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"pipeline_refusal": "no", "tensor_refusal": "no", "sequence_refusal": "no"}
    monkeypatch.setattr(parallelism, "find", lambda name: Support(model_type=name, **reasons))
    assert len(recipe_problems(recipe(parallel={"tp": 5}))) == 1


@pytest.mark.parametrize("axes", [{"tp": 5}, {"pp": 13}])
def test_the_model_is_reported_before_the_world_size(axes: dict[str, int]) -> None:
    assert recipe_problems(recipe(parallel=axes), 8) == recipe_problems(recipe(parallel=axes))


def test_dstk_validate_exits_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", str(ROOT / "recipes" / "gpt2" / "gpt2-pretrain.yaml"), "--layout", "z1", "parallel.tp=5"])
    assert stopped.value.code == 2
    assert "Set parallel.tp to 1, 2, 3, 4, 6 or 12." in capfd.readouterr().err


def test_dstk_config_is_for_one_replica_where_nothing_says_how_many(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["config", "gpt2-pretrain", "--layout", "tp2-pp2-z1-sp-m16"])
    out, err = capfd.readouterr()
    assert stopped.value.code == 0
    assert json.loads(out)["gradient_accumulation_steps"] == 32
    assert "note: for 4 ranks," in err


def test_dstk_config_multiplies_the_axes_of_the_recipe(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["config", "gpt2-pretrain", "--layout", "tp2-pp2-z1-sp-m16", "parallel.dp=2"])
    out, err = capfd.readouterr()
    assert (stopped.value.code, json.loads(out)["gradient_accumulation_steps"]) == (0, 16)
    assert "note: for" not in err


def test_a_model_known_only_at_launch_is_refused_before_it_is_built(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a model of the hub: validating cannot see its config, training does."""
    import torch
    from transformers import LlamaConfig

    from toolkit.training import preflight

    config = LlamaConfig(num_attention_heads=9, num_key_value_heads=3, hidden_size=36, intermediate_size=72)
    monkeypatch.setattr(preflight, "load_config", lambda *_, **__: config)
    unseen = make_recipe(model={"name_or_path": "org/unknown"}, parallel={"tp": 2}, data__tokenizer="org/unknown")
    assert recipe_problems(unseen) == []
    with pytest.raises(RecipeError) as caught:
        preflight.check_model(unseen, torch.device("cpu"))
    (refusal,) = caught.value.refusals
    assert (refusal.field, refusal.remedy) == ("parallel.tp", (("parallel.tp", "1, 3 or 9"),))


@pytest.mark.parametrize("text", ["tp2-pp2-z1", "tp3", "pp12"])
def test_a_layout_that_gpt2_allows_is_one_that_layout_allows(text: str) -> None:
    layout = Layout.parse(text)
    assert recipe_problems(recipe(parallel={"tp": layout.tp, "pp": layout.pp, "zero_stage": layout.zero_stage})) == []


@pytest.mark.parametrize(
    ("parallel", "line"),
    [
        (
            {"pp": 4, "schedule": "zb-v", "chunks": 2},
            "8 stages, 2 on each of 4 ranks. Set parallel.pp to 2 or less.",
        ),
        (
            {"pp": 2, "schedule": "interleaved", "chunks": 3},
            "6 stages, 3 on each of 2 ranks. Set parallel.pp=1.",
        ),
        ({"pp": 8}, "8 stages. Set parallel.pp to 5 or less."),
    ],
    ids=["zb-v", "interleaved", "1f1b"],
)
@pytest.mark.parametrize("family", ["llama", "dbrx", "qwen3_moe"])
def test_more_stages_than_decoder_layers_are_refused_before_a_launch(
    tmp_path: Path, family: str, parallel: dict[str, Any], line: str
) -> None:
    tiny_config(family, num_hidden_layers=5).save_pretrained(tmp_path)
    problems = recipe_problems(recipe(model__name_or_path=str(tmp_path), parallel=parallel))
    (problem,) = (text for text in problems if text.startswith("parallel.pp="))
    assert problem.endswith(f"5 decoder layers cannot fill {line}")
