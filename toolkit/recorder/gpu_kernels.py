"""GpuKernels: the kernels that a GPU runs, in a pass on fake tensors of a CPU.

Which kernel runs decides what is kept for the backward pass. A torch without CUDA has no backward pass over fake CUDA
tensors, so fake CPU tensors stand in, and the functions whose CUDA kernel saves something else are replaced.
LayerNorm's statistics and the buffers that a GPU's kernels free before they return (`workspace`) are in trace.py.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

_LARGEST_FLASH_HEAD = 256
_RAISED_NAMES = (
    "acos asin cosh cumprod cumsum erfinv exp expm1 log log10 log1p log2 logsumexp pow prod reciprocal rsqrt sinh "
    "softplus sum tan"
)
"""Functions that autocast runs in fp32 on a GPU (ATen/autocast_mode.h), and on a CPU in the input's dtype."""
_RAISED: set[Any] = {
    function
    for name in _RAISED_NAMES.split()
    for function in (getattr(torch, name, None), getattr(torch.Tensor, name, None), getattr(F, name, None))
    if function is not None
} | {
    torch.Tensor.__pow__,
    torch.square,
    torch.Tensor.square,
    F.layer_norm,
    torch.layer_norm,
    F.softmax,
    torch.softmax,
    torch.Tensor.softmax,
    F.log_softmax,
    torch.log_softmax,
}


class GpuKernels(TorchFunctionMode):
    """A mode in which attention, dropout and autocast are those of a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attend(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func is F.rms_norm:
            return _rms_norm(*args, **kwargs)
        if func in _RAISED and torch.is_autocast_enabled("cpu") and kwargs.get("dtype") is None:
            args = tuple(_raised(argument) for argument in args)
        return func(*args, **kwargs)


def _raised(value: Any) -> Any:
    is_low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_low else value


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop elements in one kernel, which saves a mask of one byte an element."""
    if not (p and training):
        return x
    dropped: torch.Tensor = torch.native_dropout(x, p, True)[0]
    return dropped


def _rms_norm(x: torch.Tensor, shape: list[int], weight: Any = None, eps: float | None = None) -> torch.Tensor:
    normed: torch.Tensor = aten._fused_rms_norm(x, shape, weight, eps)[0]
    return normed


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention by the first kernel of PyTorch that takes the inputs: flash, memory-efficient, unfused.

    Shapes: q [b, heads, s, d], k and v [b, key-value heads, s, d]; returns [b, heads, s, d].
    Source: ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    q, k, v = (as_autocast(operand) for operand in (q, k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        numbers = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device)
        attn_mask = numbers.masked_fill_(attn_mask.logical_not(), float("-inf"))
    takes_flash = q.dtype != torch.float32 and q.shape[-1] == v.shape[-1] <= _LARGEST_FLASH_HEAD
    if attn_mask is None and takes_flash:
        outputs = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
    elif k.shape[1] == q.shape[1]:
        bias = None if attn_mask is None else attn_mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
        saves_logsumexp = q.requires_grad or k.requires_grad or v.requires_grad
        outputs = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, saves_logsumexp, dropout_p, is_causal, scale=scale
        )
    else:
        outputs = aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    attended: torch.Tensor = outputs[0]
    return attended


def as_autocast(operand: torch.Tensor) -> torch.Tensor:
    """Cast an operand of attention as autocast does; what is on the meta device stays."""
    device = operand.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return operand
    return operand.to(torch.get_autocast_dtype(device))
