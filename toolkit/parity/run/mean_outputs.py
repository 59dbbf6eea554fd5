"""MeanOutputs: the mean output, channel by channel, of layers with a bias, over all tokens of a step and all ranks."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from toolkit.engines.base import Engine
from toolkit.parallel.model_structure import decoder_layer_list
from toolkit.parallel.shard import Shard
from toolkit.parity.parity_run import Tensors
from toolkit.parity.run.observe import gather_on_rank_0


class MeanOutputs:
    """Watches the layers inside of decoder layers whose bias every tensor-parallel rank has: row-parallel ones.

    A mean over tokens does not depend on how ranks share samples and positions. Compiled layers are not looked into:
    a hook would break their graphs.
    """

    def __init__(self, engine: Engine) -> None:
        self._is_watching = False
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        self._hooks = []
        place, layers = decoder_layer_list(engine.model)
        for name, module in layers.named_modules(prefix=place) if engine.compiled is None else ():
            bias = getattr(module, "bias", None)
            shard: Shard | None = getattr(bias, "shard", None)
            is_whole = isinstance(bias, nn.Parameter) and (shard is None or not shard.is_split)
            if is_whole and not isinstance(module, nn.LayerNorm):
                self._hooks.append(module.register_forward_hook(self._after(name)))

    def start(self) -> None:
        """Watch from here on."""
        self._is_watching = True

    def stop(self) -> Tensors:
        """Return the means of what was seen, on rank 0, in the order of the model. A collective call."""
        local = {name: (total.cpu().numpy(), count) for name, (total, count) in self._sums.items()}
        self._is_watching = False
        self._sums = {}
        sums: dict[str, tuple[NDArray[np.float64], int]] = {}
        for part in gather_on_rank_0(local):
            for name, (total, count) in part.items():
                before, counted = sums.get(name, (np.zeros_like(total), 0))
                if before.shape == total.shape:
                    sums[name] = before + total, counted + count
        return {name: total / count for name, (total, count) in sums.items() if count}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _after(self, name: str) -> Any:
        def add(module: nn.Module, arguments: Any, result: Any) -> None:
            is_recomputed = torch._C._current_graph_task_id() != -1
            if not self._is_watching or is_recomputed or not module.training or not isinstance(result, torch.Tensor):
                return
            rows = result.detach().flatten(0, -2).double()
            before, count = self._sums.get(name, (torch.zeros_like(rows[0]), 0))
            self._sums[name] = before + rows.sum(dim=0), count + len(rows)

        return add
