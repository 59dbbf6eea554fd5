"""Cells of the regression matrix whose model is a mixture of experts.

A router's choice is discrete. Where two experts are nearly equal, the rounding of any other order of summation may
choose the other one, and the runs part. So a long run takes the first seed with which no choice of its baseline, the
plain process, is that close in any step.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matrix import LONG_STEPS, STEPS, VOCABULARY, Cell, Mathematics, Text
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig
from typing_extensions import override

from toolkit.config.recipe import ModelSection, Recipe, RouterAuxLossSection
from toolkit.parallel.tiny_model import tiny_config

_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
_SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCABULARY}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    # Experts of all tokens beside the others, behind a gate.
    "qwen2_moe": {},
    "olmoe": {},
    # Transposed, gate and up interleaved, biases.
    "gpt_oss": {"attn_implementation": "eager"},
    # The first layer has none; groups of experts, and a bias that balances them.
    "deepseek_v3": {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "granitemoe": {},
}
LEAST_MARGIN = 2**-22
"""Of a choice, between the last score that is taken and the first that is not: what a loss may differ by. Probabilities
differ by about a tenth of it."""
WIDE = 0.1
"""Standard deviation of the weights of long runs. With the usual 0.02 all experts of a tiny model are nearly equal, and
no seed has the margin; with this every second or third has it."""


class Margins(TorchFunctionMode):
    """Inside, notes how close the closest choice of `topk` is."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest = float("inf")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.topk, torch.Tensor.topk):
            taken = found.values.shape[-1]
            scores = args[0].detach()
            if taken < scores.shape[-1]:
                first, second = scores.topk(taken + 1, dim=-1).values[..., -2:].unbind(-1)
                self.smallest = min(self.smallest, float((first - second).min()))
        return found


@dataclass(frozen=True, kw_only=True)
class MixtureMathematics(Mathematics):
    """Of a cell whose family is a key of MIXTURES."""

    @override
    def recipe(self, text: Text, *, steps: int) -> Recipe:
        recipe = replace(self, family="llama").as_dense().recipe(text, steps=steps)
        options = dict(MIXTURES[self.family])
        attention = options.pop("attn_implementation", None)
        if self.needs_margins(steps):
            options["initializer_range"] = WIDE
        model = ModelSection(
            name_or_path=str(_config(self.family, options, self.layers, self.tied, text)),
            attn_implementation=attention,
            # Of scopes that do not depend on the size of micro-batches, which the cells of a baseline differ in.
            router_aux_loss=RouterAuxLossSection(
                coefficient=0.05, scope="sequence" if self.optimizer == "sgd" else "global"
            ),
            # A mean over the tokens of a micro-batch: of padded ones, it depends on which are together.
            router_z_loss=0.001 if self.packing == "packed" else 0.0,
            router_bias_update=0.001 if self.family == "deepseek_v3" else 0.0,
        )
        optimizer = recipe.optimizer.model_copy(update={"momentum": 0.9 if self.optimizer == "sgd" else 0.0})
        return recipe.model_copy(update={"model": model, "optimizer": optimizer})

    def needs_margins(self, steps: int) -> bool:
        """Whether a run is long enough for choices that rounding decides, and compared that closely."""
        return steps == LONG_STEPS and self.precision == "fp32"

    def as_dense(self) -> Mathematics:
        """The same of a dense model."""
        return Mathematics(**vars(self))


@dataclass(frozen=True, kw_only=True)
class MixtureCell(Cell):
    """One way to train a mixture."""

    steps: int = STEPS

    @override
    def __str__(self) -> str:
        return super().__str__() + (f"-{self.steps}" if self.steps != STEPS else "")

    @property
    def mathematics(self) -> Mathematics:
        return MixtureMathematics(**vars(super().mathematics))

    @property
    @override
    def has_replicas(self) -> bool:
        return self.where.tp > 1 or self.where.zero_stage != 3


def _config(family: str, options: dict[str, Any], layers: int, tied: bool, text: Text) -> Path:
    """Write the config of a tiny model, once."""
    wide = "-wide" * ("initializer_range" in options)
    known = tiny_config(family).to_dict()
    sizes = {name: value for name, value in (_SMALL | _EXPERTS).items() if name in known}
    changes = sizes | {"num_hidden_layers": layers, "tie_word_embeddings": tied} | options
    folder = text.models / f"{family}-{layers}-{'tied' if tied else 'untied'}{wide}"
    return write_config(tiny_config(family, **changes), folder)


def write_config(config: PretrainedConfig, folder: Path) -> Path:
    """Write a config, once; other processes see all of it or nothing. Returns the folder."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        written = Path(temporary) / folder.name
        config.save_pretrained(written)
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise
    return folder
