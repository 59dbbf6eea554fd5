"""What happens between two hosts: a run goes on or ends as docs/reliability.md says, names the host, and leaves a
whole checkpoint."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train_script import train_here

from cluster.forked_ranks import ForkedRanks
from cluster.hosts import Host, hosts, require_hosts
from cluster.runs import assert_same_training, metrics, write_demo
from toolkit.checkpoint.verify import verify
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.training import run_directory

require_hosts()
HANG_SECONDS = 8
LONG = 100000


@pytest.fixture
def nodes(ranks: Callable[..., list[Any]], tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts; and this process has imported what ranks need."""
    with hosts(2, tmp_path) as made:
        yield made


def endless(folder: Path) -> list[str | Path]:
    """The arguments of a run that saves often, and does not end by itself."""
    changes = {"train__steps": LONG, "train__hang_timeout": HANG_SECONDS, "checkpoint__every": 5}
    recipe = write_demo(folder, **changes)
    return ["--config", recipe, "--layout", "tp2-pp2-z1", f"run_dir={folder / 'run'}"]


def has_saved(folder: Path) -> bool:
    return (folder / "run" / "latest").exists()


def step_of(folder: Path) -> int:
    return len(metrics(folder / "run"))


def assert_whole_checkpoint(folder: Path) -> None:
    """Verify the newest checkpoint, as `dstk checkpoint verify` does."""
    assert verify(folder / "run" / (folder / "run" / "latest").read_text().strip()) == []


@pytest.mark.parametrize(
    "launcher_store",
    [True, pytest.param(False, marks=pytest.mark.whole)],
    ids=["torchrun's store", "rank 0's store"],
)
def test_a_link_that_goes_down_for_good_ends_both_sides_with_the_other_host_named(
    launcher_store: bool, nodes: list[Host], tmp_path: Path
) -> None:
    with ForkedRanks(nodes, endless(tmp_path), launcher_store=launcher_store) as job:
        job.wait(until=lambda: has_saved(tmp_path))
        nodes[1].cut()
        job.wait()
        assert job.codes == dict.fromkeys(range(4), 76)
        here, there = ([line.removeprefix("error: ") for line in job.errors(node)] for node in nodes)
    assert len(here) == len(there) == 1
    assert here[0].startswith("rank 2 (node2) in step ")
    assert "rank 3 (node2)" in here[0]
    lost = "the launcher on node1, which hosts the store," if launcher_store else "rank 0 (node1) in step "
    assert there[0].startswith(lost)
    assert "no longer responds (stopped, frozen or disconnected)" in there[0]
    assert_whole_checkpoint(tmp_path)


@pytest.mark.whole
def test_a_link_that_is_down_for_five_seconds_changes_nothing(
    nodes: list[Host], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    recipe = write_demo(tmp_path, train__steps=40)
    arguments = ["--config", str(recipe), "--layout"]
    train_in_one_process(ranks, tmp_path, arguments)
    with ForkedRanks(nodes, [*arguments, "tp2-pp2-z1", f"run_dir={tmp_path / 'run'}"]) as job:
        job.wait(until=lambda: (tmp_path / "run" / "metrics.jsonl").exists() and step_of(tmp_path) > 2)
        nodes[1].cut()
        time.sleep(1)
        reached = step_of(tmp_path)
        time.sleep(4)
        assert step_of(tmp_path) == reached
        nodes[1].connect()
        job.wait()
        assert job.codes == dict.fromkeys(range(4), 0)
    assert reached < 40
    assert_same_training(tmp_path / "run", metrics(tmp_path / "reference"))


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.whole), 1], ids=["store", "other"])
def test_a_host_whose_processes_are_all_killed_is_named_by_the_other_one(
    number: int, nodes: list[Host], tmp_path: Path
) -> None:
    other = nodes[1 - number]
    with ForkedRanks(nodes, endless(tmp_path)) as job:
        job.wait(until=lambda: has_saved(tmp_path))
        nodes[number].kill_processes()
        job.wait()
        errors = job.errors(other)
    assert [job.codes[rank] for rank in range(4)] == ([137, 137, 76, 76] if number == 0 else [76, 76, 137, 137])
    assert len(errors) == 1
    assert f"({nodes[number].name})" in errors[0]
    assert "died in step" in errors[0]
    assert_whole_checkpoint(tmp_path)


@pytest.mark.whole
def test_a_host_without_power_is_named_by_the_other_one(nodes: list[Host], tmp_path: Path) -> None:
    with ForkedRanks(nodes, endless(tmp_path)) as job:
        job.wait(until=lambda: has_saved(tmp_path))
        nodes[1].lose()
        job.wait()
        errors = job.errors(nodes[0])
    assert [job.codes[rank] for rank in range(4)] == [76, 76, 137, 137]
    assert len(errors) == 1
    assert "rank 2 (node2)" in errors[0]
    assert "no longer responds (stopped, frozen or disconnected)" in errors[0]
    assert_whole_checkpoint(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["loss", "delay"])
def test_lost_and_late_packets_change_nothing(
    kind: str, nodes: list[Host], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    disturbance = {"loss_percent": 5.0} if kind == "loss" else {"delay_ms": 10.0}
    for node in nodes:
        if reason := node.disturb(**disturbance):
            pytest.skip(reason)
    assert_trains_as_one_process(nodes, ranks, tmp_path)


@pytest.mark.whole
def test_a_host_that_is_slow_is_named_with_the_phase(
    nodes: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro_batches = MicroBatchLoader.micro_batches

    def read_slowly(loader: MicroBatchLoader, *arguments: Any) -> Iterator[MicroBatch]:
        for micro_batch in micro_batches(loader, *arguments):
            if loader.data_rank == 1:
                loader.report_phase("data")
                time.sleep(0.5)
                loader.report_phase("forward")
            yield micro_batch

    monkeypatch.setattr(MicroBatchLoader, "micro_batches", read_slowly)
    recipe = write_demo(tmp_path, train__steps=31)
    arguments = ["--config", recipe, "--layout", "dp2-z1", f"run_dir={tmp_path / 'run'}"]
    with ForkedRanks(nodes, arguments, per_host=1) as job:
        job.wait()
        assert job.codes == dict.fromkeys(range(2), 0)
    (event,) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert (event["step"], event["kind"]) == (31, "slow")
    assert event["reason"].startswith("rank 1 (node2) holds the others up: its data takes ")


@pytest.mark.whole
def test_a_name_that_leads_to_the_wrong_one_of_two_networks_changes_nothing(
    nodes: list[Host], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Gloo's own choice is the address of the host's name, here that of a network without the other host."""
    for number, node in enumerate(nodes, 1):
        node.run(["ip", "link", "add", "name", "eth1", "type", "veth", "peer", "name", "nowhere"])
        node.run(["ip", "address", "add", f"10.88.{number}.1/24", "dev", "eth1"])
        node.run(["ip", "link", "set", "eth1", "up"])
        others = [f"{other.address} {other.name}\n" for other in nodes if other is not node]
        wrong = tmp_path / f"hosts-of-{node.name}"
        wrong.write_text(f"127.0.0.1 localhost\n10.88.{number}.1 {node.name}\n{''.join(others)}")
        node.run(["mount", "--bind", wrong, "/etc/hosts"])
    variables = {"MASTER_ADDR": nodes[0].address}
    assert_trains_as_one_process(nodes, ranks, tmp_path, variables)


@pytest.mark.whole
def test_a_host_that_does_not_know_the_name_of_the_first_one_is_named(nodes: list[Host], tmp_path: Path) -> None:
    arguments = ["--config", write_demo(tmp_path), "--layout", "dp2-z1", f"run_dir={tmp_path / 'run'}"]
    with ForkedRanks(nodes, arguments, per_host=1, variables={"MASTER_ADDR": "nowhere"}) as job:
        job.wait(until=lambda: 1 in job.codes)
        errors = job.errors(nodes[1])
    assert job.codes[1] == 2
    assert len(errors) == 1
    assert errors[0].startswith("error: MASTER_ADDR=nowhere: node2 finds no address of that name (")
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_one_line_that_names_port_and_host(nodes: list[Host], tmp_path: Path) -> None:
    listen = "import socket, time; s = socket.create_server(('', 29501)); print('up', flush=True); time.sleep(1000)"
    other = nodes[0].start([sys.executable, "-c", listen])
    deadline = time.monotonic() + 60
    while "up" not in other.output and time.monotonic() < deadline:
        time.sleep(0.05)
    arguments = ["--config", write_demo(tmp_path), "--layout", "dp2-z1", f"run_dir={tmp_path / 'run'}"]
    with ForkedRanks(nodes, arguments, per_host=1) as job:
        job.wait(until=lambda: 0 in job.codes)
        errors = job.errors(nodes[0])
    assert job.codes[0] == 2
    assert len(errors) == 1
    assert errors[0].startswith("error: MASTER_PORT=29501: another process of node1 uses that port.")
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_hosts_do_not_share_is_refused_before_training(
    nodes: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "_VISIBLE_SECONDS", 0.5)
    (tmp_path / "disk").mkdir()
    nodes[1].run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "disk"])
    arguments = ["--config", write_demo(tmp_path), "--layout", "dp2-z1", f"run_dir={tmp_path / 'disk' / 'run'}"]
    with ForkedRanks(nodes, arguments, per_host=1) as job:
        job.wait()
        errors = [job.errors(node) for node in nodes]
    assert job.codes == {0: 2, 1: 2}
    line = (
        f"error: run_dir={tmp_path / 'disk' / 'run'}: node2 cannot see what rank 0 writes there on node1. "
        "Set it to a path at which all nodes mount the same file system."
    )
    assert errors == [[line], [line]]
    assert not (tmp_path / "disk" / "run").exists()


def assert_trains_as_one_process(
    nodes: list[Host], ranks: Callable[..., list[Any]], folder: Path, variables: dict[str, str] | None = None
) -> None:
    arguments = ["--config", str(write_demo(folder)), "--layout"]
    train_in_one_process(ranks, folder, arguments)
    with ForkedRanks(nodes, [*arguments, "tp2-pp2-z1", f"run_dir={folder / 'run'}"], variables=variables) as job:
        job.wait()
        assert job.codes == dict.fromkeys(range(4), 0)
    assert_same_training(folder / "run", metrics(folder / "reference"))


def train_in_one_process(ranks: Callable[..., list[Any]], folder: Path, arguments: list[str]) -> None:
    words = [*arguments, "reference", f"run_dir={folder / 'reference'}"]
    ranks(train_here, 1, str(folder), words, joined=False)
