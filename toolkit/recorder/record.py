"""Record one kind of pass: a few runs of it of different sizes, and one more that checks what they had in common."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import lcm

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.errors import ModelError, ToolkitError
from toolkit.estimate.recorded.recording import Polynomial, RankPass, Recording
from toolkit.files import reason_of
from toolkit.recorder.fake_model import FakeModel, build, tensors_without_memory
from toolkit.recorder.fit import Size, allocated, assemble, fits, has_same_events, solve
from toolkit.recorder.routing import load
from toolkit.recorder.run_pass import trace_pass
from toolkit.recorder.trace import TracedSection

_UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Positions are multiples of one of these: kernels round other sizes up."""
_Lengths = tuple[int, int, int, int | None]
"""Three lengths that sizes are fitted to, and one that checks those of a single sample; None where there is none."""


def record(rank_pass: RankPass, s: int) -> Recording:
    """Record a pass for samples of `s` positions. Raises ModelError. There must be no process group."""
    with in_fake_group(rank_pass.config, rank_pass.layout.tp * rank_pass.layout.ep):
        return _recorded(rank_pass, s)


@contextmanager
def in_fake_group(config: str, ranks: int = 1) -> Iterator[None]:
    """A process group of `ranks` that communicates with nobody; what the model's code raises becomes ModelError."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    except ToolkitError:
        raise
    except KeyError as error:
        unknown = error.args[:1] == (json.loads(config).get("hidden_act"),)
        raise ModelError(f"transformers does not know {reason_of(error)}" if unknown else reason_of(error)) from error
    except NotImplementedError as error:  # of tensors without memory, whose values are asked for
        raise ModelError("the sizes of its tensors depend on their values") from error
    except Exception as error:  # of transformers' classes, for a config that they do not take
        raise ModelError(reason_of(error)) from error
    finally:
        dist.destroy_process_group()


def _recorded(rank_pass: RankPass, s: int) -> Recording:
    mode = tensors_without_memory(rank_pass)
    fake = build(rank_pass, mode)
    span = _span(fake, s)
    unit = rank_pass.layout.tp if rank_pass.layout.sequence_parallel else 1
    if fake.has_experts:
        unit = lcm(unit, load(rank_pass).denominator)
    samples = (1,) if rank_pass.samples == "one" else (2, 3)
    traces: dict[Size, list[TracedSection]] = {}

    def run(at: Size, *, again: bool = False) -> list[TracedSection]:
        if again or at not in traces:
            traces[at] = trace_pass(rank_pass, fake, mode, *at)
        return traces[at]

    for lengths in _lengths(fake, span, unit):
        sizes = _sizes(samples, lengths, run, unit)
        if sizes is not None:
            return assemble(
                run((samples[0], lengths[0])),
                sizes,
                layers=fake.running,
                pattern=fake.pattern,
                positions=span,
                unit=unit,
            )
    raise ModelError("the sizes of its tensors are not polynomials in samples and positions")


def _sizes(
    samples: tuple[int, ...], lengths: _Lengths, run: Callable[..., list[TracedSection]], unit: int
) -> list[Polynomial] | None:
    """Return the size of every storage, in the order of allocation; None where one is no polynomial."""
    *fitted, longer = lengths
    fewest = samples[0]
    most = samples[-1]
    if len(samples) > 1:
        bilinear_points = [(fewest, fitted[0]), (fewest, fitted[2]), (most, fitted[0]), (most, fitted[1])]
        sizes = _solved(bilinear_points, run, unit)
        if sizes is not None:  # of at most two terms, which meet all four points
            return sizes
    # Some sizes have a square of the positions: they need every point, and one more that the solution must meet.
    points = [(count, length) for count in samples for length in fitted]
    sizes = _solved(points, run, unit)
    if sizes is None:
        return None
    check_point = (most + 1, fitted[2])
    if len(samples) == 1:
        if longer is None:
            return sizes
        check_point = (fewest, longer)
    check = run(check_point)
    _check_same_events(run(points[0]), check)
    return sizes if fits(sizes, allocated(check, unit), check_point) else None


def _solved(points: list[Size], run: Callable[..., list[TracedSection]], unit: int) -> list[Polynomial] | None:
    traces = [run(point) for point in points]
    if not has_same_events(traces[0], traces[1]):
        traces[0] = run(points[0], again=True)  # some models convert a table in their first pass
    for other in traces[1:]:
        _check_same_events(traces[0], other)
    sizes = zip(*(allocated(trace, unit) for trace in traces), strict=True)
    polynomials = [solve(points, values) for values in sizes]
    solved = [polynomial for polynomial in polynomials if polynomial is not None]
    return solved if len(solved) == len(polynomials) else None


def _check_same_events(trace: Sequence[TracedSection], other: Sequence[TracedSection]) -> None:
    if not has_same_events(trace, other):
        raise ModelError("the operations it runs depend on the batch size or the sequence length")


def _span(fake: FakeModel, s: int) -> tuple[int, int | None]:
    """Return the first of the lengths that make the same masks as `s`, and the first beyond them.

    They end where a sliding window begins to mask, or begin there; None where they have no end.
    """
    if fake.window is None or fake.window > fake.positions:
        return 1, None
    return (1, fake.window) if s < fake.window else (fake.window, None)


def _lengths(fake: FakeModel, span: tuple[int, int | None], ranks: int) -> Iterator[_Lengths]:
    """Yield lengths inside `span` that the model has positions for, and longer ones where it may have more.

    Rotary positions have no end, but a model may have masks of fixed sizes, so lengths that it names come first.
    """
    most = fake.positions if span[1] is None else min(span[1] - 1, fake.positions)
    if span[0] == fake.positions and not fake.has_learned_positions:
        most = 2 * span[0] + 2 * ranks
    coarse = _UNITS[0] * ranks
    for unit in _UNITS:
        step = unit * ranks
        first = -(-span[0] // step) * step
        if first + 2 * step <= most:
            longer = first + 3 * step
            yield first, first + step, first + 2 * step, longer if longer <= most else None
            if unit < _UNITS[0] and span[1] is None and not fake.has_learned_positions:
                yield coarse, 2 * coarse, 3 * coarse, 4 * coarse
            return
    raise ModelError(
        f"a recording needs three sequence lengths, and the model has only {most} positions. "
        "Raise max_position_embeddings."
    )
