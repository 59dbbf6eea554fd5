"""An elastic run goes on when hosts go and come, in layouts planned for those that are there, with one curve."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train_script import train_here

from cluster.elastic import ElasticJob, write_elastic_demo
from cluster.hosts import Host, hosts, require_hosts
from cluster.runs import TOLERANCE, metrics

require_hosts()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Host]]:
    """A host for the store of torchrun, and four for ranks."""
    with hosts(5, tmp_path) as made:
        yield made


def assert_curve_of_one_process(
    ranks: Callable[..., list[Any]], folder: Path, recipe: Path, lines: list[dict[str, float]]
) -> None:
    """Compare every step with those of one process that was not disturbed."""
    words = ["--config", str(recipe), "--layout", "reference", "batch.micro_batch_size=16", f"train.steps={len(lines)}"]
    ranks(train_here, 1, str(folder), [*words, f"run_dir={folder / 'one'}"], joined=False)
    expected = metrics(folder / "one")
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for name in ("loss", "grad_norm"):
        values = [line[name] for line in expected]
        assert [line[name] for line in lines] == pytest.approx(values, rel=TOLERANCE, abs=0), name


def test_a_run_shrinks_and_grows_with_its_hosts_and_keeps_its_curve(
    nodes: list[Host], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    recipe = write_elastic_demo(tmp_path)
    job = ElasticJob(nodes[0], "1:3", recipe, tmp_path / "run", overrides=["parallel.auto=true", "parallel.pp=1"])
    for node in nodes[1:3]:
        job.join(node)
    job.wait(lambda: job.steps > 15)
    nodes[1].lose()  # that of rank 0 or of the other one, as torchrun has it
    job.wait(lambda: job.layout.startswith("dp1-"))
    job.wait_for_more_steps()
    job.join(nodes[3])
    job.wait(lambda: job.layout.startswith("dp2-"))
    job.wait_for_more_steps()
    lines = job.lines[:-1]
    for node in nodes[1:]:
        node.kill_processes()
    assert_curve_of_one_process(ranks, tmp_path, recipe, lines)


@pytest.mark.whole
def test_a_spare_host_takes_the_place_of_a_lost_one_in_the_same_layout(
    nodes: list[Host], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    recipe = write_elastic_demo(tmp_path)
    job = ElasticJob(nodes[0], "2", recipe, tmp_path / "run", overrides=["parallel.auto=true", "parallel.pp=1"])
    job.join(nodes[1])
    job.join(nodes[2])
    job.wait(lambda: job.steps > 5)
    for spare in nodes[3:]:
        job.join(spare)
    job.wait_for_more_steps(15)
    assert (job.layout, job.starts) == ("dp2-tp1-pp1-z1", 1)
    nodes[1].lose()
    job.wait(lambda: job.starts == 2)
    job.wait_for_more_steps()
    lines = job.lines[:-1]
    assert job.layout == "dp2-tp1-pp1-z1"
    for node in nodes[2:]:
        node.kill_processes()
    assert_curve_of_one_process(ranks, tmp_path, recipe, lines)


@pytest.mark.whole
def test_three_hosts_without_a_layout_train_on_two_and_all_end_well(
    nodes: list[Host], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    recipe = write_elastic_demo(tmp_path, steps=30)
    job = ElasticJob(nodes[0], "1:3", recipe, tmp_path / "run", overrides=["parallel.auto=true", "parallel.pp=1"])
    for node in nodes[1:4]:
        job.join(node)
    assert [command.wait(240) for command in job.commands.values()] == [0, 0, 0]
    assert "1 rank is a spare, as 3 ranks have no layout" in job.output
    assert_curve_of_one_process(ranks, tmp_path, recipe, job.lines)
