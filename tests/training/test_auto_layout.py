"""`parallel: auto` on forked ranks: one plan for all of them, kept in the run directory, and the same training."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from train_script import train_here

from toolkit.config import dump_recipe, load_recipe
from toolkit.errors import FinishedError, SpareError, ToolkitError
from toolkit.training import plan_launch
from toolkit.training.train import load_job

Train = Callable[..., str]
AUTO = ("parallel=auto", "batch.micro_batch_size=null", "schedule.warmup_steps=0")
KEPT = ("parallel.recompute=none", "parallel.tp=1")
"""Whose activations have one recording."""
SMALL = {"model": {"name_or_path": "gpt2-tiny"}, "batch__global_batch_size": 4}
"""The demo's model."""


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_planned_run_resumes_on_other_ranks_with_another_plan(train: Train, tmp_path: Path) -> None:
    train("run_dir=one", *AUTO, *KEPT, **SMALL)
    banner = train("run_dir=two", *AUTO, *KEPT, "parallel.zero_stage=2", "checkpoint.every=2", **SMALL, world_size=2)
    resume = ("--resume", "two/step-00000002", "parallel.pp=2")
    train("run_dir=four", *AUTO, *KEPT, *resume, **SMALL, world_size=4)
    layouts = []
    for name, ranks in (("one", 1), ("two", 2), ("four", 4)):
        stored = load_recipe(tmp_path / name / "recipe.yaml", world_size=ranks)
        assert not stored.parallel.auto
        layouts.append(stored.layout(ranks))
        assert stored.resolve_batch(layouts[-1]).global_batch_size == 4
    assert (layouts[1].zero_stage, layouts[2].pp) == (2, 2)
    assert f"{layouts[1]}-" in next(line for line in banner.splitlines() if line.split()[:1] == ["plan"])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert losses(tmp_path / "four")[-2:] == pytest.approx(losses(tmp_path / "one")[2:], rel=1e-6)


@pytest.mark.whole
def test_a_planned_schedule_is_said_and_kept_and_trains_the_same(train: Train, tmp_path: Path) -> None:
    fields = ("parallel.pp=2", "batch.micro_batch_size=1", "schedule.warmup_steps=0")
    train("run_dir=plain", *fields, **SMALL, world_size=2)
    banner = train("run_dir=planned", *fields, "parallel.schedule=auto", **SMALL, world_size=2)
    stored = load_recipe(tmp_path / "planned" / "recipe.yaml", world_size=2)
    assert stored.parallel.schedule != "auto"
    plan = " ".join(banner.partition("plan")[2].split())
    assert plan.startswith(f"{stored.layout(2).pipeline_text} on 2 x CPU")
    assert "pp2-zbh1" in plan
    assert losses(tmp_path / "planned") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def planned_on_unlike_machines(path: str) -> tuple[str, str]:
    """The recipe and the banner's line of a rank whose machine is smaller than that of the next one."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_launch, "host_memory_bytes", lambda: (rank + 1) * 6 * 2**30)
        job = load_job(path, [*AUTO, *KEPT])
    return dump_recipe(job.recipe), job.plan


def test_unlike_machines_have_one_plan(make_recipe, ranks, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(dump_recipe(make_recipe(**SMALL)))
    first, *others = ranks(planned_on_unlike_machines, 3, str(tmp_path / "small.yaml"), joined=False)
    assert others == [first, first]
    assert "2.00 GiB" in first[1]  # a third of the smallest host


def trained_in_an_elastic_launch(folder: str, arguments: list[str]) -> str:
    """What a rank prints, or why it had no part in the run."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "job", "PET_NNODES": "1:3"}
    try:
        return train_here(folder, arguments)
    except (SpareError, FinishedError) as error:
        return str(error)


def test_ranks_without_a_layout_are_spares_until_the_run_ends(ranks, train: Train, tmp_path: Path) -> None:
    train("run_dir=one", *AUTO, *KEPT, **SMALL)
    arguments = ["--config", "small.yaml", *AUTO, *KEPT, "parallel.pp=1"]
    arguments += ["run_dir=three", "--resume", "auto"]
    first = ranks(trained_in_an_elastic_launch, 3, str(tmp_path), arguments, joined=False)
    again = ranks(trained_in_an_elastic_launch, 3, str(tmp_path), arguments, joined=False)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert "1 rank is a spare, as 3 ranks have no layout" in first[0]
    assert first[2] == again[2] == "rank 2 was a spare of 3 ranks."
    assert "three is finished" in again[0]


@pytest.mark.parametrize(
    ("changes", "field", "advice"),
    [
        pytest.param(("parallel.zero_stage=3", "parallel.pp=2"), "parallel.pp", "leave", id="kept fields"),
        pytest.param(("batch.micro_batch_size=3",), "batch.micro_batch_size", "leave", id="kept micro-batch"),
        pytest.param(("model.name_or_path=llama-3.1-405b",), "parallel.auto", "a smaller model", id="model"),
    ],
)
def test_what_cannot_be_planned_is_one_line_on_every_rank(
    train: Train, changes: tuple[str, ...], field: str, advice: str
) -> None:
    with pytest.raises(ToolkitError) as caught:
        train("run_dir=here", *AUTO, *changes, **SMALL, world_size=2)
    (line,) = caught.value.problems
    assert field.rpartition(".")[2] in line
    assert advice in line.lower()
