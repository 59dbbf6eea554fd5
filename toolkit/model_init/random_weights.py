"""Initial weights: each family's own distribution, drawn with one seed per module, the same in every layout.

Embedding and LM head are drawn in blocks of rows, each with its own seed, so that a rank draws only its shard of the
vocabulary.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.errors import ModelError
from toolkit.model_init.freed_memory import release_freed_memory
from toolkit.model_init.model_modules import Materializer, OnLayer, cast, decoder_layers
from toolkit.model_init.model_partition import ModelPartition, finish_outside_layers
from toolkit.parallel.pipeline.stage import is_nonlocal
from toolkit.parallel.shard import RUN, runs, set_source
from toolkit.seeds import derive_seed


def initialize(
    model: PreTrainedModel,
    *,
    seed: int,
    dtype: torch.dtype,
    partition: ModelPartition | None = None,
    on_layer: OnLayer | None = None,
) -> None:
    """Set every meta parameter of `model` to its initial value."""
    draw = _Draw(model, seed, dtype, partition, on_layer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        draw.visit(model, "", model, inside_layer=False)
        draw.finish()


class _Draw:
    """One walk over the model: children first, as transformers initializes."""

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        dtype: torch.dtype,
        partition: ModelPartition | None,
        on_layer: OnLayer | None,
    ) -> None:
        self.model = model
        self.seed = seed
        self.dtype = dtype
        self.partition = partition
        self.on_layer = on_layer
        self.layers = {id(layer) for layer in decoder_layers(model)}
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        self.vocabularies = {id(module) for module in ends if isinstance(module, nn.Embedding | nn.Linear)}
        self.materializer = Materializer(model)

    def visit(self, module: nn.Module, name: str, owner: PreTrainedModel, inside_layer: bool) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        is_layer = id(module) in self.layers and not inside_layer
        for child_name, child in list(module.named_children()):
            self.visit(child, f"{name}.{child_name}", owner, inside_layer or is_layer)
        if id(module) in self.vocabularies:
            self._set_row_sources(module, name, owner)
        else:
            self._draw(module, name, owner)
        if is_layer:
            self._refuse_unset(module, name)
            cast(module, self.dtype)
            if self.partition is not None:
                self.partition.shard_layer(module, lambda layer: None)
            self._done(module)

    def finish(self) -> None:
        """Shard and cast what is outside the layers. Only now, because a parent may have initialized it again."""
        self._refuse_unset(self.model, "")
        finish_outside_layers(self.model, self.materializer, self.partition, self._done)

    def _done(self, module: nn.Module) -> None:
        cast(module, self.dtype)
        if self.on_layer is not None:
            self.on_layer(module)
        release_freed_memory()

    def _refuse_unset(self, module: nn.Module, prefix: str) -> None:
        names = [f"{prefix}.{name}".strip(".") for name, value in module.named_parameters() if _is_unset(value)]
        if names:
            settings = (("model.init", "random"), ("model_type", self.model.config.model_type))
            reason = f"transformers does not initialize {names[0]}"
            raise ModelError.between(settings, reason, ("model.init", "pretrained"), "use another model")

    def _draw(self, module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        direct = list(module.named_parameters(recurse=False, remove_duplicate=False))
        fresh = False
        for key, parameter in direct:
            if parameter.is_meta:
                fresh = self.materializer.replace(module, key) or fresh
        if fresh or not (direct or is_nonlocal(module) or _is_fully_nonlocal(module)):
            # Draw only if the weights are all local and new: a tied module would draw a second time.
            _seed("initial weights", self.seed, name)
            owner._init_weights(module)
            if isinstance(module, Conv1D) and _is_unset(module.weight):
                # OpenAI GPT initializes it in the constructor alone, whose values the meta device discarded.
                nn.init.normal_(module.weight, std=0.02)

    def _set_row_sources(self, module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and not hasattr(parameter, "source"):
                set_source(parameter, VocabularyRows(module, key, name, owner, self.seed, self.dtype))


def _is_fully_nonlocal(module: nn.Module) -> bool:
    """Whether other stages own all parameters of the module and of the modules inside it."""
    return next(module.parameters(), None) is None and any(is_nonlocal(inner) for inner in module.modules())


def _is_unset(parameter: nn.Parameter) -> bool:
    return not parameter.is_meta and parameter.numel() > 0 and bool(parameter.detach().flatten()[0].isnan())


def _seed(*purpose: object) -> None:
    # Weights are drawn on the CPU; torch.manual_seed would seed every kind of device, which takes milliseconds.
    torch.default_generator.manual_seed(derive_seed(*purpose))


class VocabularyRows:
    """The parameter `key` of an embedding or LM head. Rows are drawn when they are read."""

    def __init__(
        self, module: nn.Module, key: str, name: str, owner: PreTrainedModel, seed: int, dtype: torch.dtype
    ) -> None:
        self.module = module
        self.key = key
        self.name = name
        self.owner = owner
        self.seed = seed
        self.dtype = dtype
        self.shape = module.get_parameter(key).shape
        self.shapes = {k: None if p is None else p.shape for k, p in module._parameters.items()}

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Return rows [start, start + length)."""
        assert dim == 0
        wanted = list(runs(start, length))
        if len(wanted) == 1:
            return self._rows(start, length).to(self.dtype)
        out = torch.empty(length, *self.shape[1:], dtype=self.dtype)
        for first, count in wanted:
            out.narrow(0, first - start, count).copy_(self._rows(first, count))
        return out

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return self.narrow(0, 0, self.shape[0])

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype)

    def _rows(self, start: int, length: int) -> torch.Tensor:
        return self._block(start // RUN).narrow(0, start % RUN, length)

    def _block(self, index: int) -> torch.Tensor:
        """Draw one block of rows with the family's own initialization of a module of that size."""
        start = index * RUN
        rows = min(RUN, self.shape[0] - start)
        small = copy.copy(self.module)
        small.__dict__ = dict(self.module.__dict__)
        small._parameters = {
            key: None if shape is None else nn.Parameter(torch.empty(rows, *shape[1:]))
            for key, shape in self.shapes.items()
        }
        padding = getattr(self.module, "padding_idx", None)
        if padding is not None:
            small.__dict__["padding_idx"] = padding - start if start <= padding < start + rows else None
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _seed("initial weights", self.seed, self.name, index)
            self.owner._init_weights(small)
        return small.get_parameter(self.key).detach()
