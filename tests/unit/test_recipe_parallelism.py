"""tp, pp and sequence parallelism against the rest of a recipe and against the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.main import main
from toolkit.errors import RecipeError
from toolkit.families.support import Support
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.recipe_file import parallelism, problems

ROOT = Path(__file__).parents[2]


def recipe(**changes: object) -> Recipe:
    """A recipe on GPT-2 with fields changed: `parallel__tp=2`, `precision="bf16"`."""
    values: dict[str, Any] = {
        "model": {"name_or_path": "gpt2"},
        "data": {"seq_len": 128},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": 1.0},
        "train": {"steps": 10},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            values.setdefault(section, {})[field] = value
        else:
            values[section] = value
    return Recipe.model_validate_json(json.dumps(values))


REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"parallel__tp": 5},
        (
            "parallel.tp=5 with model.name_or_path=gpt2: 12 attention heads cannot be shared equally by 5 ranks. "
            "Set parallel.tp to 1, 2, 3, 4, 6 or 12."
        ),
    ),
    (
        {"parallel__tp": 2, "model__name_or_path": "gpt2-xl"},
        (
            "parallel.tp=2 with model.name_or_path=gpt2-xl: 25 attention heads cannot be shared equally by 2 ranks. "
            "Set parallel.tp to 1, 5 or 25."
        ),
    ),
    (
        {"parallel__tp": 2, "model__overrides": {"n_head": 3}},
        "parallel.tp=2 with model.name_or_path=gpt2: 3 attention heads",
    ),
    (
        {"parallel__pp": 13},
        (
            "parallel.pp=13 with model.name_or_path=gpt2: 12 decoder layers cannot fill 13 stages. "
            "Set parallel.pp to 12 or less."
        ),
    ),
    ({"parallel__pp": 2, "parallel__zero_stage": 2}, "zero_stage=2 with pp=2: a DeepSpeed pipeline allows"),
    ({"parallel__pp": 2, "parallel__offload_optimizer": "cpu"}, "offload_optimizer=cpu with pp=2: a pipeline's"),
    ({"parallel__sequence_parallel": True}, "sequence_parallel=true with tp=1: sequence parallelism splits"),
    (
        {"parallel__sequence_parallel": True, "parallel__tp": 2, "data__seq_len": 127},
        (
            "data.seq_len=127 with parallel.sequence_parallel=true and tp=2: each rank takes an equal part of a "
            "sequence. Set data.seq_len=126 or 128, or parallel.sequence_parallel=false."
        ),
    ),
    (
        {
            "parallel__sequence_parallel": True,
            "parallel__tp": 2,
            "data__seq_len": 127,
            "model__name_or_path": "org/unknown",
        },
        "data.seq_len=127 with parallel.sequence_parallel=true and tp=2",
    ),
    (
        {"parallel__tp": 2, "parallel__zero_stage": 0, "precision": "bf16"},
        (
            "parallel.zero_stage=0 with tp=2 and precision=bf16: without ZeRO, DeepSpeed's 16-bit path loses track of "
            "how a model is cut. Set parallel.zero_stage=1, or precision=fp32."
        ),
    ),
    (
        {"parallel__tp": 2, "parallel__pp": 2, "parallel__zero_stage": 0, "precision": "bf16"},
        "parallel.zero_stage=0 with tp=2 pp=2 and precision=bf16",
    ),
    ({"parallel__tp": 2, "parallel__zero_stage": 0, "precision": "fp16"}, "parallel.zero_stage=0 with tp=2 and"),
    (
        {"parallel__pp": 2, "precision": "fp16"},
        (
            "precision=fp16 with parallel.pp=2: pipelines have no loss scaling in this version. "
            "Set precision=bf16 or fp32, or parallel.pp=1."
        ),
    ),
    ({"parallel__pp": 2, "parallel__zero_stage": 0, "precision": "fp16"}, "precision=fp16 with parallel.pp=2"),
    (
        {"parallel__tp": 2, "train__compile": True},
        "train.compile=true with tp=2: a cut model is not compiled in this version. Set train.compile=false.",
    ),
    ({"parallel__pp": 2, "train__compile": True}, "train.compile=true with pp=2"),
    *(
        (
            {f"parallel__{field}": value, "train__engine": engine},
            f"parallel.{field}={str(value).lower()} with train.engine={engine}: only the engine deepspeed cuts a ",
        )
        for engine in ("ddp", "fsdp", "reference")
        for field, value in (("tp", 5), ("pp", 13), ("sequence_parallel", True))
    ),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_what_cannot_run_gives_one_line(changes: dict[str, object], problem: str) -> None:
    (given,) = problems(recipe(**changes))
    assert given.startswith(problem)


RUNS: list[dict[str, object]] = [
    {"parallel__tp": 12},
    {"parallel__pp": 5},
    {"parallel__tp": 2, "parallel__zero_stage": 3},
    {"parallel__tp": 2, "parallel__zero_stage": 2, "parallel__offload_optimizer": "cpu"},
    {"parallel__tp": 2, "parallel__pp": 2, "parallel__sequence_parallel": True},
    {"parallel__tp": 2, "parallel__pp": 2, "parallel__zero_stage": 0},
    {"parallel__tp": 2, "parallel__pp": 2, "precision": "bf16"},
    {"parallel__tp": 2, "precision": "fp16"},
    {"parallel__pp": 2, "parallel__dp": 4},
    {"parallel__tp": 64, "parallel__pp": 500, "model__name_or_path": "org/unknown"},
]


@pytest.mark.parametrize("changes", RUNS)
def test_what_runs_gives_no_line(changes: dict[str, object]) -> None:
    assert problems(recipe(**changes)) == []


def test_a_sequence_is_not_made_longer_than_the_models_positions() -> None:
    (given,) = problems(recipe(parallel__sequence_parallel=True, parallel__tp=3, data__seq_len=1024))
    assert "Set data.seq_len=1023, or parallel.sequence_parallel=false." in given


@pytest.mark.parametrize(
    ("world_size", "axes", "problem"),
    [
        (6, {"tp": 2, "pp": 2}, "6 ranks with tp=2 pp=2: the world size must be a multiple of tp x pp = 4."),
        (4, {"tp": 2, "dp": 4}, "4 ranks with dp=4 tp=2 pp=1: this layout needs 8 ranks."),
        (2, {"tp": 2, "pp": 1, "dp": 2}, "2 ranks with dp=2 tp=2 pp=1: this layout needs 4 ranks."),
        (40, {"pp": 4}, "batch.global_size=8 with micro_size=2 on dp=10"),
    ],
)
def test_what_does_not_fit_the_world_size_gives_one_line(world_size: int, axes: dict[str, int], problem: str) -> None:
    assert problems(recipe(parallel=axes)) == [] or "dp" in axes
    (given,) = problems(recipe(parallel=axes), world_size)
    assert given.startswith(problem)


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"tp": 2}, ["parallel.tp=2"]),
        ({"pp": 2}, ["parallel.pp=2"]),
        ({"tp": 2, "pp": 2}, ["parallel.tp=2", "parallel.pp=2"]),
        ({"tp": 2, "sequence_parallel": True}, ["parallel.tp=2"]),
        ({"dp": 2}, []),
    ],
)
def test_a_family_that_cannot_be_cut_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], told: list[str]
) -> None:
    refused = Support(
        model_type="odd",
        pipeline_refusal="its layers carry state",
        tensor_refusal="it has no plan",
        sequence_refusal="it has no plan",
    )
    monkeypatch.setattr(parallelism, "find", {"odd": refused}.get)
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    given = problems(recipe(model__name_or_path=str(tmp_path), parallel=axes))
    assert [line.split()[0] for line in given] == told
    assert all(": the family odd cannot be cut that way (it" in line for line in given)


@pytest.mark.parametrize(
    ("axis", "refusal"), [("tp", "pipeline_refusal"), ("pp", "tensor_refusal"), ("tp", "sequence_refusal")]
)
def test_a_family_is_refused_only_for_the_cut_that_fails(
    monkeypatch: pytest.MonkeyPatch, axis: str, refusal: str
) -> None:
    reasons = {"pipeline_refusal": None, "tensor_refusal": None, "sequence_refusal": None, refusal: "reasons"}
    monkeypatch.setattr(parallelism, "find", lambda name: Support(model_type=name, **reasons))
    assert problems(recipe(parallel={axis: 2})) == []


@pytest.mark.parametrize(("wanted", "told"), [(True, ["parallel.sequence_parallel=true"]), (False, [])])
def test_a_family_whose_sequence_cannot_be_split_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, told: list[str]
) -> None:
    reasons = {"pipeline_refusal": None, "tensor_refusal": None, "sequence_refusal": "its layers mix positions"}
    monkeypatch.setattr(parallelism, "find", lambda name: Support(model_type=name, **reasons))
    given = problems(recipe(parallel={"tp": 2, "sequence_parallel": wanted}))
    assert [line.split()[0] for line in given] == told
    assert all(
        line.endswith(
            "cannot be cut that way (its layers mix positions). Set parallel.sequence_parallel=false, or see "
            "`dstk families`."
        )
        for line in given
    )


def test_the_numbers_of_a_family_that_cannot_be_cut_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"pipeline_refusal": "no", "tensor_refusal": "no", "sequence_refusal": "no"}
    monkeypatch.setattr(parallelism, "find", lambda name: Support(model_type=name, **reasons))
    assert len(problems(recipe(parallel={"tp": 5}))) == 1


@pytest.mark.parametrize("axes", [{"tp": 5}, {"pp": 13}])
def test_the_model_is_told_before_the_world_size(axes: dict[str, int]) -> None:
    assert problems(recipe(parallel=axes), 8) == problems(recipe(parallel=axes))


@pytest.mark.parametrize("name", ["tp2", "pp2", "3d"])
def test_the_recipes_that_cut_a_model_train_what_z1_trains(name: str) -> None:
    from toolkit.recipe_file import load

    folder = ROOT / "recipes" / "gpt2"
    cut, plain = load(folder / f"{name}.yaml", world_size=8), load(folder / "z1.yaml", world_size=8)
    assert cut.model_copy(update={"parallel": plain.parallel}) == plain


def test_dstk_validate_exits_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", str(ROOT / "recipes" / "gpt2" / "z1.yaml"), "parallel.tp=5"])
    assert stopped.value.code == 2
    assert "Set parallel.tp to 1, 2, 3, 4, 6 or 12." in capfd.readouterr().err


def test_dstk_config_is_for_one_replica_where_nothing_says_how_many(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["config", str(ROOT / "recipes" / "gpt2" / "3d.yaml")])
    out, err = capfd.readouterr()
    assert stopped.value.code == 0
    assert json.loads(out)["gradient_accumulation_steps"] == 32
    assert err.startswith("note: for 4 ranks,")


def test_dstk_config_multiplies_the_axes_of_the_recipe(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["config", str(ROOT / "recipes" / "gpt2" / "3d.yaml"), "parallel.dp=2"])
    out, err = capfd.readouterr()
    assert (stopped.value.code, json.loads(out)["gradient_accumulation_steps"], err) == (0, 16, "")


def test_a_model_known_only_at_launch_is_refused_before_it_is_built(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a model of the hub: validating cannot see its config, training does."""
    import torch
    from transformers import LlamaConfig

    from toolkit.train import preflight

    config = LlamaConfig(num_attention_heads=9, num_key_value_heads=3, hidden_size=36, intermediate_size=72)
    monkeypatch.setattr(preflight, "load_config", lambda *_, **__: config)
    unseen = make_recipe(model={"name_or_path": "org/unknown"}, parallel={"tp": 2}, data__tokenizer="org/unknown")
    assert problems(unseen) == []
    with pytest.raises(RecipeError, match="9 attention heads cannot be shared equally by 2 ranks"):
        preflight.check_model(unseen, torch.device("cpu"))


@pytest.mark.parametrize("text", ["tp2-pp2-z1", "tp3", "pp12"])
def test_a_layout_that_gpt2_allows_is_one_that_layout_allows(text: str) -> None:
    layout = Layout.parse(text)
    assert problems(recipe(parallel={"tp": layout.tp, "pp": layout.pp, "zero_stage": layout.zero_stage})) == []
