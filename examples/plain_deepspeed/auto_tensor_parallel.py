"""AutoTP as its tutorial shows it: tensor parallelism by a line in the config, and no mpu, which is optional there.

DeepSpeed splits the model over `autotp_size` ranks, but derives the accumulation from `train_batch_size` as if all
ranks were replicas: it updates `autotp_size` times as often as asked, each time from a part of the batch
(docs/known-bugs.md). With `repaired` the config has `gradient_accumulation_steps` in the place of `train_batch_size`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_parallel import DataParallelScript
from deepspeed.utils import safe_get_full_grad
from probe import Probe, make_optimizer
from torch import nn

from toolkit.config.job import Job
from toolkit.model_init.build_model import build_model


class AutoTensorParallelScript(DataParallelScript):
    """`config` as in data_parallel.py."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        ds_config: Mapping[str, Any] | None = None,
        *,
        eos_id: int | None,
        trust_remote_code: bool = False,
        config: Mapping[str, Any],
        repaired: bool = False,
    ) -> None:
        recipe, layout, batch = job.recipe, job.layout, job.batch
        self.device, self.dp, self.repaired, self.loss_fn = device, 1, False, F.cross_entropy
        self.model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        sizes = {
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "tensor_parallel": {"autotp_size": layout.tp},
            **(
                {"gradient_accumulation_steps": batch.accumulation}
                if repaired
                else {"train_batch_size": batch.global_batch_size}
            ),
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model,
            optimizer=make_optimizer(recipe, self.model.parameters()),
            config={**sizes, "zero_allow_untested_optimizer": True, **config},
        )
        self.dims = {
            name: next(dim for dim, size in enumerate(shapes[name]) if parameter.shape[dim] != size)
            for name, parameter in self.model.named_parameters()
            if parameter.shape != shapes[name]
        }
        name_by_rank(self.model, set(self.dims))
        self.probe = Probe(self, self.engine)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        for name, parameter in self._named():
            yield name, self._whole(name, parameter.detach())

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        for name, parameter in self._named():
            yield name, self._whole(name, safe_get_full_grad(parameter))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name.partition("@")[0], parameter) for name, parameter in self.model.named_parameters())

    def _whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        if name not in self.dims:
            return own.clone()
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, self.dims[name])


def name_by_rank(model: Any, split: set[str]) -> None:
    """A comparison of ranks takes parameters of one name for replicas. Sharded ones are not."""
    named = model.named_parameters

    def by_rank(*arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in named(*arguments, **options):
            yield f"{name}@{dist.get_rank()}" if name in split else name, parameter

    model.named_parameters = by_rank
