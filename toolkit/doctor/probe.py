"""Print what PyTorch or DeepSpeed reports about itself as a line of JSON.

A process of its own protects dstk from a broken installation: python -m toolkit.doctor.probe torch|deepspeed
"""

import json
import sys
from typing import Any

from toolkit.doctor.facts import MARK


def torch_facts() -> dict[str, Any]:
    """Return versions, backends and devices."""
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {
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
        facts["nccl"] = ".".join(map(str, version))
    if facts["cuda_available"]:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            device = {"name": properties.name, "capability": capability, "memory_bytes": properties.total_memory}
            facts["devices"].append(device)
        facts["architectures"] = torch.cuda.get_arch_list()
        facts["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    return facts


def deepspeed_facts() -> dict[str, Any]:
    """Return the version, the accelerator, and which ops are built or can be."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    ops = {}
    for name, builder in ALL_OPS.items():
        try:
            compatible = bool(builder.is_compatible(verbose=False))
        except Exception:  # an op whose check itself fails
            compatible = False
        ops[name] = {"built": bool(installed_ops.get(name, False)), "can_be_built": compatible}
    return {"version": deepspeed.__version__, "accelerator": get_accelerator()._name, "ops": ops}


if __name__ == "__main__":
    print(MARK + json.dumps({"torch": torch_facts, "deepspeed": deepspeed_facts}[sys.argv[1]]()))
