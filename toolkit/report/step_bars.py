"""Bars of step times: a part for each term, on one scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TONES = {
    "compute": "cool0",
    "recompute": "cool3",
    "reference": "cool1",
    "host": "tolerance",
    "tensor": "warm0",
    "context": "cool4",
    "expert": "cool1",
    "pipeline": "warm2",
    "bubble": "reference",
    "data": "warm1",
    "optimizer": "cool2",
    "offload": "warm3",
    "sequence": "warm0",
    "world": "cool1",
    "copies": "warm3",
    "idle": "reference",
    "measured": "ink",
}
"""Colors of terms, in their order in a bar: every term of the time model and of a trace, and `measured`."""


@dataclass(frozen=True, kw_only=True)
class StepBar:
    """One step: seconds by term, and the width of each in percent of the longest step."""

    label: str
    terms: Mapping[str, float]
    widths: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def seconds_text(self) -> str:
        return f"{digits(self.seconds)} s"


def step_bars(steps: Sequence[tuple[str, Mapping[str, float]]]) -> list[StepBar]:
    """A bar for each label and its terms."""
    longest = max(sum(terms.values()) for _, terms in steps)
    return [
        StepBar(
            label=label, terms=terms, widths={name: 100 * terms[name] / longest for name in TONES if terms.get(name)}
        )
        for label, terms in steps
    ]


def terms_of(bars: Sequence[StepBar]) -> list[str]:
    """The terms that some bar has."""
    return [name for name in TONES if any(name in bar.widths for bar in bars)]


def digits(seconds: float) -> str:
    """Three digits or more, so that a column of them lines up."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:#.3g}"
