"""Ranks that cannot meet say where they tried, and on which machine."""

import os
import socket
import time

import pytest

from toolkit.errors import RunError
from toolkit.launch import meeting_point
from toolkit.launch.meeting_point import announced_wait, check_address, name_interface
from toolkit.launch.rank_environment import RankEnvironment


def second_of_two(addr: str = "127.0.0.1", port: int = 1) -> RankEnvironment:
    return RankEnvironment(rank=1, world_size=2, master_addr=addr, master_port=port)


@pytest.mark.parametrize("addr", ["nowhere.invalid", "a..b", "x" * 300])
def test_a_name_without_an_address_is_refused_with_the_host_that_asked(
    addr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_point, "_RESOLVE_SECONDS", 0)
    with pytest.raises(RunError) as refused:
        check_address(second_of_two(addr))
    assert str(refused.value).startswith(f"MASTER_ADDR={addr}: {socket.gethostname()} finds no address of that name (")


def test_a_name_that_is_known_a_little_later_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([socket.gaierror(-3, "Temporary failure in name resolution"), []])

    def getaddrinfo(name: str, port: None) -> list[object]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    check_address(second_of_two("late"))
    assert next(answers, None) is None


def test_a_port_in_use_is_refused_in_one_line_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.launch.process_group import _meet

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        first = RankEnvironment(rank=0, world_size=2, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(RunError, match=f"MASTER_PORT={port}: another process of {socket.gethostname()} uses"):
            _meet(first)


@pytest.mark.parametrize(("rank", "said"), [(0, "for the other ranks; 2 must come"), (1, "for rank 0 at 127.0.0.1:1 ")])
def test_a_rank_that_waits_says_for_whom_and_where(rank: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(meeting_point, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(meeting_point, "print_error", printed.append)
    with announced_wait(RankEnvironment(rank=rank, world_size=2, master_port=1)):
        deadline = time.monotonic() + 60
        while not printed and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(printed) == 1
    assert printed[0].startswith(f"note: rank {rank} on {socket.gethostname()} has waited ")
    assert said in printed[0]


def test_a_rank_that_meets_the_others_at_once_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(meeting_point, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(meeting_point, "print_error", printed.append)
    with announced_wait(second_of_two()):
        pass
    time.sleep(0.4)
    assert printed == []


def test_the_choice_of_an_interface_is_left_to_gloo_on_one_machine_and_to_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    name_interface("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    name_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
