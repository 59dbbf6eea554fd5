"""Expert parallelism of one's own under ZeRO-3, beside tensor parallelism of one's own: the gradient norm is wrong.

    torchrun --nproc_per_node 4 examples/plain_deepspeed/zero3_experts.py

Ranks 0 and 1 share the first replica's matrices (tensor parallelism), ranks 2 and 3 the second one's. Each replica has
other experts, of which each of its two ranks has one. The experts carry the attributes that AutoEP gives its own, which
is how ZeRO-3 knows over which ranks to shard and average a parameter. Then it counts them as if the expert-parallel
group contained the tensor-parallel ranks, which it does in AutoEP only: an expert of the other tensor-parallel rank is
missing from each rank's norm, and the ranks clip by different norms (docs/known-bugs.md).
"""

import math
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups, safe_get_full_grad
from torch import nn

TENSOR_PARALLEL = EXPERT_PARALLEL = 2
GROUP = f"ep_size_{EXPERT_PARALLEL}"
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


class Net(nn.Module):
    """A matrix that all ranks have, and an expert that is another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self) -> torch.Tensor:
        """Gradients: 1 everywhere in `dense`; in each expert, another number."""
        return self.dense.sum() + (1 + dist.get_rank()) * self.expert.sum()


class ModelParallelUnit:
    """What the docstring of deepspeed.initialize asks of an mpu: ranks 0 and 1, ranks 2 and 3 are model-parallel."""

    def __init__(self) -> None:
        self.tensor, _ = dist.new_subgroups(TENSOR_PARALLEL)  # type: ignore[no-untyped-call]
        self.data, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])  # type: ignore[no-untyped-call]

    def get_model_parallel_group(self) -> Any:
        """The ranks of one replica."""
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        """Which part of the replica this rank has."""
        return dist.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        """How many parts there are."""
        return TENSOR_PARALLEL

    def get_data_parallel_group(self) -> Any:
        """The ranks with the same part of each replica."""
        return self.data

    def get_data_parallel_rank(self) -> int:
        """Which replica this is."""
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        """How many replicas there are."""
        return dist.get_world_size(self.data)


def norms(*, repaired: bool = False) -> tuple[float, float]:
    """The norm that DeepSpeed clips by on this rank, and the one of all gradients. One call a process; on four ranks.

    `repaired` makes ZeRO-3 add up over the tensor-parallel ranks.
    """
    deepspeed.init_distributed()
    mpu = ModelParallelUnit()
    alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    groups._EXPERT_PARALLEL_GROUP[GROUP], groups._EXPERT_DATA_PARALLEL_GROUP[GROUP] = mpu.data, alone
    net = Net()
    dense, expert = net.dense, net.expert
    expert.tensor_model_parallel = True  # type: ignore[attr-defined]
    expert.allreduce, expert.group_name = False, GROUP  # type: ignore[attr-defined]
    expert.ds_zero_partition_process_group = alone  # type: ignore[attr-defined]
    expert.ds_zero_placement_family, expert.ds_zero_partition_group_name = "autoep_expert", GROUP  # type: ignore[attr-defined]
    deepspeed.zero.Init(module=net, config_dict_or_path=CONFIG, data_parallel_group=mpu.data)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=CONFIG, mpu=mpu
    )
    if repaired:
        engine.optimizer._grad_norm_counts_every_rank = lambda params, group: False
    engine.backward(engine())
    own, shared = (safe_get_full_grad(parameter).double().square().sum() for parameter in (expert, dense))
    dist.all_reduce(own)
    engine.step()
    return float(engine.get_global_grad_norm()), math.sqrt(float(own + shared))


if __name__ == "__main__":
    clipped_by, right = norms()
    print(f"rank {dist.get_rank()}: DeepSpeed clips by {clipped_by:.6f}; the norm is {right:.6f}")
