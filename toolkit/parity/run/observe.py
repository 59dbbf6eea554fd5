"""Observes an engine during a parity run: layer outputs, learning rates, and hashes of replicas.

Nothing here changes what is computed. Each observer sees its own rank.
"""

import hashlib
import math
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.engines.base import Engine
from toolkit.parallel.experts.sharding import experts_in
from toolkit.parallel.model_structure import decoder_layer_list, hidden_argument
from toolkit.parallel.pipeline.stage import NonLocalLayer
from toolkit.parallel.shard import shard_of
from toolkit.parity.parity_run import BEFORE_EXPERTS, EMBEDDINGS


class LayerOutputs:
    """Root mean squares of the input of the first decoder layer, of what experts get, and of the output of each layer.

    A mean over elements does not depend on how ranks share samples, positions or replicas.
    """

    def __init__(self, engine: Engine) -> None:
        self._device = engine.device
        name, layers = decoder_layer_list(engine.model)
        rows = ((f"{name}.{index}{BEFORE_EXPERTS}", f"{name}.{index}") for index in range(len(layers)))
        self._names = [EMBEDDINGS, *chain.from_iterable(rows)]
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=engine.device)  # squares, elements
        self._hooks = []
        for index, layer in enumerate(layers):
            if isinstance(layer, NonLocalLayer):
                continue
            if index == 0:
                self._hooks.append(layer.register_forward_pre_hook(self._before(0), with_kwargs=True))
            for _, experts in experts_in(layer):
                self._hooks.append(experts.register_forward_pre_hook(self._before(2 * index + 1), with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._after(2 * index + 2)))

    def read(self) -> dict[str, float]:
        """Root mean squares over all ranks; removes the hooks. A collective call."""
        for hook in self._hooks:
            hook.remove()
        if dist.is_initialized():
            dist.all_reduce(self._sums)
        squares, elements = self._sums.unbind(1)
        means = (squares / elements).sqrt().tolist()
        return {name: value for name, value in zip(self._names, means, strict=True) if not math.isnan(value)}

    def _before(self, row: int) -> Any:
        def add(module: nn.Module, arguments: Any, keywords: Any) -> None:
            self._add(row, hidden_argument(arguments, keywords))

        return add

    def _after(self, row: int) -> Any:
        def add(module: nn.Module, arguments: Any, result: Any) -> None:
            self._add(row, result[0] if isinstance(result, tuple | list) else result)

        return add

    def _add(self, row: int, hidden: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed in the backward pass
        if isinstance(hidden, DTensor):
            hidden = hidden.full_tensor()
        self._sums[row, 0] += hidden.detach().double().square().sum()
        self._sums[row, 1] += hidden.numel()


def learning_rate_of(engine: Engine) -> float:
    """The learning rate of the optimizer's groups; NaN where they differ or there are none."""
    groups = getattr(getattr(engine, "optimizer", None), "param_groups", [])
    rates = {float(group["lr"]) for group in groups}
    return rates.pop() if len(rates) == 1 else math.nan


FIRST_LOSS_SCALE = 2.0**8
"""The greatest loss scale with which a compared run in fp16 begins."""


def lower_loss_scale(engine: Engine) -> None:
    """Let a run in fp16 begin with a loss scale at which its first steps overflow in no layout.

    Engines average gradients over replicas, so that each replica multiplies its loss by their number. At DeepSpeed's
    first scale of 2^16 the gradients of one layout may overflow, and its update be skipped, where those of another do
    not.
    """
    for name, value in engine.loss_scale().items():
        if name in ("scale", "cur_scale") and value > FIRST_LOSS_SCALE:
            engine.load_loss_scale({name: FIRST_LOSS_SCALE})


def replica_hashes(engine: Engine) -> dict[Hashable, bytes]:
    """Hashes of the local values of each parameter: ranks with the same key hold replicas of the same values."""
    hashes: dict[Hashable, bytes] = {}
    for name, parameter in engine.model.named_parameters():
        is_sharded = hasattr(parameter, "ds_tensor")
        if isinstance(parameter, DTensor) or (is_sharded and engine.partition is None):
            continue  # every rank has another shard
        local = getattr(parameter, "ds_tensor", parameter).detach().reshape(-1)
        if is_sharded:
            # ZeRO-3 pads what its ranks do not divide, with whatever is in memory; the last may hold nothing else.
            _, length = engine.states.extent(parameter)
            local = local[:length]
        if not local.numel():
            continue
        key: Hashable = name
        if engine.partition is not None:
            coordinate = engine.partition.groups.coordinate
            shard = shard_of(parameter)
            # Sharded over data-parallel ranks by ZeRO-3, split over tensor-parallel ranks, or replicated.
            model = coordinate.model if shard.is_split and not shard.pieces else "any"
            key = (shard.name, shard.pieces, model, coordinate.data if is_sharded else "any")
        content = local.contiguous().cpu().view(torch.uint8).numpy()
        hashes[key] = hashlib.blake2b(content.tobytes(), digest_size=16).digest()
    return hashes


def gather_on_rank_0(value: Any) -> list[Any]:
    """Every rank's value, on rank 0; an empty list on the others."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = None
    if dist.get_rank() == 0:
        values = [None for _ in range(dist.get_world_size())]
    dist.gather_object(value, values)
    return values or []


def compare_replicas(ranks: Iterable[dict[Hashable, bytes]]) -> tuple[frozenset[str], int]:
    """The parameters whose replicas differ, and the number of comparisons."""
    first: dict[Hashable, bytes] = {}
    diverged: set[str] = set()
    compared = 0
    for hashes in ranks:
        for key, bits in hashes.items():
            if key in first:
                compared += 1
            if first.setdefault(key, bits) != bits:
                diverged.add(str(key[0] if isinstance(key, tuple) else key))
    return frozenset(diverged), compared
