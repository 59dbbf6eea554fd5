"""The local shards of a model and its optimizer states, as a checkpoint saves them without gathering tensors."""

from collections.abc import Callable, Container, Iterator

import torch

from toolkit.checkpoint.names import MODEL
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save_plan import LocalShard
from toolkit.checkpoint.tensor_source import ShardedTensorGroup, ShardedTensorSource
from toolkit.engines.base import Engine
from toolkit.engines.optimizer_states import MASTER
from toolkit.parallel.adapter_names import holds_adapters
from toolkit.parallel.gather import Names
from toolkit.parallel.shard import Shard, shard_of

_Read = Callable[[str], torch.Tensor]


def local_tensors(engine: Engine) -> ShardedTensorSource:
    """Return the fp32 weights with the buffers, and the optimizer states, each kind in model order.

    A model with adapters has neither weights nor buffers of its own here: they never change.
    """

    def group(kind: str, of_engine: str) -> ShardedTensorGroup:
        specs = parameter_specs(engine.saved_names(of_engine), torch.float32)
        names = {spec.name for spec in specs}
        shards = list(_parameters(engine, of_engine, names))
        if kind == MODEL and not holds_adapters(names):
            specs += buffer_specs(engine)
            shards += _buffers(engine)
        return ShardedTensorGroup(
            kind=kind,
            specs=specs,
            local_shards=[shard for shard, _ in shards],
            values=lambda index: shards[index][1](of_engine),
        )

    return ShardedTensorSource(groups=[group(MODEL, MASTER), *(group(kind, kind) for kind in engine.states.kinds)])


def parameter_specs(names: Names, dtype: torch.dtype) -> list[TensorSpec]:
    """Return name and shape of full parameters, in `dtype`."""
    return [TensorSpec(name=name, shape=tuple(shape), dtype=dtype) for name, shape in names]


def buffer_specs(engine: Engine) -> list[TensorSpec]:
    """Return name, shape and dtype of each buffer of the full model that a state dict contains."""
    return [TensorSpec.of(name, like) for name, like in engine.buffer_specs()]


def _parameters(engine: Engine, kind: str, names: Container[str]) -> Iterator[tuple[LocalShard, _Read]]:
    states = engine.states
    for name, parameter in engine.named_parameters():
        if engine.partition is None:
            shard = Shard(name=name, shape=tuple(getattr(parameter, "ds_shape", parameter.shape)))
        else:
            shard = shard_of(parameter)
        if shard.name not in names:
            continue
        shard = states.shard(shard, kind)
        start, length = states.extent(parameter, kind)
        if length and shard.owner:
            local = LocalShard(shard=shard, start=start, length=length, pipeline_stage=_stage(engine))
            yield local, lambda kind, parameter=parameter: states.local(parameter, kind)  # type: ignore[misc]


def _buffers(engine: Engine) -> list[tuple[LocalShard, _Read]]:
    wanted = {name for name, _ in engine.buffer_specs()}
    shards: list[tuple[LocalShard, _Read]] = []
    for name, buffer in engine.local_buffers():
        if name in wanted:
            shard = Shard(name=name, shape=tuple(buffer.shape))
            local = LocalShard(shard=shard, start=0, length=buffer.numel(), pipeline_stage=_stage(engine))
            # Looked up on each call: a module may replace the tensor of its buffer.
            read = lambda kind, name=name: dict(engine.local_buffers())[name].reshape(-1)  # noqa: E731
            shards.append((local, read))
    return shards


def _stage(engine: Engine) -> int:
    """Return the rank's pipeline stage: among replicas of tied parameters, those of the first stage are saved."""
    return 0 if engine.partition is None else engine.partition.groups.coordinate.pipe
