"""The losses of TRL as functions of sums of log-probabilities, for autograd: without slopes of their own."""

import torch
import torch.nn.functional as F

from toolkit.config.objective_section import ObjectiveSection
from toolkit.engines.objectives.formulas import SequenceSums


def trl_loss(section: ObjectiveSection, sums: SequenceSums) -> torch.Tensor:
    """The expressions of TRL 1.16, and for bco of 0.24, which was the last with it."""
    beta = section.beta
    smoothing = section.label_smoothing
    chosen, rejected = sums.policy.unbind(dim=1)
    chosen_score, rejected_score = (sums.policy - sums.reference).unbind(dim=1)
    chosen_mean, rejected_mean = (sums.policy / sums.tokens).unbind(dim=1)
    delta = chosen_score - rejected_score
    token_loss = -sums.chosen_token_share * chosen
    match section.name:
        case "sft":
            return token_loss
        case "dpo":
            return -F.logsigmoid(beta * delta) * (1 - smoothing) - F.logsigmoid(-beta * delta) * smoothing
        case "robust":
            clean = -(1 - smoothing) * F.logsigmoid(beta * delta)
            flipped = -smoothing * F.logsigmoid(-beta * delta)
            return (clean - flipped) / (1 - 2 * smoothing)
        case "hinge":
            return torch.relu(1 - beta * delta)
        case "ipo":
            lengths = sums.tokens.clamp(min=1.0)
            return (chosen_score / lengths[:, 0] - rejected_score / lengths[:, 1] - 1 / (2 * beta)) ** 2
        case "orpo":

            def log1mexp(x: torch.Tensor) -> torch.Tensor:
                return torch.log1p(-torch.exp(x))

            log_odds = (chosen_mean - rejected_mean) - (log1mexp(chosen_mean) - log1mexp(rejected_mean))
            return token_loss - beta * F.logsigmoid(log_odds)
        case "simpo":
            logits = chosen_mean - rejected_mean - section.gamma / beta
            loss = -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
            return loss + (section.nll_weight or 0.0) * token_loss
        case "cpo":
            logits = chosen - rejected
            loss = -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
            return loss + (1.0 if section.nll_weight is None else section.nll_weight) * token_loss
        case "kto":
            desirable = section.desirable_weight * (1 - F.sigmoid(beta * (chosen_score - sums.shift)))
            other = section.undesirable_weight * (1 - F.sigmoid(beta * (sums.shift - chosen_score)))
            return torch.where(sums.is_desirable, desirable, other)
        case "bco":
            desirable = -F.logsigmoid(beta * chosen_score - sums.shift)
            other = -F.logsigmoid(-(beta * chosen_score - sums.shift))
            return torch.where(sums.is_desirable, desirable, other)
