"""What a trial looks at while an engine trains: samples, layer outputs, learning rates, and the bits of copies.

Nothing here changes what is computed. Each observer sees its own rank; `gathered` brings what they saw to rank 0.
"""

import hashlib
import math
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.families.anatomy import decoder_layers, hidden_argument
from toolkit.parallel.shard import shard_of
from toolkit.parallel.stage import LayerElsewhere
from toolkit.parity.trial import EMBEDDINGS
from toolkit.train.engines.base import Engine
from toolkit.train.feed import Feed
from toolkit.train.loss import IGNORE, token_loss_sum


class LayerOutputs:
    """The mean square of what enters the first decoder layer and of what each layer returns, until it is read.

    A mean over elements is the same however ranks share samples, positions or replicas.
    """

    def __init__(self, engine: Engine) -> None:
        self._device = engine.device
        name, layers = decoder_layers(engine.model)
        self._names = [EMBEDDINGS, *(f"{name}.{index}" for index in range(len(layers)))]
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=engine.device)  # squares, elements
        self._hooks = []
        for index, layer in enumerate(layers):
            if isinstance(layer, LayerElsewhere):
                continue
            if index == 0:
                self._hooks.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._after(index + 1)))

    def read(self) -> dict[str, float]:
        """Root mean squares over all ranks; stops watching. A collective call."""
        for hook in self._hooks:
            hook.remove()
        if dist.is_initialized():
            dist.all_reduce(self._sums)
        squares, elements = self._sums.unbind(1)
        means = (squares / elements).sqrt().tolist()
        return {name: value for name, value in zip(self._names, means, strict=True) if not math.isnan(value)}

    def _enter(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._add(0, hidden_argument(arguments, keywords))

    def _after(self, row: int) -> Any:
        def add(module: nn.Module, arguments: Any, result: Any) -> None:
            self._add(row, result[0] if isinstance(result, tuple | list) else result)

        return add

    def _add(self, row: int, hidden: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed in the backward pass
        self._sums[row, 0] += hidden.detach().double().square().sum()
        self._sums[row, 1] += hidden.numel()


def learning_rate_of(engine: Engine) -> float:
    """What the optimizer is set to; NaN where its groups differ or it cannot be asked."""
    groups = getattr(getattr(engine, "optimizer", None), "param_groups", [])
    rates = {float(group["lr"]) for group in groups}
    return rates.pop() if len(rates) == 1 else math.nan


def copies(engine: Engine) -> dict[Hashable, bytes]:
    """Hashes of the bits that this rank holds of each parameter: equal keys on two ranks are copies of each other."""
    held: dict[Hashable, bytes] = {}
    for name, parameter in engine.model.named_parameters():
        is_sharded = hasattr(parameter, "ds_tensor")
        if isinstance(parameter, DTensor) or (is_sharded and engine.cut is None):
            continue  # shards of one tensor: no rank has what another one has
        key: Hashable = name
        if engine.cut is not None:
            place, shard = engine.cut.groups.coordinate, shard_of(parameter)
            # Sharded over replicas by ZeRO-3, split over tensor-parallel ranks, or the same on all of them.
            model = place.model if shard.is_split and not shard.pieces else "any"
            key = (shard.name, shard.pieces, model, place.data if is_sharded else "any")
        local = getattr(parameter, "ds_tensor", parameter).detach().contiguous().cpu().view(torch.uint8).numpy()
        held[key] = hashlib.blake2b(local.tobytes(), digest_size=16).digest()
    return held


def gathered(value: Any) -> list[Any]:
    """Every rank's value, on rank 0; an empty list on the others."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, found)
    return found or []


def merged_copies(ranks: Iterable[dict[Hashable, bytes]]) -> tuple[frozenset[str], int]:
    """(parameters of which copies differ, copies compared)."""
    first: dict[Hashable, bytes] = {}
    torn: set[str] = set()
    compared = 0
    for held in ranks:
        for key, bits in held.items():
            compared += key in first
            if first.setdefault(key, bits) != bits:
                torn.add(str(key[0] if isinstance(key, tuple) else key))
    return frozenset(torn), compared


def sample_losses(engine: Engine, feed: Feed) -> tuple[tuple[float, int], ...]:
    """Sum of token losses and number of targets of each sample of the first global batch, one after the other."""
    found = []
    engine.model.eval()
    with torch.no_grad():
        for sample in feed.first_batch():
            one = sample.to(engine.device)
            logits = engine.model(**one.inputs(), use_cache=False).logits
            found.append((float(token_loss_sum(logits, one.labels)), int((one.labels != IGNORE).sum())))
    engine.model.train()
    return tuple(found)
