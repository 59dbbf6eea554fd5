"""Seconds of attention: fused kernels by their published rates, others by the traffic of their scores."""

from toolkit.hardware import Gpu
from toolkit.models.shape import ModelShape
from toolkit.planner.execution import Execution
from toolkit.planner.kernels import LAUNCH_SECONDS, fraction, stream_seconds
from toolkit.planner.passes import Passes, Work

_RATES = {"flash1": (0.33, 0.28), "flash2": (0.60, 0.53), "flash3": (0.60, 0.48), "cudnn": (0.60, 0.48)}
"""Shares of the 16-bit peak, forward and backward, for heads of 128 and long sequences. Sources: FlashAttention (Dao et
al. 2022) and FlashAttention-2 (Dao 2023, figures 5 to 7: causal, on an A100), FlashAttention-3 (Shah et al. 2024,
figures 5 and 6: on an H100, with cuDNN's)."""
_BEFORE_HOPPER = 400e12
"""FlashAttention-2 uses no instructions of Hopper: on later GPUs its rate is about 0.35 of the peak (FlashAttention-3,
figure 5)."""
_OLD_KERNEL = 0.58
_PRODUCTS = (4, 8)
"""Bytes moved per score by the matrix products in 16 bits: written and read forward; both twice backward."""
_SCORES = {"fused-softmax": (4, 6), "unfused": (28, 22), "eager": (22, 16)}
"""By softmax and mask: one kernel; kernels of their own that convert to fp32 and back."""
_DROPOUT = (5, 5)


def attention_seconds(gpu: Gpu, shape: ModelShape, work: Work, run: Execution) -> Passes:
    """Scores, softmax and weighted sum of all heads of a rank: causal, as kernels that skip masked blocks have it."""
    heads = shape.heads / work.tp / work.heads_split
    tokens = work.tokens * work.heads_split
    width = shape.head_dim if shape.latent is None else (shape.head_dim + shape.latent.value_dim) / 2
    flops = 4.0 * tokens * work.seq_len * heads * width
    peak = gpu.peak_flops(run.wide) or gpu.fp32_flops
    if run.attention not in _SCORES:
        forward, backward = _RATES[run.attention]
        older = _OLD_KERNEL if peak > _BEFORE_HOPPER and run.attention in ("flash1", "flash2") else 1.0
        # Softmax costs narrow heads as much as wide ones, whose products are larger.
        narrow = min(1.0, 0.5 + shape.head_dim / 256)
        # Blocks on the diagonal are half empty, and pipelines of loads have to fill.
        rate = peak * older * narrow * work.seq_len / (work.seq_len + 512)
        return Passes(
            forward=flops / 2 / (rate * forward) + LAUNCH_SECONDS,
            backward=2.5 * flops / 2 / (rate * backward) + 2 * LAUNCH_SECONDS,
        )
    scores = heads * tokens * work.seq_len * run.activation_bytes / 2
    seconds = []
    for way, (passes, touched) in enumerate(zip((1, 2), _PRODUCTS, strict=True)):
        # Products over narrow heads write or read every score: they are as often bound by memory as by their units.
        product = max(passes * flops / (fraction(gpu, run.wide) * peak), stream_seconds(gpu, scores * touched, 0))
        rest = _SCORES[run.attention][way] + (_DROPOUT[way] if run.dropout else 0)
        seconds.append(product + stream_seconds(gpu, scores * rest, 6))
    return Passes(forward=seconds[0], backward=seconds[1])
