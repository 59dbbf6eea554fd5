"""model.kernels: liger: norms, rotary embeddings and MLPs by the Triton kernels of liger-kernel.

Liger replaces the forward passes of a model's norms and MLPs, which still call the model's own linear layers, sharded
or with adapters. It also replaces names in transformers' module of the family; these are put back, so that other models
of this process stay plain, and the attention of this model alone gets Liger's rotary embedding.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType, MethodType

import torch
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from toolkit.errors import ModelError, RunError, Setting
from toolkit.models.support import LIGER_FAMILIES

_FIELD = "model.kernels"
_TORCH: Setting = (_FIELD, "torch")
_OLDEST = "0.8.5"
"""The oldest version that has the functions which are called."""


def check_liger(device: torch.device) -> None:
    """Raise RunError where Liger's kernels cannot run."""
    if device.type != "cuda":
        raise RunError.of(_FIELD, "liger", f"Liger's kernels run on CUDA, and this run is on {device.type}", _TORCH)
    try:
        installed = version("liger-kernel")
    except PackageNotFoundError:
        installed = ""
    if not installed or Version(installed) < Version(_OLDEST):
        reason = f"liger-kernel {installed} is too old" if installed else "the package liger-kernel is not installed"
        raise RunError.of(_FIELD, "liger", reason, f"pip install 'liger-kernel>={_OLDEST}'", _TORCH)


def take_liger(model: PreTrainedModel) -> None:
    """Let `model`, with all its layers, compute by Liger's kernels. Raises ModelError for a family not tested."""
    family = model.config.model_type
    modeling = sys.modules[type(model).__module__]
    if family not in LIGER_FAMILIES or not modeling.__name__.startswith("transformers.models."):
        settings = (("model.kernels", "liger"), ("model_type", family))
        reason = f"Liger's kernels were tested for {', '.join(LIGER_FAMILIES)}"
        raise ModelError.between(settings, reason, _TORCH)
    # Liger's MLPs do not look at the config.
    wanted = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    for module in model.modules():
        activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
        if activation is not None and type(activation) is not type(ACT2FN[wanted]):
            settings = (("model.kernels", "liger"), ("activation", type(activation).__name__))
            raise ModelError.between(settings, f"Liger's MLP for {family} computes {wanted}", _TORCH)
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    names = vars(modeling)
    before = dict(names)
    try:
        _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
        functions = {name: value for name, value in names.items() if value is not before.get(name)}
    finally:
        names.update(before)
    functions = {name: value for name, value in functions.items() if not isinstance(value, type)}
    for module in model.modules():
        forward = type(module).forward
        if isinstance(forward, FunctionType) and functions.keys() & set(forward.__code__.co_names):
            # Attention reads `apply_rotary_pos_emb` among the globals of its file, and takes no such function as an
            # argument. To replace the global would change all models of this process, so the modules of this model
            # get a copy of their forward pass with globals of its own.
            with_kernels = FunctionType(
                forward.__code__, before | functions, forward.__name__, forward.__defaults__, forward.__closure__
            )
            with_kernels.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(with_kernels, module)
