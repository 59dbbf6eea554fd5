"""Clocks of hosts need not agree: no duration is the difference of two clocks."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from cluster.hosts import Command, Host, command_environment, hosts, require_hosts
from cluster.launchers import LAUNCHERS, Start
from cluster.runs import assert_all_succeed, assert_same_training, train_in_one_process, write_demo
from toolkit.checkpoint.verify import verify

require_hosts()
HOUR = 3600


class SkewedHost(Host):
    """A host whose wall clock is wrong. Its monotonic clocks are right."""

    variables: Mapping[str, str]

    @override
    def start(
        self, command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Command:
        """Start a command that sees the wrong time."""
        return super().start(command, cwd=cwd, env={**(env or command_environment()), **self.variables})


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts(2, tmp_path) as made:
        yield made


@pytest.fixture
def wrong_clock(tmp_path: Path) -> Path:
    """The library that puts the clock of a process wrong."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (Debian: gcc)")
    library = tmp_path / "wrong_clock.so"
    source = Path(__file__).with_name("wrong_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library


@pytest.mark.whole
@pytest.mark.parametrize("skew", [HOUR, -HOUR])
def test_a_clock_that_is_wrong_by_an_hour_changes_nothing(
    skew: int, nodes: list[Host], wrong_clock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"LD_PRELOAD": str(wrong_clock), "WRONG_CLOCK_SECONDS": str(skew)}
    monkeypatch.setattr(SkewedHost, "variables", variables, raising=False)
    nodes[1].__class__ = SkewedHost
    seconds = [int(node.run(["date", "+%s"])) for node in nodes]
    assert seconds[1] - seconds[0] == pytest.approx(skew, abs=600)
    recipe = write_demo(tmp_path, checkpoint__every=2)
    reference = train_in_one_process(tmp_path, recipe)
    start = Start(nodes=nodes, folder=tmp_path, recipe=recipe, layout="dp2-z1", per_node=1)
    assert_all_succeed(LAUNCHERS["torchrun"](start))
    assert_same_training(start.run_dir, reference)
    assert verify(start.run_dir / (start.run_dir / "latest").read_text().strip()) == []
