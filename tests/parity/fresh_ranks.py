"""Train several times in the same ranks, each time with a clean state: undo what engines leave in the process.

Starting ranks costs more than a few steps of a small model, so a matrix of thousands of cells starts few. The
globals that engines change were found by comparing all of them before and after; test_matrix.py tests that a run is
equal to the bit whatever ran before it.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fresh_ranks() -> Iterator[None]:
    """Wrap one training run, on all ranks."""
    # A process that forks ranks has imported these anyway.
    from accelerate.state import AcceleratorState, GradientState
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    globals_of = {module: dict(vars(module)) for module in (groups, p2p, parallel_state_sp)}
    attention = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    environment = dict(os.environ)
    yield
    parameter_offload.FWD_MODULE_STACK.clear()
    for module, values in globals_of.items():
        vars(module).update(values)
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    ALL_ATTENTION_FUNCTIONS._local_mapping.update(attention)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    _leave_groups()


def _leave_groups() -> None:
    """Destroy process groups, whose sockets and threads would accumulate."""
    # A rank that destroys a group while others still use it aborts them.
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
