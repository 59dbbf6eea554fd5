"""Synthetic parity runs: a consistent baseline of a small model to plant one mistake in.

Four layers of a norm, an attention with bias and an MLP, between an embedding and a final norm. Updates are those of
plain SGD, and every number follows from one seed.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from toolkit.parity import LossCurve, ParityRun, Tensors
from toolkit.parity.first_batch import FirstBatch, sampled
from toolkit.parity.parity_run import BEFORE_EXPERTS
from toolkit.parity.sequence_facts import SequenceFacts

LAYERS, WIDTH, VOCABULARY, STEPS = 4, 8, 31, 12
RATE = 0.1

Array = NDArray[np.floating]


def shapes(experts: int = 0) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        parts = {"norm.weight": (WIDTH,), "attn.weight": (WIDTH, WIDTH), "attn.bias": (WIDTH,)}
        if experts:
            parts |= {"mlp.experts.up": (experts, WIDTH, WIDTH), "mlp.router.weight": (experts, WIDTH)}
        else:
            parts |= {"mlp.weight": (WIDTH, WIDTH)}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return found | {"model.norm.weight": (WIDTH,)}


def draw(seed: int, experts: int = 0) -> dict[str, Array]:
    chance = np.random.default_rng(seed)
    return {name: chance.normal(size=shape).astype(np.float32) for name, shape in shapes(experts).items()}


def norm_of(tensors: Tensors) -> float:
    return float(np.sqrt(sum(float(np.sum(value.astype(np.float64) ** 2)) for value in tensors.values())))


def baseline(*, experts: int = 0) -> ParityRun:
    """A dense model, or a mixture with so many experts in each layer."""
    initial, gradients = draw(1, experts), draw(2, experts)
    updates = {name: -RATE * value for name, value in gradients.items()}
    micro_losses = tuple((4.0 * (3 + 5 * place), 3 + 5 * place) for place in range(8))
    micro_losses = tuple((loss * (1 + 0.1 * place), count) for place, (loss, count) in enumerate(micro_losses))
    first = sum(loss for loss, _ in micro_losses) / sum(count for _, count in micro_losses)
    return ParityRun(
        curve=LossCurve(
            label="reference",
            losses=tuple(first - 0.1 * step for step in range(STEPS)),
            grad_norms=(norm_of(gradients), *(2.0 + 0.01 * step for step in range(1, STEPS))),
        ),
        initial=initial,
        first_gradients=gradients,
        first_updates=updates,
        parameters={name: value + 5 * updates[name] for name, value in initial.items()},
        outputs=_outputs(before_experts=experts > 0),
        batches=tuple(f"{step:016x}" for step in range(STEPS)),
        learning_rates=(RATE,) * STEPS,
        micro_losses=micro_losses,
        first_batch=_first_batch(gradients, micro_losses),
        micro_batch_size=2,
        mean_outputs=_mean_outputs(),
    )


def with_completions(run: ParityRun) -> ParityRun:
    """The same run on four pairs of a text of twenty, with DPO: in the first step all pairs weigh the same."""
    chance = np.random.default_rng(5)
    references = chance.uniform(-40, -10, size=(20, 2))
    signs = np.tile([1.0, -1.0], 4)
    first = SequenceFacts(
        pieces=np.repeat(np.arange(4), 2),
        sides=np.tile([0, 1], 4),
        ranks=np.zeros(8, dtype=np.int64),
        targets=chance.integers(3, 12, size=8),
        policy=references[:4].reshape(-1),
        reference=references[:4].reshape(-1),
        coefficients=0.05 * signs,
    )
    slopes = np.repeat([0.047, 0.049, 0.052, 0.053], 2)
    later = replace(first, policy=first.policy + 0.5, coefficients=slopes * signs)
    return replace(run, sequences=first, later_sequences=later, references=references)


def _first_batch(gradients: Tensors, losses: tuple[tuple[float, int], ...]) -> FirstBatch:
    """Gradients of samples that sum to the whole one, and losses that other labels would give."""
    chance = np.random.default_rng(3)
    targets, rows = sum(count for _, count in losses), {}
    for name, gradient in gradients.items():
        whole = targets * sampled(gradient)
        parts = chance.normal(size=(len(losses) - 1, len(whole)))
        rows[name] = np.concatenate([parts, [whole - parts.sum(axis=0)]])
    own = np.array(losses, dtype=np.float64)
    crossed = own[:, :1] * chance.uniform(0.8, 1.2, size=(len(losses), len(losses)))
    np.fill_diagonal(crossed, own[:, 0])
    relabeled = {"the tokens themselves instead of the next ones": own * [0.7, 1.0]}
    return FirstBatch(gradients=rows, crossed=crossed, relabeled=relabeled)


def _mean_outputs() -> tuple[dict[str, Array], dict[str, Array]]:
    """In the first step, and after the first update."""
    chance = np.random.default_rng(4)
    first, second = (
        {f"model.layers.{layer}.attn": chance.normal(size=WIDTH) for layer in range(LAYERS)} for _ in range(2)
    )
    return first, second


def _outputs(*, before_experts: bool) -> dict[str, float]:
    outputs = {"embeddings": 1.0}
    for layer in range(LAYERS):
        outputs |= {f"model.layers.{layer}{BEFORE_EXPERTS}": 1.5 + layer} if before_experts else {}
        outputs[f"model.layers.{layer}"] = 2.0 + layer
    return outputs


def changed(tensors: Tensors, change: Callable[[Array], Array], *parts: str) -> dict[str, Array]:
    """The tensors, with `change` done to those whose name has one of `parts` (to all where none is given)."""
    return {
        name: change(value) if not parts or any(part in name for part in parts) else value
        for name, value in tensors.items()
    }


def with_losses(run: ParityRun, change: Callable[[int, float], float]) -> ParityRun:
    """The loss of each step (from 1) changed."""
    losses = tuple(change(step, loss) for step, loss in enumerate(run.curve.losses, start=1))
    return replace(run, curve=replace(run.curve, losses=losses))


def with_norms(run: ParityRun, change: Callable[[int, float], float]) -> ParityRun:
    norms = tuple(change(step, norm) for step, norm in enumerate(run.curve.grad_norms, start=1))
    return replace(run, curve=replace(run.curve, grad_norms=norms))


def with_gradients(run: ParityRun, change: Callable[[Array], Array], *parts: str) -> ParityRun:
    """Gradients changed, and the first norm with them."""
    gradients = changed(run.first_gradients, change, *parts)
    ratio = norm_of(gradients) / norm_of(run.first_gradients)
    found = with_norms(run, lambda step, norm: norm * ratio if step == 1 else norm)
    return replace(found, first_gradients=gradients)


def without_tensors(run: ParityRun) -> ParityRun:
    """As a finished run is known: by what it wrote down."""
    without = replace(run, parameters={}, initial={}, first_gradients={}, first_updates={}, outputs={}, micro_losses=())
    return replace(without, first_batch=FirstBatch(), mean_outputs=())
