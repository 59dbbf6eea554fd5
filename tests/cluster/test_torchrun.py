"""`torchrun` with a rendezvous across two hosts trains what one process trains."""

from pathlib import Path

import pytest

from cluster.hosts import hosts
from cluster.runs import (
    assert_all_succeed,
    assert_same_training,
    needs_hosts,
    torchrun,
    train_in_one_process,
    write_demo,
)

pytestmark = needs_hosts


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """The recipe, and the metrics of one process."""
    folder = tmp_path_factory.mktemp("demo")
    recipe = write_demo(folder)
    return recipe, train_in_one_process(folder, recipe)


@pytest.mark.parametrize(
    "layout", ["tp2-pp2-z1", *(pytest.param(name, marks=pytest.mark.whole) for name in ("dp4-z2", "pp2-dp2-z1"))]
)
def test_torchrun_across_two_hosts_trains_what_one_process_trains(
    layout: str, demo: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    recipe, reference = demo
    arguments = ["--config", recipe, "--layout", layout, f"run_dir={tmp_path / 'run'}"]
    with hosts(2, tmp_path) as nodes:
        assert_all_succeed([node.start(torchrun("node1:29501", *arguments)) for node in nodes])
    assert_same_training(tmp_path / "run", reference)
