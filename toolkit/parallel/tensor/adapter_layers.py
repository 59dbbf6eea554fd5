"""LoRA beside sharded linear layers: each rank has what belongs to its shard, and adds it to the rank's own part.

A column layer computes y_r = x W_r from the whole x: A is replicated, and B is sharded exactly as W. What a rank
computes of A's gradient is from its own outputs, so it is summed over the ranks. A row layer computes the sum over
ranks of x_r W_r: A is sharded over inputs as W, and B is replicated. The rank's x_r A_r B is added before that sum,
which serves both, whatever the layer's reduction is; B's gradient is from the rank's own inputs, and is summed.

Dropout of an adapter's inputs: a number is drawn from the common stream at the entrance of the decoder layer. With the
adapter's name it seeds the masks of whole inputs, of which a row layer takes its part. So every layout drops the same,
and so does recomputation, which restores the stream at that entrance.
"""

from typing import Any

import torch
from torch import nn

from toolkit.errors import ModelError
from toolkit.parallel.adapter_names import ADAPTER, PREFIX
from toolkit.parallel.host_numbers import draw_number, number_of_first_rank
from toolkit.parallel.shard import Shard, mark
from toolkit.parallel.tensor.linear import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    RowParallelLinear,
    sum_over_ranks,
)
from toolkit.seeds import derive_seed


def parallelize_adapter(lora: Any, path: str, *, tensor_parallel: bool) -> None:
    """Shard the adapter of peft's layer `lora`, called `path` in the model, as its base layer is. Raises ModelError."""
    base = lora.base_layer
    if isinstance(base, RowParallelLinear):
        _beside_row(lora, base, f"{PREFIX}{path}")
    elif isinstance(base, ColumnParallelLinear | FusedColumnParallelLinear):
        _beside_column(lora, base, f"{PREFIX}{path}")
    elif tensor_parallel:
        reason = f"{path} is not sharded by tensor parallelism, which does not support an adapter there"
        raise ModelError.of("model.lora.targets", path.rpartition(".")[2], reason, ("parallel.tp", 1), "leave it out")


def _beside_column(lora: Any, base: ColumnParallelLinear | FusedColumnParallelLinear, name: str) -> None:
    a = lora.lora_A[ADAPTER].weight
    mark(a, Shard(name=f"{name}.lora_A.weight", shape=tuple(a.shape)))
    sum_over_ranks(a, base.region.group)
    lora.lora_B[ADAPTER] = base.split_like(lora.lora_B[ADAPTER], f"{name}.lora_B")
    if base.enters:
        base.enters = False
        lora.register_forward_pre_hook(
            lambda module, arguments: (base.region.enter(arguments[0], module), *arguments[1:])
        )


def _beside_row(lora: Any, base: RowParallelLinear, name: str) -> None:
    group = base.region.group
    a = lora.lora_A[ADAPTER]
    b = lora.lora_B[ADAPTER].weight
    shard = Shard(name=f"{name}.lora_A.weight", shape=tuple(a.weight.shape), dim=1, pieces=base.pieces)
    a.weight = mark(nn.Parameter(shard.take(a.weight.detach())), shard)
    mark(b, Shard(name=f"{name}.lora_B.weight", shape=tuple(b.shape)))
    sum_over_ranks(b, group)
    base.is_partial = True
    lora.register_forward_pre_hook(lambda module, arguments: (base.take_input(arguments[0]), *arguments[1:]))
    lora.register_forward_hook(lambda module, arguments, partial: base.complete(partial))
    dropout = lora.lora_dropout[ADAPTER]
    if isinstance(dropout, AdapterDropout):
        dropout.whole = int(shard.shape[1])
        dropout.pieces = base.pieces


class AdapterDropout(nn.Module):
    """Dropout of an adapter's inputs [.., i], or of this rank's part of them. `name`: the adapter's in the model."""

    def __init__(self, share: float, name: str) -> None:
        super().__init__()
        self.share = share
        self.name = name
        self.number = 0
        """Number that `seed_dropouts` draws at the entrance of the decoder layer."""
        self.whole = 0
        self.pieces: tuple[tuple[int, int], ...] = ()
        """This rank's part, as (start, length), of all `whole` inputs in a row layer; empty elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop inputs in training, and scale the others up."""
        if not self.training:
            return x
        generator = torch.Generator(x.device).manual_seed(derive_seed("adapter dropout", self.number, self.name))
        shape = (*x.shape[:-1], self.whole or x.shape[-1])
        is_kept = torch.rand(shape, generator=generator, device=x.device) >= self.share
        if self.pieces:
            is_kept = torch.cat([is_kept.narrow(-1, start, length) for start, length in self.pieces], dim=-1)
        return x * is_kept / (1 - self.share)


def seed_dropouts(layer: nn.Module) -> None:
    """Let each forward pass of a decoder layer draw the number of its adapters' dropout."""
    dropouts = [module for module in layer.modules() if isinstance(module, AdapterDropout)]
    regions = [module.region for module in layer.modules() if isinstance(module, RowParallelLinear)]
    # With a sharded sequence, streams between the blocks differ from rank to rank.
    group = regions[0].group if regions and regions[0].sequence_parallel else None

    def draw(layer: nn.Module, arguments: Any) -> None:
        if layer.training:
            number = draw_number()
            if group is not None:
                number = number_of_first_rank(number, group, next(layer.parameters()).device)
            for dropout in dropouts:
                dropout.number = number

    if dropouts:
        layer.register_forward_pre_hook(draw)
