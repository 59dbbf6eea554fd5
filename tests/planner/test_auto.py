"""`parallel: auto`: what a recipe leaves open, what the ranks run on, and what is chosen."""

from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.config import dump_recipe, load_recipe
from toolkit.config.recipe import Recipe
from toolkit.errors import BatchError, LayoutError, RunError, ToolkitError
from toolkit.hardware import gpu
from toolkit.planner.auto.plan_recipe import planned
from toolkit.planner.auto.ranks import UNKNOWN_GPU, RankDevice, cluster_named, cluster_of

TEXT = """
model: {name_or_path: gpt2-tiny}
data: {seq_len: 32}
parallel: auto
batch: {global_batch_size: 8}
precision: bf16
optimizer: {lr: 1e-3}
train: {steps: 1}
"""
GIB = 2**30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "auto.yaml").write_text(TEXT)
    return tmp_path / "auto.yaml"


def plan(path: Path, ranks: int, *overrides: str, kind: str | None = "cpu", layout: str | None = None) -> Recipe:
    recipe = load_recipe(path, overrides, world_size=ranks, layout=layout)
    cluster, on = cluster_named(kind, ranks)
    return planned(recipe, cluster, ranks, on=on).recipe


@pytest.mark.parametrize("kind", ["cpu", "H100", None])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_planned_recipe_is_explicit_and_reads_back(path: Path, tmp_path: Path, ranks: int, kind: str | None) -> None:
    recipe = plan(path, ranks, kind=kind)
    assert recipe.layout(ranks).world_size == ranks
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml", world_size=ranks) == recipe


@pytest.mark.parametrize(
    "given", ["parallel.tp=2", "parallel.zero_stage=3", "parallel.recompute=full", "batch.micro_batch_size=1"]
)
def test_what_the_recipe_gives_is_kept(path: Path, given: str) -> None:
    field, _, text = given.partition("=")
    recipe = plan(path, 4, given)
    assert str(recipe.value_of(field)) == text
    assert recipe.batch.global_batch_size == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"offload_optimizer": "cpu"}, ["offload_optimizer"]),
        ({"offload_optimizer": "cpu", "zero_stage": "1"}, ["offload_optimizer"]),
        ({"offload_optimizer": "cpu", "zero_stage": "3"}, ["offload_optimizer", "offload_params"]),
        ({"offload_params": "cpu"}, ["offload_optimizer", "offload_params"]),
        ({"offload_params": "cpu", "offload_optimizer": "none"}, ["offload_params"]),
        ({"offload_params": "none"}, []),
    ],
)
def test_an_offload_that_the_recipe_gives_is_kept(path: Path, given: dict[str, str], expected: list[str]) -> None:
    parallel = plan(path, 4, *(f"parallel.{name}={value}" for name, value in given.items()), kind="H100").parallel
    offloaded = [name for name in ("offload_optimizer", "offload_params") if getattr(parallel, name) == "cpu"]
    assert offloaded == expected
    assert all(str(getattr(parallel, name)) == value for name, value in given.items())


def test_experts_that_the_recipe_splits_inside_are_kept(path: Path) -> None:
    mixture = ("model.name_or_path=mixtral-8x7b", "parallel.experts=inner")
    parallel = plan(path, 16, *mixture, kind="H200").parallel
    assert parallel.experts == "inner"
    assert parallel.tp > 1


def test_a_layout_replaces_the_plan_but_for_the_micro_batch(path: Path) -> None:
    recipe = load_recipe(path, layout="tp2-z2", world_size=4)
    assert recipe.parallel.auto
    chosen = plan(path, 4, layout="tp2-z2")
    assert (str(chosen.layout(4)), chosen.batch.micro_batch_size) == ("dp2-tp2-pp1-z2", 4)
    assert not load_recipe(path, layout="tp2-z2-m1", world_size=4).parallel.auto
    assert not load_recipe(path, ["batch.micro_batch_size=2"], layout="tp2-z2", world_size=4).parallel.auto


def test_a_recipe_that_is_not_planned_yet_has_no_layout(path: Path) -> None:
    with pytest.raises(LayoutError, match="--layout"):
        load_recipe(path).layout(4)


@pytest.mark.parametrize(
    ("ranks", "overrides", "error", "expected"),
    [
        (61, (), LayoutError, "61 ranks: .* Launch 64 ranks, or set batch.global_batch_size=61"),
        (64, ("batch.global_batch_size=3",), BatchError, "batch.global_batch_size=3: no layout splits it"),
        (13, ("parallel.cp=2",), LayoutError, "13 ranks with parallel.cp=2: .* Launch 12 ranks"),
        (2, ("batch.micro_batch_size=3",), LayoutError, "micro_batch_size=3: .* to the plan"),
    ],
)
def test_what_nothing_can_be_planned_for_is_refused_in_the_recipes_terms(
    path: Path, ranks: int, overrides: tuple[str, ...], error: type[ToolkitError], expected: str
) -> None:
    with pytest.raises(error, match=expected) as caught:
        plan(path, ranks, *overrides)
    assert len(caught.value.problems) == 1
    assert "--" not in str(caught.value)


def test_a_precision_without_units_is_refused(path: Path) -> None:
    with pytest.raises(RunError, match="precision=bf16"):
        plan(path, 2, "precision=bf16", kind="V100-SXM-32GB")


def test_other_engines_have_their_micro_batch_planned(path: Path) -> None:
    recipe = plan(path, 2, "train.engine=ddp")
    assert (recipe.layout(2).dp, recipe.batch.micro_batch_size) == (2, 4)


def rank(host: str, device: str = "cpu", gib: int = 64) -> RankDevice:
    return RankDevice(host=host, device=device, memory_bytes=gib * GIB, host_memory_bytes=gib * GIB)


def test_ranks_of_a_host_share_its_memory() -> None:
    cluster, _ = cluster_of([rank("a"), rank("a"), rank("b", gib=16), rank("b")])
    assert (cluster.gpus_per_node, cluster.gpu.memory_bytes) == (2, 8 * GIB)


def test_of_several_kinds_the_slowest_and_the_smallest_count() -> None:
    names = [gpu(name).device_names[0] for name in ("H100-SXM-80GB", "A100-SXM-40GB")]
    cluster, said = cluster_of([rank("a", names[0], 80), rank("b", names[1], 39)])
    assert (cluster.gpu.name, cluster.gpu.memory_bytes) == ("A100-SXM-40GB", 39 * GIB)
    assert all(name in said for name in names)


def test_a_gpu_that_is_not_in_the_catalogue_has_its_own_memory() -> None:
    cluster, said = cluster_of([rank("a", "Mystery 9000", 12)] * 2)
    assert cluster.gpu.memory_bytes == 12 * GIB
    assert cluster.gpu.fp32_flops == gpu(UNKNOWN_GPU).fp32_flops
    assert UNKNOWN_GPU in said


def test_offloading_is_tried_where_nothing_else_fits_and_never_on_cpus(path: Path) -> None:
    large = ("model.name_or_path=llama-2-7b", "data.seq_len=512", "precision=fp16")
    fits = plan(path, 8, *large, kind="A100-40")
    assert fits.parallel.offload_optimizer == "none"
    tight = plan(path, 2, *large, kind="A100-40")
    assert tight.parallel.offload_optimizer == "cpu"
    recipe = load_recipe(path, large, world_size=2)
    with pytest.raises(LayoutError, match="fits into"):
        planned(recipe, cluster_of([rank("a", gib=60)] * 2)[0], 2, on="")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["memory", "--recipe", "auto.yaml"], "--world-size"),
        (["config", "auto.yaml"], "--world-size"),
        (["lint", "ds.json", "--recipe", "auto.yaml"], "--gpus"),
    ],
)
def test_a_command_that_needs_a_layout_asks_for_ranks(
    path: Path, words: list[str], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(path.parent)
    (path.parent / "ds.json").write_text('{"train_batch_size": 8}')
    with pytest.raises(SystemExit) as ended:
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert option in line
    with pytest.raises(SystemExit) as ended:
        main([*words, option, "2"])
    assert ended.value.code != 2
    assert "planned dp" in capsys.readouterr().err


def test_validate_plans_only_for_a_number_of_ranks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, expected in (([], ", auto, "), (["--world-size", "2", "--gpu", "cpu"], ", dp")):
        with pytest.raises(SystemExit) as ended:
            main(["validate", str(path), *more])
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


def test_a_script_that_dstk_config_writes_keeps_the_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", str(path), "parallel=auto", "parallel.zero_stage=2", "batch.micro_batch_size=null"]
    with pytest.raises(SystemExit):
        main([*words, "train.seed=3", "--world-size", "4", "--gpu", "L4", "--launcher", "torchrun"])
    script = capsys.readouterr().out.replace(" \\\n    ", " ")
    layout = script.partition("--layout ")[2].split()[0]
    assert "-z2-" in layout
    assert "train.seed=3" in script
    assert "parallel" not in script
    assert load_recipe(path, ["train.seed=3"], layout=layout, world_size=4).parallel.zero_stage == 2
