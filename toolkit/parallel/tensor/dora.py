"""DoRA beside a linear layer, sharded or not: y = m (W x + s B A x) / |W + s B A|, norm and m for each output.

Liu et al. 2024, with the norm outside the gradient (sec. 4.3), as in peft, whose layer for it needs whole weights. A
column layer has whole rows of W, so the norms of its outputs, and m is sharded as they are. A row layer has a part of
every row: squares are summed over the ranks, and m is replicated; what is added to the rank's x_r W_r is linear in x_r,
so it is right before the sum over ranks.

Under ZeRO-3 a weight of another module, read in a forward pass, is gathered by DeepSpeed, and from then on before each
pass of the module that has read it (`register_external_parameter`).

Dims: i input features, o this rank's output features, r the adapter's rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.parallel.groups import transfer_device
from toolkit.parallel.shard import Shard, mark, shard_of
from toolkit.parallel.tensor import collectives as c
from toolkit.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, sum_over_ranks


class DoraMagnitude(nn.Module):
    """m of this rank's outputs, which begins as their norms; in the place of peft's DoraLinearLayer."""

    def __init__(self, base: Any, a: Any, b: Any, scaling: float, *, name: str) -> None:
        super().__init__()
        # A fused layer has a weight for its sharded outputs and another one for those that ranks share.
        self.parts = nn.ParameterList()
        for layer, b_part in zip(_parts(base), _parts(b), strict=True):
            self.parts.append(nn.Parameter(_norms(layer, a, b_part, scaling, layer.weight.dtype)))
            magnitude = self.parts[-1]
            if isinstance(layer, ColumnParallelLinear):
                shard = shard_of(layer.weight)
                assert shard.dim is not None
                whole = (shard.shape[shard.dim],)
                mark(magnitude, Shard(name=name, shape=whole, dim=0, pieces=shard.pieces, owner=shard.owner))
                layer.sum_over_sharers(magnitude)
            elif isinstance(layer, RowParallelLinear):
                mark(magnitude, Shard(name=name, shape=tuple(magnitude.shape)))
                sum_over_ranks(magnitude, layer.region.group)

    def forward(self, x: torch.Tensor, *, base_result: torch.Tensor | None, **peft: Any) -> torch.Tensor:
        """Return what DoRA adds to the base layer's output for x.

        `base_result`: that output; None where x has lost what the adapter's dropout drops. `peft`: its layers and
        scaling, by peft's names.
        """
        base = peft["base_layer"]
        a = peft["lora_A"]
        b = peft["lora_B"]
        scaling = peft["scaling"]
        layers = _parts(base)
        scale = torch.cat(
            [
                magnitude / _norms(layer, a, b_part, scaling, x.dtype)
                for magnitude, layer, b_part in zip(self.parts, layers, _parts(b), strict=True)
            ]
        )
        scale = _gathered(scale, base)
        if base_result is None:
            product = _gathered(torch.cat([F.linear(x, _matrix(layer, x.dtype)) for layer in layers], dim=-1), base)
        elif layers[0].bias is None or isinstance(base, RowParallelLinear):  # which adds its bias to the ranks' sum
            product = base_result
        else:
            product = base_result - _gathered(torch.cat([layer.bias for layer in layers]), base)
        result: torch.Tensor = (scale - 1) * product + scale * b(a(x)) * scaling
        return result


def _parts(layer: Any) -> Any:
    return getattr(layer, "parts", (layer,))


def _gathered(local: torch.Tensor, base: Any) -> torch.Tensor:
    """The outputs that the layer returns, [.., o], from those of this rank."""
    gathers = isinstance(base, ColumnParallelLinear) and base.gather_output
    return c.gather_from_tensor_ranks(local, base.region.group) if gathers else local


def _matrix(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight as [o, i]."""
    weight: torch.Tensor = layer.weight.to(dtype)
    return weight.t() if isinstance(layer, Conv1D) or getattr(layer, "input_major", False) else weight


@torch.no_grad()
def _norms(layer: Any, a: Any, b: Any, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """|W + s B A| of each output, [o]."""
    merged = torch.addmm(_matrix(layer, dtype), b.weight.to(dtype), a.weight.to(dtype), alpha=scaling)  # [o, i]
    norms = torch.linalg.vector_norm(merged, dim=1, dtype=torch.float32)
    if isinstance(layer, RowParallelLinear):
        group = layer.region.group
        norms = c.all_reduce(norms.square().to(transfer_device(group)), group).sqrt().to(norms.device)
    result: torch.Tensor = norms.to(dtype)
    return result
