"""What PyTorch says about itself, as a line of JSON. Run in a process of its own: a broken torch must not end dstk's.

python -m toolkit.doctor.probe_torch
"""

import json
from typing import Any

from toolkit.doctor.facts import MARK


def facts() -> dict[str, Any]:
    """Versions, backends and devices."""
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "nccl": None,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "cuda_available": torch.cuda.is_available(),
        "devices": [],
    }
    if dist.is_available() and dist.is_nccl_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, version))
    if found["cuda_available"]:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found["devices"].append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_bytes": properties.total_memory,
                }
            )
        found["architectures"] = torch.cuda.get_arch_list()
        found["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    return found


if __name__ == "__main__":
    print(MARK + json.dumps(facts()))
