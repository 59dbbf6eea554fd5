"""What ranks know of an elastic torchrun: its range of hosts, and whether they would meet in an old store."""

import pytest

from toolkit.errors import RunError
from toolkit.launch.elastic import Torchrun

AGENT = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "100", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["torchrun", "--nnodes", "1:4", "train.py"], (1, 4)),
        (["torchrun", "--nnodes=2:3", "train.py"], (2, 3)),
        (["torchrun", "--nnodes", "2", "train.py"], (2, 2)),
        (["torchrun", "--standalone", "train.py"], (1, 1)),
    ],
)
def test_the_range_of_hosts_is_that_of_the_command_line(words: list[str], expected: tuple[int, int]) -> None:
    torchrun = Torchrun.detect(AGENT, words)
    assert torchrun is not None
    assert (torchrun.least_hosts, torchrun.most_hosts) == expected
    assert torchrun.is_elastic == (expected[0] < expected[1])


def test_the_range_of_hosts_may_come_from_the_environment() -> None:
    torchrun = Torchrun.detect(AGENT | {"PET_NNODES": "1:8"}, ["torchrun", "train.py"])
    assert torchrun is not None
    assert torchrun.most_hosts == 8


def test_other_launchers_are_not_elastic() -> None:
    assert Torchrun.detect({}, ["deepspeed", "--nnodes", "1:4"]) is None


@pytest.mark.parametrize("nodes", ["1:4", "4"])
def test_a_store_that_outlives_a_start_is_refused(nodes: str) -> None:
    torchrun = Torchrun.detect(AGENT, ["torchrun", "--nnodes", nodes])
    assert torchrun is not None
    with pytest.raises(RunError, match="Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host"):
        torchrun.check_store(AGENT)
    torchrun.check_store(AGENT | {"TORCHELASTIC_USE_AGENT_STORE": "False"})


@pytest.mark.parametrize(("nodes", "restarts"), [("1", "100"), ("4", "0")])
def test_one_host_or_one_start_may_share_the_store(nodes: str, restarts: str) -> None:
    env = AGENT | {"TORCHELASTIC_MAX_RESTARTS": restarts}
    torchrun = Torchrun.detect(env, ["torchrun", "--nnodes", nodes])
    assert torchrun is not None
    torchrun.check_store(env)
