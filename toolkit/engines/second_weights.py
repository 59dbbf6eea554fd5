"""SecondWeights: other weights of the same model, in the same layout, for forward passes without gradients.

What a rank holds of each parameter, whole or a shard, changes places with what it holds of the other weights: no module
and no engine is built a second time, and beside the weights there is a copy of one parameter at a time.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from toolkit.engines.base import Engine
from toolkit.engines.optimizer_states import local_part
from toolkit.errors import ModelError
from toolkit.model_init.pretrained_weights import stored_weights
from toolkit.parallel.adapter_names import PREFIX
from toolkit.parallel.shard import FullTensor, shard_of
from toolkit.units import some

_FIELD = "train.objective.reference"


class SecondWeights:
    """Weights of `engine`, by its parameters, which are in place only inside `in_place`."""

    def __init__(self, engine: Engine, others: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        self._engine = engine
        self._others = others

    @classmethod
    def frozen(cls, engine: Engine) -> "SecondWeights":
        """Copy the weights that train, as they are now: the others never change."""
        engine.release_gathered_weights()
        trained = [parameter for _, parameter in engine.named_parameters() if parameter.requires_grad]
        return cls(engine, [(parameter, _held(parameter).clone()) for parameter in trained])

    @classmethod
    @torch.no_grad()
    def read(cls, engine: Engine, path: str) -> "SecondWeights":
        """Read the weights of a checkpoint of the same architecture; each rank reads its own part.

        Adapters stay as they are. Raises ModelError for weights that are missing, or of other shapes.
        """
        engine.release_gathered_weights()
        with torch.device("meta"):
            whole = type(engine.model)(copy.deepcopy(engine.model.config))
        whole.tie_weights()
        sources = stored_weights(whole, path, dtype=torch.float32)
        shapes = dict(engine.parameter_names())
        wanted = [(name, parameter) for name, parameter in engine.named_parameters() if not name.startswith(PREFIX)]
        other = [
            name for name, shape in shapes.items() if not name.startswith(PREFIX) and _shape(sources, name) != shape
        ]
        if other:
            reason = f"it has no {some(other)} of the shapes that the model has"
            raise ModelError.of(_FIELD, path, reason, "name a model of the same architecture", (_FIELD, "initial"))
        return cls(engine, [(each, _part(engine, each, sources[name][0])) for name, each in wanted])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the engine compute with these weights, and then with its own again."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        self._engine.release_gathered_weights()
        for parameter, other in self._others:
            held = _held(parameter)
            before = held.clone()
            held.copy_(other)
            other.copy_(before)


def _held(parameter: nn.Parameter) -> torch.Tensor:
    """Return what this rank holds of a parameter: ZeRO-3 and FSDP2 shard it."""
    shard: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    return local_part(parameter.detach()) if shard is None else shard.data


def _part(engine: Engine, parameter: nn.Parameter, source: FullTensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, as `_held` has it."""
    value = source.clone() if engine.partition is None else shard_of(parameter).take(source)
    held = _held(parameter)
    if hasattr(parameter, "ds_tensor"):
        start, length = engine.states.extent(parameter)
        part = torch.zeros_like(held)  # the last ranks' partitions are padded
        part.view(-1)[:length] = value.flatten()[start : start + length].to(part)
        return part
    whole = parameter.detach()
    if isinstance(whole, DTensor):
        value = value.to(held.device)
        value = distribute_tensor(value, whole.device_mesh, whole.placements, src_data_rank=None).to_local()
    return value.to(held).clone()


def _shape(sources: Mapping[str, tuple[FullTensor, torch.Size]], name: str) -> torch.Size | None:
    return sources[name][1] if name in sources else None
