"""ObjectiveSection: what a run minimizes, where that is not the token loss of its text."""

from typing import Annotated, Literal

from pydantic import Field

from toolkit.config.section import Section, Text

ObjectiveName = Literal["sft", "dpo", "ipo", "hinge", "robust", "orpo", "simpo", "cpo", "kto", "bco"]
PAIRED: tuple[ObjectiveName, ...] = ("sft", "dpo", "ipo", "hinge", "robust", "orpo", "simpo", "cpo")
"""Objectives of pairs of a chosen and a rejected completion."""
UNPAIRED: tuple[ObjectiveName, ...] = ("kto", "bco")
"""Objectives of completions, each of which is desirable or not."""
NEED_REFERENCE: tuple[ObjectiveName, ...] = ("dpo", "ipo", "hinge", "robust", "kto", "bco")
"""Objectives that compare the policy with a reference model."""
OBJECTIVE_FIELDS: dict[ObjectiveName, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("beta", "label_smoothing", "reference"),
    "ipo": ("beta", "reference"),
    "hinge": ("beta", "reference"),
    "robust": ("beta", "label_smoothing", "reference"),
    "orpo": ("beta",),
    "simpo": ("beta", "gamma", "label_smoothing", "nll_weight"),
    "cpo": ("beta", "label_smoothing", "nll_weight"),
    "kto": ("beta", "desirable_weight", "undesirable_weight", "reference"),
    "bco": ("beta", "reference"),
}
"""The fields that each objective reads."""

Weight = Annotated[float, Field(ge=0)]


class ObjectiveSection(Section):
    """The objective, with the names and meanings of TRL (docs/preference.md)."""

    name: ObjectiveName = "sft"
    """`sft`: the token loss; of pairs, that of the chosen completions. `dpo`, `ipo`, `hinge`, `robust`, `orpo`, `simpo`
    and `cpo` need `data.format: preference`; `kto` and `bco` need `data.format: unpaired`."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the penalty for leaving the reference; of `orpo` the weight of the odds ratio, of `ipo` τ."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose preference is taken to be wrong (dpo, robust, simpo, cpo); above 0 for `robust`."""
    gamma: Weight = 0.5
    """Target margin of the rewards (simpo)."""
    nll_weight: Weight | None = None
    """Weight of the token loss of the chosen completions (cpo, simpo), TRL's `cpo_alpha`; null: 1 for cpo, 0 for
    simpo."""
    desirable_weight: Weight = 1.0
    """Weight of the losses of desirable completions (kto)."""
    undesirable_weight: Weight = 1.0
    """Weight of the losses of other completions (kto)."""
    reference: Text = "initial"
    """The reference model. `initial`: the model before its first step, and with LoRA the one without adapters; its
    log-probabilities are computed once, before training, and cached. The directory or hub name of a model of the same
    architecture: those of that one. `online`: as `initial`, but computed in each step by a frozen copy of the weights
    that train. `none`: none, its log-probabilities are taken as 0 (dpo, ipo, hinge, robust)."""

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of a reference model are computed."""
        return self.name in NEED_REFERENCE and self.reference != "none"

    @property
    def chosen_nll_weight(self) -> float:
        """Weight of the token loss of the chosen completions beside the preference loss."""
        if self.name in ("sft", "orpo"):
            return 1.0
        if self.nll_weight is not None:
            return self.nll_weight
        return 1.0 if self.name == "cpo" else 0.0
