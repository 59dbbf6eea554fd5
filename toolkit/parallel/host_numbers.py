"""Numbers from the host's random generator, and how ranks agree on one."""

import torch
import torch.distributed as dist


def draw_number() -> int:
    """Draw a number below 2^62 from PyTorch's generator of the host, which moves on. No device is waited for."""
    return int(torch.randint(2**62, (), device="cpu"))


def number_of_first_rank(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the number that the first rank of `group` has. It is sent from device to device: the host waits for it."""
    shared = torch.tensor(number, device=device)
    dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
    return int(shared)
