"""Objectives of preference tuning: values against TRL's expressions and its own code, slopes against autograd."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl_losses import trl_loss

from toolkit.config.objective_section import ObjectiveName, ObjectiveSection
from toolkit.engines.objectives.formulas import FORMULAS, ObjectiveValue, SequenceSums

SHARE = 5 / 83
SHIFT = 0.7
CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "dpo-smoothed": {"beta": 0.3, "label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.2},
    "hinge": {"beta": 0.2},
    "ipo": {"beta": 0.5},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "simpo-smoothed": {"beta": 2.5, "label_smoothing": 0.1, "nll_weight": 0.5},
    "cpo": {},
    "cpo-smoothed": {"beta": 0.2, "label_smoothing": 0.3, "nll_weight": 0.2},
    "kto": {"desirable_weight": 1.3, "undesirable_weight": 0.6},
    "bco": {"beta": 0.25},
}


def section_of(case: str) -> ObjectiveSection:
    name: ObjectiveName = case.partition("-")[0]  # type: ignore[assignment]
    return ObjectiveSection(name=name, **CASES[case])


def made_sums(seed: int = 0, pairs: int = 64) -> SequenceSums:
    """Sums of completions of 1 to 40 tokens, whose mean log-probabilities are between -4 and -0.01."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 41, (pairs, 2), generator=generator).double()
    means = -0.01 - 3.99 * torch.rand((pairs, 2), generator=generator, dtype=torch.float64)
    policy = means * tokens
    reference = policy + 4.0 * torch.randn((pairs, 2), generator=generator, dtype=torch.float64)
    return SequenceSums(
        policy=policy,
        reference=reference,
        tokens=tokens,
        is_desirable=torch.rand(pairs, generator=generator) < 0.4,
        chosen_token_share=SHARE,
        shift=SHIFT,
    )


def value_of(case: str, sums: SequenceSums) -> ObjectiveValue:
    section = section_of(case)
    return FORMULAS[section.name](sums, section)


def test_every_objective_has_a_case() -> None:
    assert {case.partition("-")[0] for case in CASES} == FORMULAS.keys()


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(case: str) -> None:
    sums = made_sums()
    torch.testing.assert_close(value_of(case, sums).loss, trl_loss(section_of(case), sums), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_slopes_are_the_derivatives_of_trl_losses(case: str) -> None:
    sums = made_sums(seed=1)
    policy = sums.policy.clone().requires_grad_()
    (expected,) = torch.autograd.grad(trl_loss(section_of(case), replace(sums, policy=policy)).sum(), policy)
    slopes = value_of(case, sums).slopes
    torch.testing.assert_close(slopes, expected, rtol=1e-11, atol=1e-13)
    assert slopes.abs().max() > 0


@pytest.mark.parametrize("case", CASES)
def test_losses_stay_finite_for_extreme_margins(case: str) -> None:
    sums = made_sums(seed=2, pairs=4)
    far = replace(sums, reference=sums.policy + 1e4 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 2))
    value = value_of(case, far)
    assert value.loss.isfinite().all()
    assert value.slopes.isfinite().all()


@pytest.mark.parametrize("case", ["dpo", "hinge", "orpo", "simpo", "cpo"])
def test_a_larger_chosen_probability_never_raises_the_loss(case: str) -> None:
    slopes = value_of(case, made_sums(seed=3)).slopes
    assert (slopes[:, 0] <= 0).all()
    assert (slopes[:, 1] >= 0).all()


def _trl_cpo(case: str) -> Callable[[SequenceSums], torch.Tensor]:
    from trl.experimental.cpo import CPOTrainer

    section = section_of(case)
    settings = SimpleNamespace(
        alpha=0.0,
        beta=section.beta,
        label_smoothing=section.label_smoothing,
        simpo_gamma=section.gamma,
        loss_type="simpo" if section.name == "simpo" else "sigmoid",
        accelerator=SimpleNamespace(device="cpu"),
    )

    def loss(sums: SequenceSums) -> torch.Tensor:
        logps = sums.policy / sums.tokens if section.name == "simpo" else sums.policy
        preference: torch.Tensor = CPOTrainer.cpo_loss(settings, logps[:, 0], logps[:, 1])[0]
        return preference - section.chosen_nll_weight * SHARE * sums.policy[:, 0]

    return loss


def _trl_orpo(case: str) -> Callable[[SequenceSums], torch.Tensor]:
    from trl.experimental.orpo import ORPOTrainer

    section = section_of(case)
    settings = SimpleNamespace(beta=section.beta, accelerator=SimpleNamespace(device="cpu"))

    def loss(sums: SequenceSums) -> torch.Tensor:
        means = sums.policy / sums.tokens
        ratio: torch.Tensor = ORPOTrainer.odds_ratio_loss(settings, means[:, 0], means[:, 1])[0]
        return -SHARE * sums.policy[:, 0] - ratio

    return loss


@pytest.mark.parametrize("case", ["simpo", "simpo-smoothed", "cpo", "cpo-smoothed", "orpo"])
def test_losses_are_those_that_trl_computes(case: str) -> None:
    sums = made_sums(seed=4)
    loss = _trl_orpo(case) if case == "orpo" else _trl_cpo(case)
    value = value_of(case, sums)
    tolerance = 1e-6 if case == "orpo" else 1e-12  # TRL computes odds in fp32
    torch.testing.assert_close(value.loss, loss(sums).double(), rtol=tolerance, atol=tolerance)


def test_weights_of_kto_scale_the_two_kinds_of_completions() -> None:
    sums = made_sums(seed=5)
    plain = FORMULAS["kto"](sums, ObjectiveSection(name="kto"))
    weighted = FORMULAS["kto"](sums, ObjectiveSection(name="kto", desirable_weight=2.0, undesirable_weight=0.0))
    torch.testing.assert_close(weighted.loss[sums.is_desirable], 2.0 * plain.loss[sums.is_desirable])
    assert not weighted.loss[~sums.is_desirable].any()
    assert not weighted.slopes[~sums.is_desirable].any()


def test_dpo_of_the_reference_itself_is_the_logarithm_of_two() -> None:
    sums = made_sums(seed=6)
    value = FORMULAS["dpo"](replace(sums, reference=sums.policy), ObjectiveSection(name="dpo"))
    torch.testing.assert_close(value.loss, torch.full_like(value.loss, math.log(2)))
    assert not value.rewards.any()
