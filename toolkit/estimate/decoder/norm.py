"""Norms, as each family writes them.

Megatron's and apex's fused norms keep their input alone. Hugging Face's RMSNorm is eager Python in fp32, and keeps the
input in fp32, the normalised state in fp32, and in the model's dtype once more for the weight's gradient.
"""

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.family_rules import Norm
from toolkit.estimate.sizes.operations import add, layer_norm, mean, mul, of_result, plus, power, to
from toolkit.estimate.sizes.tape import Tensor

_FP32 = 4


def norm(c: Context, x: Tensor, kind: Norm | None = None, weight: tuple[int, ...] | None = None) -> Tensor:
    """The normalised x [.., n]. `kind`: the layer's own unless given; `weight`: its shape, [n] unless given."""
    kind = kind or c.style.norm
    scale = c.parameter(*(weight or x.shape[-1:]))
    match kind:
        case "layer":
            return layer_norm(x, [scale, c.parameter(*scale.shape)])
        case "layer_bare":
            return layer_norm(x, [scale])
        case "layer_1p":
            return layer_norm(x, [plus(scale), c.parameter(*scale.shape)])
        case "layer_fp32":
            return to(layer_norm(to(x, _FP32), []), x.itemsize)
        case "rms":
            return mul(scale, to(_normalised(to(x, _FP32)), x.itemsize))
        case "rms_bare":
            return to(_normalised(to(x, _FP32)), x.itemsize)
        case "rms_torch":
            # torch's own, without a weight: one kernel on a GPU, on a CPU the same steps as Llama's.
            return layer_norm(x, []) if not x.tape.on_cpu else to(_normalised(to(x, _FP32)), c.itemsize)
        case "rms_helium":
            return to(mul(to(scale, _FP32), _normalised(to(x, _FP32))), x.itemsize)
        case "rms_fp32_weight":
            return to(mul(_normalised(to(x, _FP32)), plus(to(scale, _FP32))), x.itemsize)
        case "rms_olmo2":
            return to(mul(scale, _normalised(to(x, _FP32))), x.itemsize)
        case "cohere":
            return to(_cohere(to(x, _FP32), scale), x.itemsize)


def _normalised(x: Tensor) -> Tensor:
    variance = mean(power(x))
    return mul(x, of_result(plus(variance), temporaries=2))


def _cohere(x: Tensor, scale: Tensor) -> Tensor:
    centre = mean(x)
    variance = mean(power(add(x, centre)))
    x = mul(add(x, centre), of_result(plus(variance), temporaries=2))
    return mul(to(scale, _FP32), x)
