"""DeepSpeed's own expert parallelism as its tutorial shows it: `deepspeed.moe.layer.MoE` in the place of each MLP.

A Mixtral whose experts are shared out over all ranks. Every gradient is right. But without ZeRO, in fp32, DeepSpeed
clips by the mean over ranks of the norms of what each rank holds; the norm of the model is the root of a sum, in which
every expert counts (docs/known-bugs.md). With `repaired` the same script runs under ZeRO-1, which adds squares.

Dims: b samples, s positions, e experts, h hidden, i intermediate.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_parallel import DataParallelScript
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import safe_get_full_grad
from probe import Probe, make_optimizer
from torch import nn

from toolkit.config.job import Job
from toolkit.model_init.build_model import build_model

OWN = "moe.deepspeed_moe.experts.deepspeed_experts"


class Expert(nn.Module):
    """One expert of a Mixtral, under the names that transformers has for all of them."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, intermediate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., h]."""
        gate, up = F.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj)


class NativeExperts(nn.Module):
    """DeepSpeed's layer with the weights of a Mixtral's, of which each rank keeps its share of the experts."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        whole = block.experts
        self.moe = MoE(
            whole.hidden_dim,
            Expert(whole.hidden_dim, whole.intermediate_dim),
            num_experts=whole.num_experts,
            ep_size=dist.get_world_size(),
            k=2,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer = self.moe.deepspeed_moe
        first = dist.get_rank() * self.moe.num_local_experts
        with torch.no_grad():
            layer.gate.wg.weight.copy_(block.gate.weight)
            for index, expert in enumerate(layer.experts.deepspeed_experts):
                expert.gate_up_proj.copy_(whole.gate_up_proj[first + index])
                expert.down_proj.copy_(whole.down_proj[first + index])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]; the auxiliary loss has no part here."""
        output: torch.Tensor = self.moe(x)[0]
        return output


class NativeExpertsScript(DataParallelScript):
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
        self.device, self.dp, self.repaired, self.loss_fn = device, layout.dp, False, F.cross_entropy
        self.model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
        self.names = [name for name, _ in self.model.named_parameters()]
        for layer in self.model.model.layers:
            layer.mlp = NativeExperts(layer.mlp)
        groups: Any = {"params": list(self.model.parameters()), "name": "parameters"}
        if repaired:
            config = {**config, "zero_optimization": {"stage": 1}}
            groups = split_params_into_different_moe_groups_for_optimizer(groups)
        sizes = {
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model,
            optimizer=make_optimizer(recipe, groups if repaired else [groups]),
            config={**sizes, "zero_allow_untested_optimizer": True, **config},
        )
        name_by_rank(self.model)
        self.probe = Probe(self, self.engine)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        yield from self._whole(lambda parameter: parameter.detach().clone())

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        yield from self._whole(safe_get_full_grad)

    def _whole(self, value: Callable[[Any], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names:
            owner, _, leaf = name.rpartition(".")
            block, _, last = owner.rpartition(".")
            module = self.model.get_submodule(block)
            if not isinstance(module, NativeExperts):
                yield name, value(self.model.get_parameter(name))
            elif last == "gate":
                yield name, value(module.moe.deepspeed_moe.gate.wg.weight)
            else:
                mine = [value(getattr(expert, leaf)) for expert in module.get_submodule(OWN)]  # type: ignore[union-attr]
                own = torch.stack(mine)  # [e/ranks, ...] -> [e, ...]
                parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, own)
                yield name, torch.cat(parts)


def name_by_rank(model: Any) -> None:
    """A comparison of ranks takes parameters of one name for replicas. Experts are not."""
    named = model.named_parameters

    def by_rank(*arguments: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in named(*arguments, **options):
            yield f"{name}@{dist.get_rank()}" if OWN in name else name, parameter

    model.named_parameters = by_rank
