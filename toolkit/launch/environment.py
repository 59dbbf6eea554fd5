"""The software versions and the device of a run, recorded with its results."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from toolkit import __version__
from toolkit.hardware import cpu_name

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return the versions of the toolkit, Python and the packages that compute, and the device, by name."""
    return {
        "toolkit": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "device": describe_device(device),
    }


def local_device() -> torch.device:
    """Return the kind of device that ranks on this machine use, without initializing CUDA for forked ranks."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def describe_device(device: torch.device) -> str:
    """Return such as `NVIDIA H100 80GB HBM3 x 8` or `AMD EPYC 7763, 2 cores`."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} x {torch.cuda.device_count()}"
    return cpu_name()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
