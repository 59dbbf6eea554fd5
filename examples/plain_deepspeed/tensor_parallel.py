"""Megatron-style tensor parallelism written by hand, and `deepspeed.initialize(mpu=...)`, as DeepSpeed documents it.

The layers are right, and so is every gradient. But DeepSpeed takes a parameter for a replicated one unless it carries
`tensor_model_parallel = True`, counts it on the first rank only, and clips by a norm that lacks the other ranks' parts
(docs/known-bugs.md). With `repaired` split parameters carry it, as those of Megatron's own layers do.

Dims: b samples, s positions, i inputs, o outputs, t ranks.
"""

from collections.abc import Callable, Iterator, Mapping
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

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")


class Copy(torch.autograd.Function):
    """Megatron's f: the same input for every rank; backward, the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Identity."""
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """All-reduce."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class Reduce(torch.autograd.Function):
    """Megatron's g: the sum of all ranks' outputs; backward, the same gradient for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """All-reduce."""
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Identity."""
        return gradient


class SplitLinear(nn.Module):
    """This rank's share of a linear layer without bias: some of its outputs (dim 0) or of its inputs (dim 1)."""

    def __init__(self, whole: nn.Linear, dim: int, *, marked: bool) -> None:
        super().__init__()
        self.dim = dim
        part = whole.weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
        parameter = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
        if marked:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        # A comparison of ranks takes parameters of one name for replicas. These are not.
        self.register_parameter(f"part_{dist.get_rank()}", parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, i] -> [b, s, o/t], or [b, s, i/t] -> [b, s, o]."""
        (part,) = self.parameters()
        if self.dim == 0:
            return F.linear(Copy.apply(x), part)  # type: ignore[no-untyped-call]
        total: torch.Tensor = Reduce.apply(F.linear(x, part))  # type: ignore[no-untyped-call]
        return total


class ModelParallelUnit:
    """What the docstring of deepspeed.initialize asks of an mpu. Here all ranks share one model."""

    def __init__(self) -> None:
        self._alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]

    def get_model_parallel_group(self) -> Any:
        """All ranks."""
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        """Which part of the model this rank has."""
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        """How many parts there are."""
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        """This rank alone."""
        return self._alone

    def get_data_parallel_rank(self) -> int:
        """The only one."""
        return 0

    def get_data_parallel_world_size(self) -> int:
        """One replica."""
        return 1


class TensorParallelScript(DataParallelScript):
    """A Llama whose linear layers are split over all ranks. `config` as in data_parallel.py."""

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
        recipe, batch = job.recipe, job.batch
        self.device, self.dp, self.repaired, self.loss_fn = device, 1, False, F.cross_entropy
        self.model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
        self.names = [name for name, _ in self.model.named_parameters()]
        split_layers(self.model, marked=repaired)
        sizes = {
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model,
            optimizer=make_optimizer(recipe, self.model.parameters()),
            config={**sizes, "zero_allow_untested_optimizer": True, **config},
            mpu=ModelParallelUnit(),
        )
        self.probe = Probe(self, self.engine)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        yield from self._whole(torch.Tensor.detach)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        yield from self._whole(safe_get_full_grad)

    def _whole(self, value: Callable[[Any], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names:
            layer = self.model.get_submodule(name.rpartition(".")[0])
            own = value(next(layer.parameters(recurse=False))).contiguous()
            if not isinstance(layer, SplitLinear):
                yield name, own
                continue
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
            yield name, torch.cat(parts, layer.dim)


def split_layers(model: nn.Module, *, marked: bool) -> None:
    """Put a SplitLinear in the place of every linear layer of the decoder."""
    for name, layer in list(model.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if isinstance(layer, nn.Linear) and leaf in (*COLUMN, *ROW):
            setattr(model.get_submodule(owner), leaf, SplitLinear(layer, 0 if leaf in COLUMN else 1, marked=marked))
