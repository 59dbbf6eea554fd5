"""The plain formulas that everyone has: model states of the ZeRO paper, activations of Korthikanti et al. 2022.

Dims: b samples, s positions, h hidden, a heads, v vocabulary, t p tensor and pipeline ranks, L layers, D replicas.
"""

from published.reader import PublishedRun


def states(run: PublishedRun) -> float:
    """Rajbhandari et al. 2020, section 3: 16 bytes of a rank's parameters; 4 + 12/D, 2 + 14/D, 16/D with ZeRO."""
    setup = run.request.setup
    layout = setup.layout
    held = setup.model.parameters.numel / (layout.tp * layout.pp)
    whole, sharded = ((16, 0), (4, 12), (2, 14), (0, 16))[layout.zero_stage]
    return held * (whole + sharded / layout.dp)


def activations(run: PublishedRun) -> float:
    """Equations 1 to 6, of the first stage: p micro-batches of L/p layers; section 4.3's logits where p = 1."""
    setup = run.request.setup
    shape = setup.model.shape
    layout = setup.layout
    s, b, h, t = setup.seq_len, setup.micro_batch_size, shape.hidden, layout.tp
    has_scores = layout.recompute != "selective" and setup.computation.attention != "flash"
    scores = 5 * shape.heads * s / h if has_scores else 0
    layer = s * b * h * (((34 + scores) / t) if layout.sequence_parallel else 10 + (24 + scores) / t)
    if layout.recompute == "full":
        layer = 2 * s * b * h
    count = shape.layers / layout.pp * min(layout.pp, setup.accumulation)
    return layer * count + (4 * s * b * h / t * (1 + shape.vocab / h) if layout.pp == 1 else 0)


def peak(run: PublishedRun) -> float:
    """States and activations."""
    return states(run) + activations(run)
