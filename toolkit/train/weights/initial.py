"""Initial weights: each family's own distribution, drawn from a seed per module, the same in every layout.

Embedding and head are drawn in blocks of rows, each with a seed of its own, so that a rank which keeps a part of the
vocabulary draws only that.
"""

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.errors import ModelError
from toolkit.parallel.shard import RUN, runs, set_source
from toolkit.parallel.stage import is_elsewhere
from toolkit.train.host_memory import release_freed_memory
from toolkit.train.seeds import derive_seed
from toolkit.train.weights.meta import constructed_values
from toolkit.train.weights.part import ModelPart, OnLayer, cast, decoder_layers, outside_layers


def initialise(
    model: PreTrainedModel,
    *,
    seed: int,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    on_layer: OnLayer | None = None,
) -> None:
    """Give every meta parameter of `model` its initial value."""
    draw = _Draw(model, seed, dtype, part, on_layer)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        draw.visit(model, "", model, inside_layer=False)
        draw.rest()


class _Draw:
    """One walk over the model: children first, as transformers initialises."""

    def __init__(
        self,
        model: PreTrainedModel,
        seed: int,
        dtype: torch.dtype,
        part: ModelPart | None,
        on_layer: OnLayer | None,
    ) -> None:
        self.model, self.seed, self.dtype, self.part, self.on_layer = model, seed, dtype, part, on_layer
        self.layers = {id(layer) for layer in decoder_layers(model)}
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        self.vocabularies = {id(module) for module in ends if isinstance(module, nn.Embedding | nn.Linear)}
        self.shared = shared_parameters(model)
        self.real: dict[nn.Parameter, nn.Parameter] = {}

    def visit(self, module: nn.Module, name: str, owner: PreTrainedModel, inside_layer: bool) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        is_layer = id(module) in self.layers and not inside_layer
        for child_name, child in list(module.named_children()):
            self.visit(child, f"{name}.{child_name}", owner, inside_layer or is_layer)
        if id(module) in self.vocabularies:
            self._give_rows(module, name, owner)
        else:
            self._draw(module, name, owner)
        if is_layer:
            self._refuse_unset(module, name)
            cast(module, self.dtype)
            if self.part is not None:
                self.part.cut_layer(module, lambda layer: None)
            self._done(module)

    def rest(self) -> None:
        """What lies outside the layers: cut and cast it. Only now, for a parent may have initialised it anew."""
        self._refuse_unset(self.model, "")
        if self.part is not None:
            self.part.cut_rest(self.model, self._fill, self._done)
        for module in outside_layers(self.model):
            self._fill(module)
            self._done(module)
        self._done(self.model)

    def _done(self, module: nn.Module) -> None:
        cast(module, self.dtype)
        if self.on_layer is not None:
            self.on_layer(module)
        release_freed_memory()

    def _refuse_unset(self, module: nn.Module, prefix: str) -> None:
        names = [f"{prefix}.{name}".strip(".") for name, value in module.named_parameters() if _is_unset(value)]
        if names:
            raise ModelError(
                f"{self.model.config.model_type}: transformers gives {names[0]} no initial values. "
                "Set model.init=pretrained, or take another model."
            )

    def _draw(self, module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        direct = list(module.named_parameters(recurse=False, remove_duplicate=False))
        fresh = False
        for key, parameter in direct:
            if parameter.is_meta:
                fresh = fresh or parameter not in self.real
                self._replace(module, key)
        if fresh or not (direct or is_elsewhere(module) or _is_all_elsewhere(module)):
            # Only a module whose weights are all here may draw: a tied one would draw a second time.
            _seed("initial weights", self.seed, name)
            owner._init_weights(module)
            if isinstance(module, Conv1D) and _is_unset(module.weight):
                nn.init.normal_(module.weight, std=0.02)  # as its constructor: OpenAI GPT leaves it at that

    def _replace(self, module: nn.Module, key: str) -> None:
        """Put a real parameter in the place of a meta one, the same one wherever it is tied to."""
        parameter = module._parameters[key]
        assert parameter is not None
        real = self.real.get(parameter)
        if real is None:
            source = getattr(parameter, "source", None)
            values = constructed_values(parameter) if source is None else source.clone()
            real = nn.Parameter(values, requires_grad=parameter.requires_grad)
            if parameter in self.shared:
                # No others: whoever is in here stays in memory, also when its layer was cut long ago.
                self.real[parameter] = real
        module._parameters[key] = real

    def _give_rows(self, module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and not hasattr(parameter, "source"):
                set_source(parameter, RowsToDraw(module, key, name, owner, self.seed, self.dtype))

    def _fill(self, module: nn.Module) -> None:
        for child in module.modules():
            for key, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter.is_meta:
                    self._replace(child, key)


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that stand in several places."""
    counts = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in counts.items() if count > 1}


def _is_all_elsewhere(module: nn.Module) -> bool:
    """Whether other stages own all the parameters that the module and those inside it had."""
    return next(module.parameters(), None) is None and any(is_elsewhere(inner) for inner in module.modules())


def _is_unset(parameter: nn.Parameter) -> bool:
    return not parameter.is_meta and parameter.numel() > 0 and bool(parameter.detach().flatten()[0].isnan())


def _seed(*purpose: object) -> None:
    # Models are drawn on the CPU; torch.manual_seed would visit every kind of device, which takes milliseconds.
    torch.default_generator.manual_seed(derive_seed(*purpose))


class RowsToDraw:
    """The parameter `key` of an embedding or a head, drawn when rows of it are asked for."""

    def __init__(
        self, module: nn.Module, key: str, name: str, owner: PreTrainedModel, seed: int, dtype: torch.dtype
    ) -> None:
        self.module, self.key, self.name, self.owner, self.seed, self.dtype = module, key, name, owner, seed, dtype
        self.shape = module.get_parameter(key).shape
        self.shapes = {k: None if p is None else p.shape for k, p in module._parameters.items()}

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length)."""
        assert dim == 0
        wanted = list(runs(start, length))
        if len(wanted) == 1:
            return self._rows(start, length).to(self.dtype)
        out = torch.empty(length, *self.shape[1:], dtype=self.dtype)
        for first, count in wanted:
            out.narrow(0, first - start, count).copy_(self._rows(first, count))
        return out

    def clone(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """All rows."""
        return self.narrow(0, 0, self.shape[0])

    def new_zeros(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeros of the same dtype."""
        return torch.zeros(*shape, dtype=self.dtype)

    def _rows(self, start: int, length: int) -> torch.Tensor:
        return self._block(start // RUN).narrow(0, start % RUN, length)

    def _block(self, index: int) -> torch.Tensor:
        """One block of rows, from the family's own initialisation of a module with that many rows."""
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
