"""The link between ranks: from the times of a machine whose constants are known, exactly these constants."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from toolkit.calibrate import links
from toolkit.hardware import gpu
from toolkit.planner import collectives
from toolkit.planner.cluster import Cluster

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only element is the time, which only what a test calls moves."""
    now = [0.0]
    monkeypatch.setattr(links.time, "perf_counter", lambda: now[0])
    return now


def planted(**constants: float) -> Cluster:
    # The number of cores says that these are CPU ranks, for which gloo has one protocol.
    return replace(Cluster.of(gpu("h100-80gb"), gpus_per_node=8), cores=8, **constants)


@pytest.mark.parametrize("ranks", [2, 4])
def test_constants_are_those_by_which_the_time_model_explains_the_times(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    cluster = planted(link_latency_seconds=2e-5, link_bytes_per_second=3e9, collective_seconds=7e-5)
    group = collectives.group(cluster, size=ranks, stride=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(links, "_agreed_calls", lambda call, seconds: 3)
    monkeypatch.setattr(links, "_ping_pong", lambda tensor, calls: cluster.link_latency_seconds)
    monkeypatch.setattr(
        links, "_collective_seconds", lambda tensor, calls: collectives.all_reduce(cluster, group, tensor.nbytes)
    )
    found = links.measure_links(1.0, CPU)
    # The small message has 32 bytes, whose transfer counts as latency.
    assert found == pytest.approx({name: getattr(cluster, name) for name in found}, rel=1e-3)
    assert found.keys() == {"link_latency_seconds", "link_bytes_per_second", "collective_seconds"}


def test_noise_makes_no_constant_negative_or_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(links, "_agreed_calls", lambda call, seconds: 3)
    monkeypatch.setattr(links, "_ping_pong", lambda tensor, calls: 1.0)  # more than an all-reduce
    monkeypatch.setattr(links, "_collective_seconds", lambda tensor, calls: 1e-4)  # the same for both sizes
    found = links.measure_links(1.0, CPU)
    assert found["collective_seconds"] == 0.0
    assert 0 < found["link_bytes_per_second"] < float("inf")


class TestCalls:
    @pytest.mark.parametrize(("call_seconds", "calls"), [(0.25, 40), (1e-9, 2000), (60.0, 3)])
    def test_as_many_as_fit_into_the_time_within_limits(
        self, monkeypatch: pytest.MonkeyPatch, clock: list[float], call_seconds: float, calls: int
    ) -> None:
        monkeypatch.setattr(dist, "broadcast", lambda tensor, source: None)

        def call() -> None:
            clock[0] += call_seconds

        assert links._agreed_calls(call, 10.0) == calls

    def test_every_rank_takes_the_number_of_the_first(
        self, monkeypatch: pytest.MonkeyPatch, clock: list[float]
    ) -> None:
        monkeypatch.setattr(dist, "broadcast", lambda tensor, source: tensor.fill_(17))
        assert links._agreed_calls(lambda: None, 10.0) == 17


def slow(clock: list[float], durations: list[float]) -> Callable[..., None]:
    """A call that takes the next of these seconds each time."""
    remaining = iter(durations)

    def call(*arguments: object) -> None:
        clock[0] += next(remaining)

    return call


def test_the_median_all_reduce_counts(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setattr(dist, "all_reduce", slow(clock, [5.0, 1.0, 100.0, 2.0, 3.0]))
    assert links._collective_seconds(torch.ones(2), 5) == 3.0


def test_of_a_message_there_and_back_the_fastest_half_counts(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", slow(clock, [50.0, 50.0, 50.0]))  # does not count
    monkeypatch.setattr(dist, "send", slow(clock, [1.0, 2.0, 4.0]))
    monkeypatch.setattr(dist, "recv", slow(clock, [8.0, 3.0, 4.0]))
    assert links._ping_pong(torch.ones(2), 3) == 5.0 / 2
