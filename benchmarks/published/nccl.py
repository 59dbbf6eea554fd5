"""What NCCL 2.18 to 2.20 takes of a GPU for each communicator, in machines of eight GPUs behind NVSwitches.

init.cc and graph/connect.cc connect each channel three times: to the ring's predecessor, and to child and parent of
the tree. Each connection has buffers for all protocols. Where a communicator has more than two GPUs of a machine and
they can multicast (Hopper and later), transport/nvls.cc, ncclNvlsSetup, adds for each of these GPUs and each of 16
channels two times a buffer of 4 MiB with 2 MiB for its flags.
"""

from toolkit.estimate.overhead import NCCL_CHANNEL_BYTES, NCCL_CHANNELS
from toolkit.hardware import Gpu

GPUS_PER_NODE = 8

_CONNECTIONS = 3
_NVLS_CHANNELS = 16
_NVLS_BYTES = _NVLS_CHANNELS * 2 * (4 + 2) * 2**20


def communicator_bytes(ranks: int, local_ranks: int, gpu: Gpu) -> int:
    """Of one communicator. `local_ranks`: those of them in one machine."""
    if ranks == 1:
        return 0
    multicast = gpu.name.startswith(("H100", "H200", "B200")) and local_ranks > 2
    rings_and_trees = NCCL_CHANNELS[gpu.link] * _CONNECTIONS * NCCL_CHANNEL_BYTES
    return rings_and_trees + (_NVLS_BYTES * local_ranks if multicast else 0)
