"""Distillation: what an engine knows of its teacher, and what it has added up of the loss in a step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from toolkit.config.distill_section import DistillSection
from toolkit.parallel.distilled_loss import DistilledLoss, Divergence, TeacherTokens
from toolkit.parallel.tensor.vocabulary import VocabularyShard


class Distillation:
    """The distillation of an engine. Micro-batches without a teacher, as in a validation, have token losses alone."""

    def __init__(self, section: DistillSection, device: torch.device) -> None:
        self.divergence = Divergence(weight=section.weight, temperature=section.temperature, kind=section.divergence)
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        """Sums of the step on this rank: losses, token losses, and divergences."""

    def begin_step(self) -> None:
        """Forget the step before."""
        self.totals.zero_()

    def add(self, loss: torch.Tensor, token_losses: torch.Tensor, divergences: torch.Tensor) -> None:
        """Add the loss of a micro-batch, a scalar, and the parts that it is made of."""
        self.totals += torch.stack([loss.detach().double(), token_losses.sum().double(), divergences.sum().double()])

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        teacher: TeacherTokens,
        weights: torch.Tensor | None,
        shard: VocabularyShard | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the losses of a micro-batch: logits [b, s, v], labels and weights [b, s]."""
        rows = logits.shape[-1]
        parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = DistilledLoss.apply(  # type: ignore[no-untyped-call]
            logits.flatten(0, -2),
            labels.flatten(),
            teacher.map(lambda tensor: tensor.flatten(0, -2)),
            None if weights is None else weights.flatten(),
            self.divergence,
            shard or VocabularyShard(size=rows, start=0, rows=rows),
            group,
        )
        self.add(*parts)
        return parts[0]

    def local_totals(self) -> torch.Tensor:
        """Return this rank's share of `totals`, a copy."""
        return self.totals.clone()

    def metrics(self, totals: Sequence[float], count: int) -> dict[str, float]:
        """Return the means of a step over its `count` targets: the token loss, and the divergence, in nats."""
        return {"token_loss": totals[1] / count, "divergence": totals[2] / count}
