"""Two hosts that share no file system train with checkpoints in S3, and go on from there with other disks and ranks."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
from train_script import train_here

from cluster.forked_ranks import ForkedRanks
from cluster.hosts import Host, hosts, require_hosts
from cluster.runs import TOLERANCE, metrics, write_demo

require_hosts()
URL = "s3://models/run"
PORT = 29555
SERVE = f"""
import boto3, os, time
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="0.0.0.0", port={PORT}, verbose=False).start()
os.environ |= {s3_server.environment(f"http://127.0.0.1:{PORT}")!r}
boto3.client("s3").create_bucket(Bucket="models")
print("serves", flush=True)
time.sleep(1000)
"""
DELETE = f"""
from toolkit.checkpoint.remote_commit import delete_uploaded
from toolkit.remote_files import RemotePath
delete_uploaded(RemotePath("{URL}/step-00000006"))
"""


@pytest.fixture
def nodes(ranks: Callable[..., list[Any]], tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts with a disk each, of which the first one serves S3; and this process has imported what ranks need."""
    (tmp_path / "disk").mkdir()
    with hosts(2, tmp_path) as made:
        for node in made:
            node.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path / "disk"])
        server = made[0].start([sys.executable, "-c", SERVE])
        deadline = time.monotonic() + 120
        while "serves" not in server.output and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "serves" in server.output, server.output
        yield made


def test_a_run_on_separate_disks_goes_on_with_other_disks_in_another_layout(
    nodes: list[Host], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    recipe = str(write_demo(tmp_path, train__steps=6, data__cache_dir=str(disk / "cache")))
    words = ["--config", recipe, "--layout", "reference", f"run_dir={tmp_path / 'reference'}"]
    ranks(train_here, 1, str(tmp_path), [*words, f"data.cache_dir={tmp_path / 'cache'}"], joined=False)
    variables = s3_server.environment(f"http://{nodes[0].address}:{PORT}")
    to_url = [f"checkpoint.url={URL}", "checkpoint.every=3"]
    first = ["--config", recipe, "--layout", "tp2-pp2-z1", f"run_dir={disk / 'one'}", *to_url]
    with ForkedRanks(nodes, first, variables=variables) as job:
        job.wait()
        assert job.codes == dict.fromkeys(range(4), 0), [job.errors(node) for node in nodes]
    for node in nodes:
        assert node.run(["ls", "-A", disk / "cache"])  # each host made its own tokens
        staged = node.run(["sh", "-c", f"ls -A {disk}/one | grep step- || true"])
        assert staged == ""
    environment = [f"{name}={value}" for name, value in variables.items()]
    python = ["env", *environment, sys.executable]
    nodes[1].run([*python, "-c", DELETE], timeout=120)
    nodes[1].run(["rm", "-r", disk / "cache"])
    second = ["--config", recipe, "--layout", "dp2-z3", f"run_dir={disk / 'two'}", *to_url, "--resume", "auto"]
    others = [nodes[1], nodes[0]]  # the first rank is on the host that had no metrics
    with ForkedRanks(others, second, per_host=1, variables=variables) as job:
        job.wait()
        assert job.codes == {0: 0, 1: 0}, [job.errors(node) for node in nodes]
    trained = [json.loads(line) for line in nodes[1].run(["cat", disk / "two" / "metrics.jsonl"]).splitlines()]
    expected = metrics(tmp_path / "reference")
    assert [line["step"] for line in trained] == [line["step"] for line in expected] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm"):
        values = [line[name] for line in expected]
        assert [line[name] for line in trained] == pytest.approx(values, rel=TOLERANCE, abs=0), name
    verified = nodes[1].run([*python, "-m", "toolkit", "checkpoint", "verify", URL], timeout=120)
    assert f"{URL}/step-00000006: complete" in verified
