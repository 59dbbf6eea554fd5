"""What this rank holds of a model and its optimizer, told to the checkpoint so that nothing is gathered needlessly."""

from collections.abc import Callable

import torch

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.held_tensors import HeldGroup, HeldTensors
from toolkit.checkpoint.holdings import Held
from toolkit.checkpoint.names import MODEL
from toolkit.parallel.shard import Shard, shard_of
from toolkit.train.engines.base import Engine
from toolkit.train.engines.states import MASTER

_Read = Callable[[str], torch.Tensor]


def held_tensors(engine: Engine) -> HeldTensors:
    """The fp32 weights with the model's buffers, and the optimizer's states, each kind in the model's order."""
    parameters = _parameters(engine)
    buffers = _buffers(engine)
    specs = [TensorSpec(name=name, shape=tuple(shape), dtype=torch.float32) for name, shape in engine.parameter_names()]
    of_buffers = [TensorSpec.of(name, like) for name, like in engine.buffer_specs()]

    def group(kind: str, of_engine: str, specs: list[TensorSpec], held: list[tuple[Held, _Read]]) -> HeldGroup:
        return HeldGroup(
            kind=kind, specs=specs, held=[one for one, _ in held], values=lambda index: held[index][1](of_engine)
        )

    return HeldTensors(
        groups=[
            group(MODEL, MASTER, specs + of_buffers, parameters + buffers),
            *(group(kind, kind, specs, parameters) for kind in engine.states.kinds),
        ]
    )


def _parameters(engine: Engine) -> list[tuple[Held, _Read]]:
    found: list[tuple[Held, _Read]] = []
    states = engine.states
    for name, parameter in engine.model.named_parameters():
        if engine.cut is None:
            shard = Shard(name=name, shape=tuple(getattr(parameter, "ds_shape", parameter.shape)))
        else:
            shard = shard_of(parameter)
        start, length = states.extent(parameter)
        if length and shard.owner:
            held = Held(shard=shard, start=start, length=length, rank_of_copies=_stage(engine))
            found.append((held, lambda kind, parameter=parameter: states.local(parameter, kind)))  # type: ignore[misc]
    return found


def _buffers(engine: Engine) -> list[tuple[Held, _Read]]:
    wanted = {name for name, _ in engine.buffer_specs()}
    found: list[tuple[Held, _Read]] = []
    for name, buffer in engine.local_buffers():
        if name in wanted:
            shard = Shard(name=name, shape=tuple(buffer.shape))
            held = Held(shard=shard, start=0, length=buffer.numel(), rank_of_copies=_stage(engine))
            # Asked for anew: a module may put another tensor in the place of its buffer.
            read = lambda kind, name=name: dict(engine.local_buffers())[name].reshape(-1)  # noqa: E731
            found.append((held, read))
    return found


def _stage(engine: Engine) -> int:
    """Stages hold copies of tied parameters; the first one's counts."""
    return 0 if engine.cut is None else engine.cut.groups.coordinate.pipe
