"""Reading good recipes, overrides, and writing recipes back."""

from pathlib import Path

import pytest
import yaml

from toolkit.config import dump_recipe, load_recipe, recipe_schema
from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError

GOOD = """\
model: {name_or_path: org/model}
data:
  seq_len: 128
parallel:
batch:
  global_batch_size: 8
  micro_batch_size: 2
optimizer:
  lr: 1e-4
train: {steps: 10}
"""


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD)
    return path


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems


def test_a_section_with_all_lines_commented_out_has_its_defaults(recipe_path: Path) -> None:
    assert load_recipe(recipe_path).parallel.zero_stage == 1


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("parallel.zero_stage=3", "parallel", "zero_stage", 3),
        ("model.overrides.n_layer=2", "model", "overrides", {"n_layer": 2}),
        ("model.overrides.rope_scaling.factor=2.0", "model", "overrides", {"rope_scaling": {"factor": 2.0}}),
        ("model.overrides={n_layer: 2}", "model", "overrides", {"n_layer": 2}),
        ("model.name_or_path=hub/no=way", "model", "name_or_path", "hub/no=way"),
        ('data.cache_dir="124"', "data", "cache_dir", "124"),
        ("optimizer.betas=[0.9,0.95]", "optimizer", "betas", (0.9, 0.95)),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("log.report_to=[wandb]", "log", "report_to", ("wandb",)),
        ("train={steps: 5, seed: 1}", "train", "steps", 5),
    ],
)
def test_an_override_replaces_a_value(
    recipe_path: Path, override: str, section: str, field: str, value: object
) -> None:
    assert getattr(getattr(load_recipe(recipe_path, [override]), section), field) == value


def test_a_top_level_field_is_overridden_by_its_name(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path, ["precision=bf16", "run_dir=runs/x"])
    assert (recipe.precision, recipe.run_dir) == ("bf16", "runs/x")


def test_the_last_override_of_a_field_counts(recipe_path: Path) -> None:
    assert load_recipe(recipe_path, ["train.steps=1", "train.steps=2"]).train.steps == 2


@pytest.mark.parametrize("overrides", [["run_dir=x", "run_dir=null"], ["parallel={dp: 2}", "parallel=null"]])
def test_null_goes_back_to_the_default(recipe_path: Path, overrides: list[str]) -> None:
    assert load_recipe(recipe_path, overrides) == load_recipe(recipe_path)


def test_an_override_repairs_the_file(recipe_path: Path) -> None:
    recipe_path.write_text(GOOD.replace("lr: 1e-4", "lr: {a: [x]}"))
    assert load_recipe(recipe_path, ["optimizer.lr=1"]).optimizer.lr == 1


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("batch.mirco_size=2", "batch.mirco_size is not a field. Did you mean micro_batch_size?"),
        ("batch.mirco_size=null", "batch.mirco_size is not a field. Did you mean micro_batch_size?"),
        ("bacth.micro_batch_size=2", "bacth is not a field. Did you mean batch?"),
        ("micro_batch_size=2", "micro_batch_size is not a field. Did you mean batch.micro_batch_size?"),
        ("batch.micro_batch_size=0", "batch.micro_batch_size: 0 is out of range; a whole number ≥ 1 is allowed."),
        (
            "batch.micro_batch_size='4'",
            'batch.micro_batch_size: "4" is a string; a whole number ≥ 1 is allowed. Write 4.',
        ),
        (
            "batch.micro_batch_size=null",
            "batch.micro_batch_size is missing; a whole number ≥ 1 is allowed. Add it: Samples in",
        ),
        ("batch.micro_batch_size", "an override has the form section.key=value. Write for instance train.steps=10."),
        ("=3", "an override has the form section.key=value."),
        ("batch..x=3", "an override has the form section.key=value."),
        ("run_dir=", "nothing follows the =. Write run_dir=null to restore the default."),
        ("run_dir= # x", "nothing follows the =."),
        ("run_dir=[a", "this is not YAML"),
        ("run_dir=!!python/name:os.system x", 'tag "!!python/name:os.system" is not allowed.'),
        ("run_dir=&a x", "anchors (&name) and aliases (*name) are not allowed."),
        ("precision.x=3", "precision.x is not a field: precision is one of fp32, bf16, fp16."),
        ("optimizer.betas.0=3", "optimizer.betas.0 is not a field: optimizer.betas is a list of 2 numbers"),
        ("train=3", "train: 3 is a whole number; a section with fields is allowed."),
        ("train={steps: 5, step: 1}", "train.step is not a field. Did you mean steps?"),
        ("model.overrides.n_layer=.nan", "model.overrides.n_layer is not a finite number."),
        ("model.overrides.trust_remote_code=true", "model.overrides.trust_remote_code: a recipe cannot allow"),
        ("model.trust_remote_code=true", "model.trust_remote_code: a recipe cannot allow"),
    ],
)
def test_a_bad_override_gives_one_line_that_opens_with_it(recipe_path: Path, override: str, problem: str) -> None:
    (given,) = refused(recipe_path, override)
    assert given.startswith(f"override {override}: {problem}")


def test_an_override_below_a_value_of_another_override_is_refused(recipe_path: Path) -> None:
    (given,) = refused(recipe_path, "model.overrides.a=3", "model.overrides.a.b=1")
    assert given == "override model.overrides.a.b=1: model.overrides.a is a whole number, so it has no field b."


def test_a_value_given_by_two_overrides_is_blamed_on_the_last(recipe_path: Path) -> None:
    (given,) = refused(recipe_path, "train.steps=3", "train={steps: x}")
    assert given.startswith('override train={steps: x}: train.steps: "x" is a string')


def test_a_broken_value_in_the_file_does_not_hide_a_broken_override(recipe_path: Path) -> None:
    recipe_path.write_text(GOOD.replace("lr: 1e-4", "lr: !a 1"))
    given = refused(recipe_path, "optimizer.lr=x")
    assert [problem.split(":")[0] for problem in given] == [str(recipe_path), "override optimizer.lr=x"]


def test_problems_of_the_file_come_before_those_of_overrides(recipe_path: Path) -> None:
    recipe_path.write_text(GOOD.replace("seq_len", "seq_length"))
    given = refused(recipe_path, "train.steps=x", "batch")
    assert [problem.split(" ")[0] for problem in given] == [f"{recipe_path}:3:3:"] + ["override"] * 2
    assert given[1].startswith("override train.steps=x: ")


def test_a_conflict_is_reported_at_the_override_that_made_it(recipe_path: Path) -> None:
    (given,) = refused(recipe_path, "train.engine=ddp", "precision=fp16")
    assert given.startswith("override precision=fp16: precision=fp16 with train.engine=ddp")


def test_a_conflict_in_a_file_is_reported_at_its_line(recipe_path: Path) -> None:
    recipe_path.write_text(GOOD.replace("parallel:", "parallel: {zero_stage: 1, offload_params: cpu}"))
    (given,) = refused(recipe_path)
    assert given.startswith(f"{recipe_path}:4:43: parallel.offload_params=cpu with zero_stage=1:")


def test_the_world_size_is_checked_where_it_is_given(recipe_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_path, world_size=3)
    (refusal,) = caught.value.refusals
    assert dict(refusal.settings) == {"batch.global_batch_size": 8, "batch.micro_batch_size": 2, "parallel.dp": 3}


TRICKY = ["1e-4", "010", "no", "null", "~", ".5", "1_000", "true", "<<", "", " a ", "a: b", "# x", "l1\nl2\n", "é😀"]
TRICKY += [
    "'",
    '"',
    "- a",
    "\x1b",
    "&a",
    "*a",
    "!a",
    "12:30",
    "2024-01-01",
    "=",
    "x" * 300,
    "x y " * 100,
    "\t",
    "a\u2028b",
]
VARIANTS = [
    [],
    ["parallel={dp: 2, zero_stage: 3, offload_params: cpu, offload_optimizer: cpu, recompute: full}", "precision=bf16"],
    ["optimizer={name: sgd, lr: 1e-30, momentum: 0.9}", "schedule={name: warmup_stable_decay, decay_steps: 3}"],
    ["model.overrides={a: [1, {b: null}], c: {}, d: [], e: -1.5e-7, f: false}", "log.report_to=[tensorboard, wandb]"],
    ["train={steps: 2147483647, engine: reference, grad_clip: 0}", "run_dir=./a b/c"],
    ['model.overrides={"null": 1, "1e-4": 2, "<<": 3, "a b": 4, "on": 5}', "data={seq_len: 8, packing: padded}"],
]  # fmt: skip


@pytest.mark.parametrize("overrides", VARIANTS)
def test_a_dumped_recipe_reads_back_equal(recipe_path: Path, tmp_path: Path, overrides: list[str]) -> None:
    recipe = load_recipe(recipe_path, overrides)
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


@pytest.mark.parametrize("text", TRICKY)
def test_any_text_survives_dump_and_load(recipe_path: Path, tmp_path: Path, text: str) -> None:
    recipe = Recipe.model_validate({**load_recipe(recipe_path).model_dump(), "log": {"report_to": (text or "x",)}})
    recipe.model.overrides[text] = [text, {text: text}]
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


def test_a_dump_repeats_what_a_recipe_shares(recipe_path: Path, tmp_path: Path) -> None:
    shared = {"a": 1}
    recipe = load_recipe(recipe_path)
    recipe.model.overrides["both"] = [shared, shared]
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


def test_a_dump_hides_no_default(recipe_path: Path) -> None:
    written = yaml.safe_load(dump_recipe(load_recipe(recipe_path)))
    sections = {name: list(section) for name, section in written.items() if isinstance(section, dict)}
    assert sections.pop("layouts") == []  # a mapping, and no section
    assert len(sections) > 5
    assert sections == {name: declared_fields(name) for name in sections}
    assert list(written) == list(Recipe.model_fields)


def declared_fields(section: str) -> list[str]:
    annotation = Recipe.model_fields[section].annotation
    assert isinstance(annotation, type)
    return list(annotation.model_fields)  # type: ignore[attr-defined]


def test_a_valid_recipe_is_read_without_the_json_schema(recipe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long to build as all else that a command does."""

    def refuse() -> None:
        raise AssertionError("the JSON Schema was built")

    monkeypatch.setattr(recipe_schema, "recipe_json_schema", refuse)
    assert load_recipe(recipe_path).train.steps == 10
