"""The plain formulas that everyone has: model states of the ZeRO paper, activations of Korthikanti et al. 2022.

Dims: b samples, s positions, h hidden, a heads, v vocabulary, t p tensor and pipeline ranks, L layers, D replicas.
"""

from published.reader import Asked


def states(asked: Asked) -> float:
    """Rajbhandari et al. 2020, section 3: 16 bytes of a rank's parameters; 4 + 12/D, 2 + 14/D, 16/D with ZeRO."""
    layout = asked.layout
    held = asked.model.parameters.numel / (layout.tp * layout.pp)
    whole, sharded = ((16, 0), (4, 12), (2, 14), (0, 16))[layout.zero_stage]
    return held * (whole + sharded / layout.dp)


def activations(asked: Asked) -> float:
    """Equations 1 to 6, of the first stage: p micro-batches of L/p layers; section 4.3's logits where p = 1."""
    shape, layout, work = asked.model.shape, asked.layout, asked.work
    s, b, h, t = work.seq_len, work.micro_batch_size, shape.hidden, layout.tp
    scores = 0 if work.recompute == "selective" or work.attention == "flash" else 5 * shape.heads * s / h
    layer = s * b * h * (((34 + scores) / t) if layout.sequence_parallel else 10 + (24 + scores) / t)
    if work.recompute == "full":
        layer = 2 * s * b * h
    count = shape.layers / layout.pp * min(layout.pp, work.accumulation)
    return layer * count + (4 * s * b * h / t * (1 + shape.vocab / h) if layout.pp == 1 else 0)


def peak(asked: Asked) -> float:
    """States and activations."""
    return states(asked) + activations(asked)
