"""Shrink a composition that fails to the smallest recipe that still fails: fewer options, ranks, flags, sizes, steps.

Delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28, 2002) over the
options, then one simpler value at a time of everything else, until nothing simpler fails in the same way.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from compositions import Composition
from fuzz_runs import Verdict
from odd_models import Sizes, write_model

LEAST_STEPS = 2
"""Which `dstk compare` needs."""
PLAIN_FAMILY = "llama"
"""Tried in place of the family, to see whether the failure is of all."""

Judge = Callable[[Composition], Verdict]
"""The verdict of a composition with one layout."""


def shrink_composition(
    composition: Composition, failure: Verdict, judge: Judge, *, quick: Judge, seconds: float
) -> Composition:
    """The smallest composition found in so many seconds that fails as `failure` does. It has one layout.

    `quick` decides on the way, and `judge` at the end: where it does not find the failure in what is left, the way is
    gone again with it.
    """
    whole = replace(composition, layouts=(failure.layout,))
    smallest = _smallest(whole, failure, quick, seconds)
    return smallest if is_same_failure(judge(smallest), failure) else _smallest(whole, failure, judge, seconds)


def _smallest(composition: Composition, failure: Verdict, judge: Judge, seconds: float) -> Composition:
    end = time.monotonic() + seconds
    known: dict[str, bool] = {}

    def fails(candidate: Composition) -> bool:
        if candidate.command not in known and time.monotonic() < end:
            known[candidate.command] = is_same_failure(judge(candidate), failure)
        return known.get(candidate.command, False)

    while True:
        before = composition
        composition = _with_fewest_options(composition, fails)
        for simpler in (_simpler_layouts, _simpler_models, _fewer_steps):
            composition = _simplified(composition, simpler, fails)
        if composition == before or time.monotonic() >= end:
            return composition


def is_same_failure(verdict: Verdict, failure: Verdict) -> bool:
    """Whether a verdict is the same kind of failure: for an error, one of the same class."""
    return (verdict.verdict, what_failed(verdict)) == (failure.verdict, what_failed(failure))


def what_failed(verdict: Verdict) -> str:
    """The class of an error; empty for what differs."""
    found = re.findall(r"\b(\w+(?:Error|Exception|Failure))\b", verdict.reason)
    return found[-1] if found and verdict.verdict == "failed" else ""


def _with_fewest_options(composition: Composition, fails: Callable[[Composition], bool]) -> Composition:
    """Remove options as long as it still fails: at first all of them, then halves, quarters, and single ones."""
    size = len(composition.options)
    while composition.options:
        start, is_smaller = 0, False
        while start < len(composition.options):
            names = list(composition.options)
            rest = names[:start] + names[start + size :]
            candidate = replace(composition, options={name: composition.options[name] for name in rest})
            if fails(candidate):
                composition, is_smaller = candidate, True
            else:
                start += size
        if size == 1 and not is_smaller:
            break
        size = max(1, min(size // 2, len(composition.options)))
    return composition


def _simplified(
    composition: Composition,
    simpler: Callable[[Composition], Iterator[Composition]],
    fails: Callable[[Composition], bool],
) -> Composition:
    """Take the first simpler one that fails, again and again."""
    while True:
        found = next(filter(fails, simpler(composition)), None)
        if found is None:
            return composition
        composition = found


def _simpler_layouts(composition: Composition) -> Iterator[Composition]:
    """Without one part of the layout, or with fewer ranks on an axis, or with a lower ZeRO stage."""
    (layout,) = composition.layouts
    parts = layout.split("-")
    for place, part in enumerate(parts):
        without = parts[:place] + parts[place + 1 :]
        interleaved = re.fullmatch(r"(pp\d+)x\d+", part)
        if interleaved is not None:
            yield _with_layout(composition, [*parts[:place], interleaved[1], *parts[place + 1 :]])
        axis = re.fullmatch(r"(dp|ep|cp|tp|pp|u|z|hpz)(\d+)", part)
        if axis is None:
            yield _with_layout(composition, without)
            continue
        name, size = axis[1], int(axis[2])
        for smaller in range(0 if name == "z" else 1, size):
            yield _with_layout(composition, [*parts[:place], f"{name}{smaller}", *parts[place + 1 :]])
        if size == 1 and name not in ("z", "dp"):  # without dp, `dstk compare` takes as many replicas as --nproc says
            yield _with_layout(composition, without)


def _with_layout(composition: Composition, parts: list[str]) -> Composition:
    return replace(composition, layouts=("-".join(parts),))


def _simpler_models(composition: Composition) -> Iterator[Composition]:
    """A plain family, and sizes nearer to the tiny model's."""
    candidates = [replace(composition, sizes=sizes) for sizes in composition.sizes.smaller()]
    if composition.family != PLAIN_FAMILY:
        candidates = [replace(composition, family=PLAIN_FAMILY, sizes=Sizes()), *candidates]
    yield from filter(_has_model, candidates)


def _has_model(composition: Composition) -> bool:
    return write_model(composition.family, composition.sizes) is not None


def _fewer_steps(composition: Composition) -> Iterator[Composition]:
    for steps in range(LEAST_STEPS, composition.steps):
        yield replace(composition, steps=steps)
