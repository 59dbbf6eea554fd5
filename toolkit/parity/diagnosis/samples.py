"""Samples: rules that compare with the baseline's samples one by one: how much each counts, and its labels."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from toolkit.parity.diagnosis.cause import Diagnosis, diagnosis
from toolkit.parity.first_batch import nearest, sampled, sums_of
from toolkit.parity.parity_run import ParityRun, Tensors
from toolkit.parity.result import ParityResult
from toolkit.units import some

_PRINTED = 1e-5
"""Relative bound within which a loss counts as the one that a mistake would give."""
_EXPLAINED = 1e-4
"""Share of a gradient that a weighted sum of samples' gradients may leave unexplained."""
_SAME_WEIGHT = 0.02


def token_weighting(diff: ParityResult) -> Diagnosis | None:
    """Detect a loss that is the mean of equally weighted means while these have different numbers of target tokens."""
    if diff.loss_is_right or not diff.baseline.micro_losses:
        return None
    losses, targets = np.array(diff.baseline.micro_losses, dtype=np.float64).T
    means = {name: _mean_of_means(losses, targets, group) for name, group in diff.split.groups.items()}
    reported = diff.run.curve.losses[0]
    right = diff.baseline.curve.losses[0]
    match = nearest(reported, means, right, within=_PRINTED)
    if match is None:
        return None
    parts, unweighted = match
    return diagnosis("unweighted loss", parts=parts, reported=reported, unweighted=unweighted, right=right)


def labels(diff: ParityResult) -> Diagnosis | None:
    """Detect a loss that right logits give with other labels."""
    batch = diff.baseline.first_batch
    parts = diff.baseline.micro_losses
    if diff.loss_is_right or not batch.relabeled or diff.first_wrong_output is not None:
        return None
    targets = sum(count for _, count in parts)
    candidates: dict[str, float] = {}
    for name, rows in batch.relabeled.items():
        loss, count = rows.sum(axis=0)
        candidates[name] = float(loss / targets)
        candidates[f"{name} (and their number is another)"] = float(loss / max(1.0, count))
    if batch.crossed is not None:
        for name, order in diff.split.reordered().items():
            candidates[name] = float(batch.crossed[np.arange(len(order)), order].sum() / targets)
    reported = diff.run.curve.losses[0]
    right = diff.baseline.curve.losses[0]
    match = nearest(reported, candidates, right, within=_PRINTED)
    if match is None:
        return None
    name, wrong = match
    return diagnosis("labels", name=name, reported=reported, wrong=wrong, right=right)


def sample_weights(diff: ParityResult) -> Diagnosis | None:
    """Detect a gradient that is a sum of the right samples' gradients in which they count unequally."""
    weights = weights_of_samples(diff)
    if weights is None:
        return None
    is_right = np.abs(weights - 1) <= _SAME_WEIGHT
    if is_right.all() or np.ptp(weights) <= _SAME_WEIGHT * np.abs(weights).max():
        return None  # right, or one factor for all
    targets = np.array([count for _, count in diff.baseline.micro_losses], dtype=np.float64)
    evidence = f"samples count {weights.min():.3f} to {weights.max():.3f} times"
    for parts, group in diff.split.groups.items():
        sizes = sums_of(targets, group)
        if _are_close(weights, (targets.sum() / len(sizes) / sizes)[group]):
            return diagnosis(
                "unweighted gradient",
                parts=parts,
                fewest=int(sizes.min()),
                most=int(sizes.max()),
                loss="the reported loss is right" if diff.loss_is_right else "the reported loss is off too",
                evidence=evidence,
            )
    shares = _shares(weights, diff.split.ranks)
    if shares is not None:
        return diagnosis("weights of ranks", shares=_listed("data-parallel rank", shares, first=0), evidence=evidence)
    shares = _shares(weights, diff.split.rounds)
    if shares is not None:
        return diagnosis("weights of micro-batches", shares=_listed("micro-batch", shares, first=1), evidence=evidence)
    wrong = [f"sample {place + 1} {_times(weights[place])}" for place in np.flatnonzero(~is_right)]
    return diagnosis("weights of samples", shares=some(wrong), evidence=evidence)


def weight_gradients(diff: ParityResult) -> Diagnosis | None:
    """Detect micro-batches whose gradients of linear layers' weights, and those alone, are lost or counted again.

    A schedule that splits the backward pass computes them in a pass of their own.
    """
    names = diff.wrong_gradients
    in_layers = [name for name in names if not diff.is_table(name)]
    if not diff.loss_is_right or len(in_layers) < 2 or any(diff.is_vector(name) for name in names):
        return None
    weights = weights_of_samples(diff, in_layers)
    if weights is None or np.ptp(weights) <= _SAME_WEIGHT * np.abs(weights).max():
        return None
    shares = _shares(weights, diff.split.rounds)
    if shares is None:
        return None
    return diagnosis(
        "weight gradients",
        kinds=some(diff.kinds(in_layers)),
        shares=_listed("micro-batch", shares, first=1),
        evidence=f"samples count {weights.min():.3f} to {weights.max():.3f} times in {len(in_layers)} weights",
    )


def is_sum_of_samples(baseline: ParityRun) -> bool:
    """Whether the baseline's gradient is the sum of its samples' gradients: not with an auxiliary loss or dropout."""
    terms = _terms(baseline)
    return terms is not None and _explains(_elements(baseline.first_gradients, baseline), terms.sum(axis=0))


def weights_of_samples(diff: ParityResult, names: Collection[str] = ()) -> NDArray[np.float64] | None:
    """Return how often each sample counts in the run's gradient, by least squares; None where that is no such sum.

    `names`: parameters; empty: all.
    """
    terms = _terms(diff.baseline, names)
    if terms is None or diff.run.first_gradients.keys() != diff.baseline.first_gradients.keys():
        return None
    gradient = _elements(diff.run.first_gradients, diff.baseline, names)
    if not np.isfinite(gradient).all() or not is_sum_of_samples(diff.baseline):
        return None
    weights = np.asarray(np.linalg.lstsq(terms.T, gradient, rcond=None)[0], dtype=np.float64)
    return weights if _explains(gradient, weights @ terms) else None


def _terms(baseline: ParityRun, names: Collection[str] = ()) -> NDArray[np.float64] | None:
    """What each sample adds to the gradient, [samples, elements]; None where elements are too few to tell.

    `names`: parameters; empty: all.
    """
    rows = baseline.first_batch.gradients
    targets = sum(count for _, count in baseline.micro_losses)
    if not rows or rows.keys() != baseline.first_gradients.keys():
        return None
    chosen = [row for name, row in rows.items() if not names or name in names]
    terms: NDArray[np.float64] = np.concatenate(chosen, axis=1) / targets
    return terms if terms.shape[1] >= 4 * terms.shape[0] else None


def _elements(tensors: Tensors, baseline: ParityRun, names: Collection[str] = ()) -> NDArray[np.float64]:
    rows = baseline.first_batch.gradients
    return np.concatenate([sampled(tensors[name]) for name in rows if not names or name in names])


def _explains(gradient: NDArray[np.float64], fitted: NDArray[np.float64]) -> bool:
    return bool(np.linalg.norm(gradient - fitted) <= _EXPLAINED * np.linalg.norm(gradient))


def _are_close(weights: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
    return bool((np.abs(weights - wanted) <= _SAME_WEIGHT * np.maximum(1.0, np.abs(wanted))).all())


def _shares(weights: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Return the weight that all samples of each group have; None if they differ within one, or there is one group."""
    means = sums_of(weights, groups) / sums_of(np.ones_like(weights), groups)
    return means if len(means) > 1 and _are_close(weights, means[groups]) else None


def _listed(noun: str, shares: NDArray[np.float64], *, first: int) -> str:
    return some([f"{noun} {place} {_times(share)}" for place, share in enumerate(shares, start=first)])


def _times(weight: float) -> str:
    if abs(weight) <= _SAME_WEIGHT:
        return "does not count"
    return "counts once" if abs(weight - 1) <= _SAME_WEIGHT else f"counts {weight:.3g} times"


def _mean_of_means(losses: NDArray[np.float64], targets: NDArray[np.float64], group: NDArray[np.int64]) -> float:
    return float(np.mean(sums_of(losses, group) / np.maximum(1.0, sums_of(targets, group))))
