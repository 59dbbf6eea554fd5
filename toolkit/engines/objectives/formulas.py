"""Objectives of preference tuning: sums of token log-probabilities -> losses, their slopes, metrics.

Each offline objective is a function of the log-probabilities of whole completions, which are sums over their tokens:
s_w = log π(y_w | x) of a chosen completion and s_l = log π(y_l | x) of a rejected one, and the same of the reference,
r_w and r_l. So the gradient by the log-probability of one token is the slope of the loss by the sum of its completion,
the same for all its tokens: ∂L/∂log π(y_t) = ∂L/∂s. That slope, with the opposite sign, is the weight of the token in
the token loss that every engine computes (`token_weights.py`). The slopes here are in closed form.

    sft     L = -s_w · n / Σ|y_w|                                   mean over the chosen tokens of the global batch
    dpo     h = β (s_w - r_w - s_l + r_l);  L = -(1-ε) log σ(h) - ε log σ(-h)
    robust  L = [-(1-ε) log σ(h) + ε log σ(-h)] / (1 - 2ε)
    hinge   L = max(0, 1 - h)
    ipo     L = [(s_w - r_w)/|y_w| - (s_l - r_l)/|y_l| - 1/(2β)]²
    orpo    a = s/|y|;  z = a_w - a_l - log(1-e^a_w) + log(1-e^a_l);  L = sft - β log σ(z)
    simpo   h = β (a_w - a_l) - γ;  L = -(1-ε) log σ(h) - ε log σ(-h) + α sft
    cpo     h = β (s_w - s_l);      L = -(1-ε) log σ(h) - ε log σ(-h) + α sft
    kto     u = β (s - r - z₀), desirable: L = λ_D (1 - σ(u)), else L = λ_U (1 - σ(-u))
    bco     u = β (s - r) - δ,  desirable: L = -log σ(u),      else L = -log σ(-u)

Dims: n pairs or completions; the second dim of a [n, 2] is (chosen, rejected), of kto (completion, mismatched one).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from toolkit.config.objective_section import ObjectiveName, ObjectiveSection


@dataclass(frozen=True, kw_only=True)
class SequenceSums:
    """What an objective is a function of, in fp64."""

    policy: torch.Tensor
    """Sums of the token log-probabilities of the policy in nats, [n, 2]."""
    reference: torch.Tensor
    """Sums of the token log-probabilities of the reference model, [n, 2]; zeros without one."""
    tokens: torch.Tensor
    """Target tokens of each sequence, [n, 2]."""
    is_desirable: torch.Tensor
    """Whether a completion is desirable, bool [n]; of pairs without meaning."""
    chosen_token_share: float
    """Pairs over chosen target tokens, both of the global batch: what turns -s_w into a mean over tokens."""
    shift: float = 0.0
    """What rewards are compared with, of the global batch: z₀ in nats for kto, δ for bco."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveValue:
    """The value of an objective, whose mean over pairs or completions of the global batch is the loss of a step."""

    loss: torch.Tensor
    """The loss of each pair or completion, [n]."""
    slopes: torch.Tensor
    """Derivatives of `loss` by the policy's sums, [n, 2]."""
    rewards: torch.Tensor
    """Rewards of both sequences, [n, 2]; of kto and bco, the first is that of the completion."""
    logps: torch.Tensor
    """Log-probabilities as the objective takes them, sums or means over tokens, [n, 2]."""


Formula = Callable[[SequenceSums, ObjectiveSection], ObjectiveValue]


def sft(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return the token loss of the chosen completions, as a mean over the chosen tokens of the global batch."""
    del section
    loss = -sums.chosen_token_share * sums.policy[:, 0]
    slopes = torch.zeros_like(sums.policy)
    slopes[:, 0] = -sums.chosen_token_share
    return ObjectiveValue(loss=loss, slopes=slopes, rewards=sums.policy, logps=sums.policy)


def dpo(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return Direct Preference Optimization's loss (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    `label_smoothing` makes it conservative DPO (Mitchell, A note on DPO with noisy preferences, 2023).
    """
    rewards = section.beta * (sums.policy - sums.reference)
    loss, slope = _smoothed_logistic(rewards[:, 0] - rewards[:, 1], section.label_smoothing)
    return ObjectiveValue(loss=loss, slopes=_opposite(section.beta * slope), rewards=rewards, logps=sums.policy)


def robust(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return robust DPO's loss, which is unbiased under flipped labels (Ray Chowdhury et al. 2024, arXiv 2403.00409,
    eq. 12)."""
    rewards = section.beta * (sums.policy - sums.reference)
    margin = rewards[:, 0] - rewards[:, 1]
    flipped = section.label_smoothing
    scale = 1.0 / (1.0 - 2.0 * flipped)
    loss = scale * (flipped * F.logsigmoid(-margin) - (1.0 - flipped) * F.logsigmoid(margin))
    slope = -scale * (flipped * torch.sigmoid(margin) + (1.0 - flipped) * torch.sigmoid(-margin))
    return ObjectiveValue(loss=loss, slopes=_opposite(section.beta * slope), rewards=rewards, logps=sums.policy)


def hinge(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return the hinge loss on DPO's margin (SLiC, Zhao et al. 2023, arXiv 2305.10425, eq. 1)."""
    rewards = section.beta * (sums.policy - sums.reference)
    missing = 1.0 - (rewards[:, 0] - rewards[:, 1])
    slope = -(missing > 0).to(missing.dtype)
    return ObjectiveValue(
        loss=missing.clamp(min=0.0), slopes=_opposite(section.beta * slope), rewards=rewards, logps=sums.policy
    )


def ipo(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return Identity Preference Optimization's loss (Azar et al. 2023, arXiv 2310.12036, eq. 17, where β is τ).

    Log-ratios are means over tokens, as in TRL, whose authors had that from those of the paper.
    """
    ratios = (sums.policy - sums.reference) / sums.tokens
    distance = ratios[:, 0] - ratios[:, 1] - 1.0 / (2.0 * section.beta)
    slopes = _opposite(2.0 * distance) / sums.tokens
    rewards = section.beta * (sums.policy - sums.reference)
    return ObjectiveValue(loss=distance.square(), slopes=slopes, rewards=rewards, logps=sums.policy)


def orpo(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return Odds Ratio Preference Optimization's loss (Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7, where β is λ).

    The derivative of the log odds a - log(1 - e^a) by a is 1 / (1 - e^a).
    """
    means = sums.policy / sums.tokens
    improbable = -torch.expm1(means)  # 1 - e^a
    log_odds = means - improbable.log()
    ratio = log_odds[:, 0] - log_odds[:, 1]
    token_loss = sft(sums, section)
    slope = -section.beta * torch.sigmoid(-ratio)
    slopes = _opposite(slope) / (improbable * sums.tokens) + token_loss.slopes
    loss = token_loss.loss - section.beta * F.logsigmoid(ratio)
    return ObjectiveValue(loss=loss, slopes=slopes, rewards=section.beta * means, logps=means)


def simpo(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return Simple Preference Optimization's loss (Meng et al. 2024, arXiv 2405.14734, eq. 6)."""
    means = sums.policy / sums.tokens
    rewards = section.beta * means
    loss, slope = _smoothed_logistic(rewards[:, 0] - rewards[:, 1] - section.gamma, section.label_smoothing)
    token_loss = sft(sums, section)
    return ObjectiveValue(
        loss=loss + section.chosen_nll_weight * token_loss.loss,
        slopes=_opposite(section.beta * slope) / sums.tokens + section.chosen_nll_weight * token_loss.slopes,
        rewards=rewards,
        logps=means,
    )


def cpo(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return Contrastive Preference Optimization's loss (Xu et al. 2024, arXiv 2401.08417, eq. 5 to 7)."""
    rewards = section.beta * sums.policy
    loss, slope = _smoothed_logistic(rewards[:, 0] - rewards[:, 1], section.label_smoothing)
    token_loss = sft(sums, section)
    return ObjectiveValue(
        loss=loss + section.chosen_nll_weight * token_loss.loss,
        slopes=_opposite(section.beta * slope) + section.chosen_nll_weight * token_loss.slopes,
        rewards=rewards,
        logps=sums.policy,
    )


def kto(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return Kahneman-Tversky Optimization's loss (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7 and 8).

    The reference point z₀ is `shift`: no gradient runs through it, and the mismatched completions have slopes of zero.
    """
    rewards = section.beta * (sums.policy - sums.reference)
    sign = _signs(sums)
    utility = sign * (rewards[:, 0] - section.beta * sums.shift)
    desirable_weight = torch.full_like(utility, section.desirable_weight)
    undesirable_weight = torch.full_like(utility, section.undesirable_weight)
    weight = torch.where(sums.is_desirable, desirable_weight, undesirable_weight)
    value = torch.sigmoid(utility)
    slopes = torch.zeros_like(sums.policy)
    slopes[:, 0] = -weight * sign * section.beta * value * (1.0 - value)
    return ObjectiveValue(loss=weight * (1.0 - value), slopes=slopes, rewards=rewards, logps=sums.policy)


def bco(sums: SequenceSums, section: ObjectiveSection) -> ObjectiveValue:
    """Return Binary Classifier Optimization's loss (Jung et al. 2024, arXiv 2404.04656, eq. 9).

    The shift δ is the mean of all rewards of the run so far, as TRL takes it; no gradient runs through it.
    """
    rewards = section.beta * (sums.policy - sums.reference)
    sign = _signs(sums)
    utility = sign * (rewards[:, 0] - sums.shift)
    slopes = torch.zeros_like(sums.policy)
    slopes[:, 0] = -section.beta * sign * torch.sigmoid(-utility)
    return ObjectiveValue(loss=-F.logsigmoid(utility), slopes=slopes, rewards=rewards, logps=sums.policy)


FORMULAS: dict[ObjectiveName, Formula] = {
    "sft": sft,
    "dpo": dpo,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "orpo": orpo,
    "simpo": simpo,
    "cpo": cpo,
    "kto": kto,
    "bco": bco,
}


def _smoothed_logistic(margin: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -(1-ε) log σ(h) - ε log σ(-h) of margins h [n], and its derivative by h."""
    loss = -(1.0 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    slope = smoothing * torch.sigmoid(margin) - (1.0 - smoothing) * torch.sigmoid(-margin)
    return loss, slope


def _opposite(slope: torch.Tensor) -> torch.Tensor:
    """Return slopes by both sums [n, 2] of a function of their difference, whose derivative is `slope` [n]."""
    return torch.stack([slope, -slope], dim=-1)


def _signs(sums: SequenceSums) -> torch.Tensor:
    """Return 1 for desirable completions and -1 for others, [n]."""
    return 2.0 * sums.is_desirable.to(sums.policy.dtype) - 1.0
