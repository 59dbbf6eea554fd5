"""Rules for preference tuning: what a step knows of each completion, from its targets to the weight of its tokens."""

import numpy as np
from numpy.typing import NDArray

from toolkit.parity.diagnosis.cause import Diagnosis, diagnosis
from toolkit.parity.result import ParityResult
from toolkit.parity.sequence_facts import SequenceFacts
from toolkit.parity.tolerance import FP32_UNIT
from toolkit.units import some

_SAME_LOGP = 1e-4
"""Relative difference of log-probabilities in fp32 that rounding, and one update, may leave."""
_SAME_LOGP_LOW = 2e-2
"""Relative difference of log-probabilities in lower precision that rounding may leave."""
_SAME_REFERENCE = 1e-5
"""Relative difference of log-probabilities that two completions have by chance next to never."""
_SAME_COEFFICIENT = 3e-5
"""Difference of coefficients, relative to the largest, that such a difference of log-probabilities explains."""
_SIDES = ("chosen", "rejected")


def targets(diff: ParityResult) -> Diagnosis | None:
    """Detect completions with other target tokens, or ranks that have one completion of a pair alone."""
    both = _both(diff.run.sequences, diff.baseline.sequences)
    if both is None:
        return None
    run, baseline = both
    # A token that is certain has a loss of zero in one run and rounding in another.
    wrong = (run.targets != baseline.targets) & ~_close(diff, run.policy, baseline.policy)
    if not wrong.any():
        return None
    names = some(_names(run, wrong))
    count = int(wrong.sum())
    if not run.targets[wrong].any():
        rank = int(run.ranks[wrong][0])
        return diagnosis("split pair", rank=rank, names=names, count=count, all=len(run))
    return diagnosis("turns", names=names, count=count, all=len(run))


def inputs(diff: ParityResult) -> Diagnosis | None:
    """Detect means in place of sums, and log-probabilities of a reference that are wrong or of other completions."""
    both = _both(diff.run.sequences, diff.baseline.sequences)
    if both is None:
        return None
    run, baseline = both
    length = np.maximum(baseline.targets, 1)
    is_wrong = ~_close(diff, run.policy, baseline.policy)
    if is_wrong.any() and _close(diff, run.policy * length, baseline.policy).all():
        worst = int(np.argmax(is_wrong))
        return diagnosis(
            "means for sums",
            name=_name(run, worst),
            run=run.policy[worst],
            baseline=baseline.policy[worst],
            targets=int(length[worst]),
        )
    is_other = ~_close(diff, run.reference, baseline.reference)
    if not is_other.any():
        return None
    evidence = _of_worst(run, run.reference, baseline.reference, is_other)
    if all(_is_of_another(diff, run, piece) for piece in set(run.pieces[is_other].tolist())):
        return diagnosis("reference of others", evidence=evidence)
    if diff.run.masks_compared or diff.baseline.masks_compared:
        return diagnosis("reference with dropout", evidence=evidence)
    return diagnosis("other reference", evidence=evidence)


def coefficients(diff: ParityResult) -> Diagnosis | None:
    """Detect weights of tokens in the first step that do not follow from the log-probabilities, which are right."""
    return _coefficients(diff, diff.run.sequences, diff.baseline.sequences, step=diff.baseline.curve.step(1))


def later_coefficients(diff: ParityResult) -> Diagnosis | None:
    """Detect such weights in the step after the first update: before it, all pairs may weigh the same."""
    step = diff.baseline.update_step + 1
    return _coefficients(diff, diff.run.later_sequences, diff.baseline.later_sequences, step=step)


def _coefficients(
    diff: ParityResult, facts: SequenceFacts, baseline_facts: SequenceFacts, *, step: int
) -> Diagnosis | None:
    both = _both(facts, baseline_facts)
    if both is None:
        return None
    run, baseline = both
    if not (_close(diff, run.policy, baseline.policy) & _close(diff, run.reference, baseline.reference)).all():
        return None
    bound = _SAME_COEFFICIENT * np.abs(baseline.coefficients).max(initial=0.0)
    if diff.bounds.unit > FP32_UNIT:
        bound = _SAME_LOGP_LOW * np.abs(baseline.coefficients).max(initial=0.0)
    wrong = np.abs(run.coefficients - baseline.coefficients) > bound
    if not wrong.any():
        return None
    sorted_gaps = np.abs(np.sort(run.coefficients) - np.sort(baseline.coefficients))
    evidence = _of_worst(run, run.coefficients, baseline.coefficients, wrong)
    if (sorted_gaps <= bound).all():
        return diagnosis("coefficients of others", step=step, evidence=evidence)
    return diagnosis("other coefficients", step=step, evidence=evidence)


def _both(run: SequenceFacts, baseline: SequenceFacts) -> tuple[SequenceFacts, SequenceFacts] | None:
    """Return what is known of the run's completions on both sides; None where that cannot be compared."""
    if not len(run) or not len(baseline):
        return None
    same = baseline.at(run)
    return None if same is None else (run, same)


def _is_of_another(diff: ParityResult, run: SequenceFacts, piece: int) -> bool:
    """Whether the run's reference of a pair is the right one of another pair."""
    is_here = run.pieces == piece
    known = diff.baseline.references
    if known is None:
        known = _rows_of_pieces(diff.baseline.sequences)
    pairs = zip(run.reference[is_here].tolist(), run.sides[is_here].tolist(), strict=True)
    matches = [np.isclose(known[:, side], value, rtol=_SAME_REFERENCE, atol=0.0) for value, side in pairs]
    return bool(np.logical_and.reduce(matches).any())


def _rows_of_pieces(facts: SequenceFacts) -> NDArray[np.float64]:
    """Return the references of the pairs of a step, [pairs, 2]; NaN where a pair has one completion."""
    pieces, rows = np.unique(facts.pieces, return_inverse=True)
    table = np.full((len(pieces), 2), np.nan)
    table[rows, facts.sides] = facts.reference
    return table


def _close(diff: ParityResult, values: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.bool_]:
    bound = _SAME_LOGP if diff.bounds.unit <= FP32_UNIT else _SAME_LOGP_LOW
    return np.isclose(values, wanted, rtol=bound, atol=bound)


def _of_worst(
    facts: SequenceFacts, values: NDArray[np.float64], wanted: NDArray[np.float64], wrong: NDArray[np.bool_]
) -> str:
    """Format the evidence of values that differ: the worst, and how many do."""
    worst = int(np.argmax(np.abs(values - wanted)))
    pair = f"{_name(facts, worst)}: {values[worst]:.6g}, baseline {wanted[worst]:.6g}"
    return f"{pair}; {int(wrong.sum())} of {len(facts)} completions"


def _name(facts: SequenceFacts, place: int) -> str:
    return f"{_SIDES[facts.sides[place]]} completion {facts.pieces[place]}"


def _names(facts: SequenceFacts, wrong: NDArray[np.bool_]) -> list[str]:
    return [_name(facts, int(place)) for place in np.flatnonzero(wrong)]
