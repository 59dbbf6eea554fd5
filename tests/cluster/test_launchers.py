"""Every launcher across two hosts trains what one process trains, with the scripts of `dstk config`, unedited."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train_script import train_here

from cluster.hosts import Host, hosts, require_hosts
from cluster.launchers import LAUNCHERS, WITH_SLURM, WITH_SSH, Start, missing_command
from cluster.runs import assert_all_succeed, assert_same_training, metrics, write_demo
from cluster.slurm import missing_slurm, slurm
from cluster.ssh import missing_ssh, start_sshd

require_hosts()
WHOLE = pytest.mark.whole


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    folder = tmp_path_factory.mktemp("nodes")
    folder.chmod(0o755)
    with hosts(2, folder) as made:
        yield made


@pytest.fixture(scope="module")
def demo(
    ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, float]]]:
    """The recipe, and the metrics of one process."""
    folder = tmp_path_factory.mktemp("demo")
    recipe = write_demo(folder)
    arguments = ["--config", str(recipe), "--layout", "reference", f"run_dir={folder / 'run'}"]
    ranks(train_here, 1, str(folder), arguments, joined=False)
    return recipe, metrics(folder / "run")


@pytest.fixture(scope="module")
def ssh(nodes: list[Host]) -> None:
    if missing_ssh():
        pytest.skip(missing_ssh())
    start_sshd(nodes, nodes[0].folder / "ssh")


@pytest.fixture(scope="module")
def slurm_environment(nodes: list[Host]) -> Iterator[dict[str, str]]:
    if missing_slurm():
        pytest.skip(missing_slurm())
    with slurm(nodes, nodes[0].folder / "slurm") as environment:
        yield environment


@pytest.mark.parametrize(
    ("launcher", "layout", "per_node"),
    [
        ("torchrun", "tp2-z1", 1),
        *(pytest.param(name, "tp2-pp2-z1", 2, marks=WHOLE) for name in ("torchrun", "deepspeed", "deepspeed --no_ssh")),
        *(pytest.param(name, "tp2-z1", 1, marks=WHOLE) for name in ("accelerate", "mpirun", "sbatch")),
    ],
)
def test_a_launcher_across_two_hosts_trains_what_one_process_trains(
    launcher: str,
    layout: str,
    per_node: int,
    nodes: list[Host],
    demo: tuple[Path, list[dict[str, float]]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if absent := missing_command(launcher):
        pytest.skip(absent)
    if launcher in WITH_SSH:
        request.getfixturevalue("ssh")
    environment = request.getfixturevalue("slurm_environment") if launcher in WITH_SLURM else None
    recipe, reference = demo
    start = Start(
        nodes=nodes,
        folder=tmp_path,
        recipe=recipe,
        layout=layout,
        per_node=per_node,
        port=29600 + list(LAUNCHERS).index(launcher),
        slurm=environment,
    )
    assert_all_succeed(LAUNCHERS[launcher](start), timeout=500)
    assert_same_training(start.run_dir, reference)
