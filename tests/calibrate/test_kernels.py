"""What `dstk calibrate` makes of the times of kernels: made-up clocks tell times whose rates are known."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from toolkit.calibrate import kernels

CPU = torch.device("cpu")


class Clock:
    """Stands in for the module `time`: both clocks show `now`, which only work moves."""

    now = 0.0

    def thread_time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kernels, "time", clock)
    return clock


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the next calls of `least_seconds` return; each call runs what it is to measure once."""
    queue: list[float] = []

    def least_seconds(call: Callable[[], object], seconds: float, device: torch.device, *, calls: int = 1) -> float:
        call()
        return queue.pop(0)

    monkeypatch.setattr(kernels, "least_seconds", least_seconds)
    return queue


def work(clock: Clock, durations: Iterable[float]) -> Callable[[], None]:
    """A call that takes the next of these seconds each time."""
    remaining = iter(durations)

    def call() -> None:
        clock.now += next(remaining)

    return call


class TestLeastSeconds:
    def test_the_first_call_warms_up_and_the_fastest_other_counts(self, clock: Clock) -> None:
        call = work(clock, [0.5, 3.0, 2.0, 4.0])
        assert kernels.least_seconds(call, 8.5, CPU) == 2.0

    def test_no_call_begins_after_the_time_is_up(self, clock: Clock) -> None:
        call = work(clock, [1.0, 3.0, 0.5])
        assert kernels.least_seconds(call, 2.0, CPU) == 3.0

    def test_of_several_calls_in_a_row_one_is_a_share(self, clock: Clock) -> None:
        call = work(clock, [1.0, 2.0, 4.0, 8.0, 10.0])
        assert kernels.least_seconds(call, 20.0, CPU, calls=2) == 3.0


class TestClock:
    def test_one_thread_of_a_cpu_has_its_own_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert kernels.clock(CPU) is kernels.time.thread_time

    def test_several_threads_need_the_clock_on_the_wall(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert kernels.clock(CPU) is kernels.time.perf_counter

    def test_a_gpu_needs_the_clock_on_the_wall(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert kernels.clock(torch.device("cuda")) is kernels.time.perf_counter


class TestProducts:
    def test_a_rate_is_the_flops_over_the_least_seconds_of_all_turns(self, durations: list[float]) -> None:
        durations += [8.0, 5.0, 2.0, 6.0, 4.0, 7.0, 9.0, 9.0, 3.0, 5.0]  # two products, five turns
        rows = kernels.product_rates([(2, 3, 5), (7, 11, 13)], "fp32", CPU, 1.0)
        assert rows == [(2, 3, 5, 2 * 2 * 3 * 5 / 2.0), (7, 11, 13, 2 * 7 * 11 * 13 / 5.0)]

    def test_the_flops_are_those_of_the_product_that_runs(self, durations: list[float]) -> None:
        durations += [1.0] * 5
        counter = FlopCounterMode(display=False)
        with counter:
            rows = kernels.product_rates([(3, 4, 6)], "fp32", CPU, 1.0)
        assert counter.get_total_flops() == 5 * rows[0][3]

    def test_the_turns_share_the_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times: list[float] = []

        def least_seconds(call: Callable[[], Any], seconds: float, device: torch.device) -> float:
            assert call().dtype == torch.bfloat16
            times.append(seconds)
            return 1.0

        monkeypatch.setattr(kernels, "least_seconds", least_seconds)
        kernels.product_rates([(2, 2, 2)], "bf16", CPU, 1.0)
        assert sum(times) == pytest.approx(1.0)


class TestAttention:
    def test_unmasked_flops_over_the_seconds_of_each_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counter = FlopCounterMode(display=False)

        def pass_seconds(
            call: Callable[[], torch.Tensor], leaves: Iterable[torch.Tensor], seconds: float
        ) -> tuple[float, float]:
            query, key, value = leaves
            # The counter knows the plain products alone, and counts masked scores too.
            with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                F.scaled_dot_product_attention(query, key, value)
            return 2.0, 5.0

        monkeypatch.setattr(kernels, "pass_seconds", pass_seconds)
        forward, backward = kernels.attention_rates("fp32", CPU, 1.0, positions=32)
        half = counter.get_total_flops() / 2
        # The backward pass has five products where the forward pass has two.
        assert (forward, backward) == (half / 2.0, 2.5 * half / 5.0)


class TestPasses:
    def passes(self, clock: Clock, durations: list[tuple[float, float]], seconds: float) -> tuple[torch.Tensor, Any]:
        """The leaf, and what `pass_seconds` returns for passes of these seconds, after one to warm up."""
        leaf = torch.ones(3, requires_grad=True)
        remaining = iter([(1.0, 0.0), *durations])

        def call() -> torch.Tensor:
            forward, backward = next(remaining)
            clock.now += forward
            output = 2 * leaf

            def advance(gradient: torch.Tensor) -> None:
                clock.now += backward

            output.register_hook(advance)
            return output

        return leaf, kernels.pass_seconds(call, iter([leaf]), seconds)

    def test_each_pass_has_its_own_least_time(self, clock: Clock) -> None:
        _, seconds = self.passes(clock, [(3.0, 5.0), (2.0, 7.0), (4.0, 6.0)], 26.0)
        assert seconds == (2.0, 5.0)

    def test_gradients_are_not_added_up(self, clock: Clock) -> None:
        leaf, _ = self.passes(clock, [(3.0, 5.0), (2.0, 7.0), (4.0, 6.0)], 26.0)
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def test_memory_is_read_once_and_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[torch.Tensor] = []

    def least_seconds(call: Callable[[], Any], seconds: float, device: torch.device) -> float:
        written.append(call())
        return 0.5

    monkeypatch.setattr(kernels, "least_seconds", least_seconds)
    rate = kernels.memory_rate(CPU, 1.0, 1024)
    assert rate == 2 * written[0].nbytes / 0.5


def test_a_kernel_is_timed_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def least_seconds(call: Callable[[], Any], seconds: float, device: torch.device, *, calls: int) -> float:
        seen.append(calls)
        return 3e-6

    monkeypatch.setattr(kernels, "least_seconds", least_seconds)
    assert kernels.kernel_seconds(CPU, 1.0) == 3e-6
    assert seen[0] >= 100


@pytest.mark.parametrize("both_ways", [[1.0, 4.0], [4.0, 1.0]])
def test_a_link_to_the_host_is_as_fast_as_its_slower_direction(
    monkeypatch: pytest.MonkeyPatch, durations: list[float], both_ways: list[float]
) -> None:
    empty = torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        return empty(*arguments, **keywords)

    monkeypatch.setattr(torch, "empty", unpinned)
    durations += both_ways
    assert kernels.host_rate(CPU, 1.0, 64) == 64 / 4.0
