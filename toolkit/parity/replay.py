"""Replay: tell a difference that rounding explains from a mistake, step by step.

Where training amplifies rounding, the curves of right strategies part as those of wrong ones do. Within one step it is
not amplified yet. So the baseline takes single steps of a strategy again, from the strategy's own weights and optimizer
states: a right strategy then differs by the rounding of one step, which reruns of the baseline measure from the same
state, and a wrong one by what its mistake changes. If every step is right, only rounding is left to explain the curves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from toolkit.parity.diagnosis.cause import Cause, Diagnosis, diagnosis
from toolkit.parity.diagnosis.update import largest_jump
from toolkit.parity.parity_run import Tensors, tensor_differences
from toolkit.parity.result import ParityResult
from toolkit.parity.signs import DecidedUpdates
from toolkit.parity.tolerance import ENVELOPE_FACTOR, RoundingBound, relative

_CAUSES = {"loss": Cause.FORWARD, "gradient": Cause.BACKWARD, "gradient norm": Cause.CLIPPING}


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a run, and the state that it began from."""

    step: int
    """Steps that were done before."""
    loss: float
    grad_norm: float
    tensors: Mapping[str, Tensors]
    """Tensors of the step: its `gradient`, the `update` of the fp32 weights, and each kind of optimizer state after
    it."""
    state: Mapping[str, Tensors]
    """Master weights and optimizer states before it."""
    updates: int
    """Updates that the optimizer counted before the step."""
    loss_scale: Mapping[str, float]
    directions: Tensors = field(default_factory=dict)
    """What the update takes the signs of; empty for optimizers that take none."""

    def differences(self, record: "StepRecord") -> dict[str, tuple[float, str]]:
        """Relative difference of each quantity, in the order of a step, and the parameter that differs most.

        Updates are compared without the signs that rounding decides: the gradients that decide them come before.
        """
        gaps = {"loss": (relative(self.loss, record.loss), "")}
        for kind, tensors in self.tensors.items():
            values = self.decided_update(record) if kind == "update" else tensors
            worst = tensor_differences(values, record.tensors[kind])[0]
            gaps[kind] = worst.difference, worst.name
            gaps.setdefault("gradient norm", (relative(self.grad_norm, record.grad_norm), ""))
        return gaps

    def decided_update(self, record: "StepRecord") -> DecidedUpdates:
        """Return the update, with that of the other `record` in each undecided element."""
        return DecidedUpdates(
            updates=self.tensors["update"],
            baseline=record.tensors["update"],
            directions=self.directions,
            baseline_directions=record.directions,
        )


def steps_to_replay(result: ParityResult, most: int) -> list[int]:
    """Choose steps, by the number of steps before each: all after the first, or those most likely to be wrong.

    These are where the curves leave the tolerance and where they part fastest, each with the update before it.
    """
    steps = range(1, result.curves.steps)
    if len(steps) <= most:
        return list(steps)
    losses = zip(result.run.curve.losses, result.baseline.curve.losses, strict=False)
    fastest, _ = largest_jump([relative(*pair) for pair in losses], floor=result.bounds.curve.at(0)[0])
    first = result.curves.first_diverging_step or len(steps)
    likely = (first - 1, first - 2, fastest - 1, fastest - 2, *steps[:: len(steps) // most])
    return sorted(list(dict.fromkeys(step for step in likely if step in steps))[:most])


def explain(
    records: Sequence[StepRecord],
    baseline: Sequence[StepRecord],
    reruns: Sequence[Sequence[StepRecord]],
    least: RoundingBound | None,
) -> Diagnosis:
    """Name the first step that rounding does not explain; Cause.CHAOS if there is none.

    A step may differ by four times the spread of the reruns in it, or in half of all steps: a few can agree by chance.
    `least` is the bound of fp32.
    """
    same_steps = zip(baseline, *reruns, strict=True)
    spreads = [[first.differences(second) for first, second in combinations(step, 2)] for step in same_steps]
    noise = [{kind: max(gaps[kind][0] for gaps in spread) for kind in spread[0]} for spread in spreads]
    worst = (0.0, "", 0)
    for record, first, rounding in zip(records, baseline, noise, strict=True):
        for kind, (gap, name) in record.differences(first).items():
            usual = median(step[kind] for step in noise)
            floor = 0.0
            if least:
                floor = {"loss": least.loss, "gradient norm": least.grad_norm}.get(kind, least.gradient)
            bound = max(ENVELOPE_FACTOR * max(rounding[kind], usual), floor)
            if not gap <= bound:
                quantity = f"optimizer state {kind}" if kind.startswith(("exp_", "momentum")) else kind
                return Diagnosis(
                    _CAUSES.get(kind, Cause.OPTIMIZER),
                    f"step {record.step + 1} is wrong: from the same weights and optimizer states, the baseline's "
                    f"{quantity} is another one, by more than the rounding of one step explains. "
                    "The first step is right.",
                    f"{name and f'{name}: '}relative difference {gap:.1e}, rounding explains {bound:.1e}",
                )
            worst = max(worst, (gap / bound if bound else 0.0, kind, record.step + 1))
    flipped = sum(record.decided_update(first).flipped() for record, first in zip(records, baseline, strict=True))
    signs = f"; {flipped:,} signs of updates went the other way, where rounding decides them" if flipped else ""
    return diagnosis("replayed", steps=len(records), share=100 * worst[0], kind=worst[1], step=worst[2], signs=signs)
