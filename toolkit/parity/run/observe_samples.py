"""Observes each sample of the first global batch by itself, on the reference: losses, gradients, other labels."""

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.engines.base import Engine
from toolkit.parallel.loss import IGNORE, token_loss_sum
from toolkit.parallel.tensor.region import drops_activations
from toolkit.parity.first_batch import FirstBatch, sampled, wrong_labels

_MOST_SAMPLES = 64
"""Samples of a global batch that is looked at more closely: each costs a backward pass."""
_MOST_LOGITS = 2**26
"""Logits of all samples together that are kept for other labels."""


def observe_samples(engine: Engine, loader: MicroBatchLoader) -> tuple[tuple[tuple[float, int], ...], FirstBatch]:
    """Sum of token losses and number of targets of each sample of the first global batch, and what FirstBatch has.

    Leaves no gradients. Of a large global batch, losses alone.
    """
    looks_closer = loader.batch.global_batch_size <= _MOST_SAMPLES
    losses: list[tuple[float, int]] = []
    gradients: dict[str, list[NDArray[np.float64]]] = {}
    relabeled: dict[str, list[tuple[float, int]]] = {}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    # Reformer, whose layers are reversible, has no backward pass in evaluation; without dropout both are the same.
    engine.model.train(not drops_activations(engine.model.config))
    for sample in loader.first_batch():
        batch = sample.to(engine.device)
        with torch.set_grad_enabled(looks_closer):
            logits = engine.model(**batch.inputs(), use_cache=False).logits
            loss = token_loss_sum(logits, batch.labels)
        losses.append((float(loss), int((batch.labels != IGNORE).sum())))
        if not looks_closer:
            continue
        loss.backward()  # type: ignore[no-untyped-call]
        for name, gradient in engine.full_gradients():
            gradients.setdefault(name, []).append(sampled(gradient.detach().float().cpu().numpy()))
        engine.model.zero_grad(set_to_none=True)
        logarithms = logits.detach()[0].float().log_softmax(dim=-1)  # [s, v]
        ids = batch.input_ids[0].cpu().numpy()
        labels = batch.labels[0].cpu().numpy()
        for name, relabel in wrong_labels(IGNORE).items():
            wrong = torch.from_numpy(relabel(ids, labels).copy()).to(engine.device)
            value = float(_losses(logarithms, wrong.unsqueeze(0))[0])
            relabeled.setdefault(name, []).append((value, int((wrong != IGNORE).sum())))
        if logarithms.numel() * loader.batch.global_batch_size <= _MOST_LOGITS:
            seen.append((logarithms, batch.labels[0]))
    engine.model.train()
    crossed = None
    if seen:
        every = torch.stack([labels for _, labels in seen])  # [n, s]
        crossed = torch.stack([_losses(logarithms, every) for logarithms, _ in seen]).cpu().numpy()
    first = FirstBatch(
        gradients={name: np.stack(rows) for name, rows in gradients.items()},
        crossed=crossed,
        relabeled={name: np.array(rows, dtype=np.float64) for name, rows in relabeled.items()},
    )
    return tuple(losses), first


def _losses(logarithms: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the token losses of one sample's log-probabilities [s, v] for each row of labels [n, s]: [n]."""
    counts = labels != IGNORE
    chosen = logarithms.gather(-1, labels.clamp(min=0).t()).t()  # [s, n] -> [n, s]
    return -torch.where(counts, chosen, 0.0).double().sum(dim=1)
