"""Rules for what comes before any gradient: samples, starting weights, and the forward pass of the first step."""

import math

import numpy as np

from toolkit.parity.compare import whole_difference
from toolkit.parity.diagnosis.case import Case
from toolkit.parity.diagnosis.cause import Cause, Diagnosis, some
from toolkit.parity.tolerance import relative

_PRINTED = 1e-5
"""Relative, within which a loss is taken for the one that a mistake would give."""


def samples(case: Case) -> Diagnosis | None:
    """Other samples than the baseline's, by the hash of each batch."""
    step = case.other_samples_from
    if step is None:
        return None
    own, other = case.trial.batches[step - 1], case.baseline.batches[step - 1]
    if "!=" in own:
        sentence = f"ranks that share a model read different samples in step {step}: all of them must read the same."
    else:
        sentence = (
            f"the samples of step {step} are not the baseline's: another order, seed, split or share of the data."
        )
    return Diagnosis(cause=Cause.DATA_ORDER, sentence=sentence, evidence=f"batch {own}, baseline {other}")


def starting_weights(case: Case) -> Diagnosis | None:
    """Weights that differ before the first step, from the baseline's or between ranks."""
    torn = sorted(case.trial.torn_at_start)
    if torn:
        return Diagnosis(
            cause=Cause.STARTING_WEIGHTS,
            sentence=f"ranks that should hold the same weights start with different ones: {some(torn)}.",
        )
    other = [
        name
        for name, value in case.baseline.initial.items()
        if name not in case.trial.initial
        or case.trial.initial[name].shape != value.shape
        or not np.allclose(case.trial.initial[name], value, rtol=4 * case.bounds.unit, atol=0)
    ]
    if not other:
        return None
    gap = whole_difference(case.trial.initial, case.baseline.initial)
    return Diagnosis(
        cause=Cause.STARTING_WEIGHTS,
        sentence=f"training starts from other weights: {some(other)}. Look at the seed and at what was loaded.",
        evidence=f"{len(other)} of {len(case.baseline.initial)} parameters, relative difference {gap:.1e}",
    )


def number_of_updates(case: Case) -> Diagnosis | None:
    """More or fewer updates than global batches."""
    updates, steps = len(case.trial.learning_rates), len(case.trial.curve)
    if not updates or updates == steps:
        return None
    return Diagnosis(
        cause=Cause.BATCH_SIZE,
        sentence=f"the engine makes {updates} updates of {steps} global batches: micro-batch, accumulation and the "
        "number of replicas do not multiply to the global batch that it was given.",
    )


def not_finite(case: Case) -> Diagnosis | None:
    """A loss or a norm that is NaN or infinite where the baseline's is not."""
    own, other = case.trial.curve, case.baseline.curve
    for step in range(min(len(own), len(other))):
        for name, number, wanted in (
            ("loss", own.losses[step], other.losses[step]),
            ("gradient norm", own.grad_norms[step], other.grad_norms[step]),
        ):
            if math.isfinite(number) or not math.isfinite(wanted):
                continue
            weights = case.trial.parameters
            lost = [key for key, value in weights.items() if not np.isfinite(value).all()]
            after, count = "", f"; {len(lost)} of {len(weights)} parameters not finite" if weights else ""
            if lost:
                after = f" The update was applied: {some(lost)} are not finite any more."
            elif weights:  # a finished run keeps none
                after = " The update was left out: the weights are finite."
            return Diagnosis(
                cause=Cause.NOT_FINITE,
                sentence=f"the {name} of step {step + 1} is {number} and the baseline's is not.{after} Look at "
                "divisions by a number of targets that may be zero, and at masked rows without any entry.",
                evidence=f"baseline {wanted:.6f}{count}",
            )
    return None


def token_weighting(case: Case) -> Diagnosis | None:
    """The loss is that of equally weighted micro-batches, which have different numbers of targets."""
    parts = case.micro_batches
    if not parts or case.loss_is_right:
        return None
    reported, right = case.trial.curve.losses[0], case.baseline.curve.losses[0]
    unweighted = sum(loss / max(1, targets) for loss, targets in parts) / len(parts)
    if relative(reported, unweighted) > _PRINTED or relative(unweighted, right) < _PRINTED:
        return None
    return Diagnosis(
        cause=Cause.TOKEN_WEIGHTING,
        sentence="the loss is the mean of the micro-batches' mean losses, so that micro-batches with few target tokens "
        "weigh as much as full ones. Divide the sum of all token losses by the number of all target tokens.",
        evidence=f"reported {reported:.6f}, unweighted {unweighted:.6f}, token-weighted {right:.6f}",
    )


def forward_pass(case: Case) -> Diagnosis | None:
    """The first step's loss differs: which layer's output is the first that does?"""
    if case.loss_is_right:
        return None
    gap = f"loss of step 1: {case.trial.curve.losses[0]:.6f}, baseline {case.baseline.curve.losses[0]:.6f}"
    names = list(case.baseline.outputs)
    if not names or not case.trial.outputs:
        return Diagnosis(
            cause=Cause.FORWARD, sentence="the forward pass of the first step computes something else.", evidence=gap
        )
    gaps = {name: relative(case.trial.outputs.get(name, math.nan), case.baseline.outputs[name]) for name in names}
    first = next((name for name in names if not gaps[name] <= case.bounds.output), None)
    if first is None:
        return Diagnosis(
            cause=Cause.FORWARD,
            sentence="every decoder layer returns what the baseline's does, and the loss differs: look at the final "
            "norm, the head, the softmax over the vocabulary and the number of target tokens.",
            evidence=gap,
        )
    evidence = f"{first}: relative difference {gaps[first]:.1e}; {gap}"
    if first == names[0]:
        sentence = (
            "what enters the first layer differs already: the embedding is cut wrongly, or its parts are not added up."
        )
    else:
        before = "the embeddings agree" if first == names[1] else f"{names[names.index(first) - 1]} agrees"
        sentence = (
            f"{first} returns something else, while {before}: a wrong slice of a weight in this layer, a missing sum "
            "over ranks, or an input that it is not given."
        )
    return Diagnosis(cause=Cause.SLICE, sentence=sentence, evidence=evidence)
