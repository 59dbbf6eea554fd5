"""Dropout masks that do not depend on the layout: the random generators are reseeded after every decoder layer.

The seed follows from the micro-batch's block and the layer, so a pipeline stage, which did not run earlier layers,
draws what one process would draw. Seeding after a layer instead of before it keeps recomputation right: a layer is
recomputed from the generator's state at its entrance, which is what the seeding left.

Where tensor-parallel ranks hold different activations they must drop different ones: a `Region` does that inside the
blocks, and with sequence parallelism this file does, from the first layer's entrance to the last one's exit.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.model_init.model_modules import decoder_layers
from toolkit.parallel.host_numbers import draw_number
from toolkit.parallel.tensor.adapter_layers import AdapterDropout
from toolkit.parallel.tensor.region import drops_activations
from toolkit.seeds import derive_seed


class DropoutStream:
    """Seeds one model's dropout. `sequence_group`: the ranks over which activations between layers are sharded.

    `entries`: modules that replace a layer where a pipeline's stage receives what that layer has computed elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        sequence_group: dist.ProcessGroup | None = None,
        entries: Mapping[int, nn.Module] | None = None,
    ) -> None:
        self.device = device
        self.rank = 0 if sequence_group is None else 1 + sequence_group.rank()
        self.seed = 0
        has_adapters = any(isinstance(module, AdapterDropout) for module in model.modules())
        if not (has_adapters or drops_activations(model.config) or _routers_draw_noise(model.config)):
            return
        layers = decoder_layers(model)
        if self.rank and layers:
            layers[0].register_forward_pre_hook(self._seed_rank)
        for index, layer in (*enumerate(layers), *(entries or {}).items()):
            layer.register_forward_hook(self._after(index, rank=self.rank if index + 1 < len(layers) else 0))

    def start(self, seed: int) -> None:
        """Begin a forward pass with the seed of its micro-batch."""
        self.seed = seed
        seed_generators(seed, self.device)

    def _after(self, index: int, *, rank: int) -> Any:
        def reseed(module: nn.Module, arguments: Any, result: Any) -> None:
            if module.training:
                seed_generators(derive_seed("after layer", self.seed, index, rank), self.device)

        return reseed

    def _seed_rank(self, module: nn.Module, arguments: Any) -> None:
        # From the generator, not from `seed`: recomputing the layer runs this again, after `seed` has changed.
        if module.training:
            seed_generators(derive_seed("own part", draw_number(), self.rank), self.device)


def _routers_draw_noise(config: Any) -> bool:
    """Whether routers of a mixture draw noise in training (phimoe), as dropout does."""
    facts = config.get_text_config(decoder=True).to_dict()
    return any(isinstance(value, float) and value > 0 for name, value in facts.items() if "jitter" in name)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed one device. `torch.manual_seed` seeds every backend, each of which formats its caller's stack."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
