"""Observes an objective of completions during a step: what its formula gets of each, and the weight of its tokens."""

import numpy as np
import torch
import torch.distributed as dist

from toolkit.data.samples.micro_batch import Sequences
from toolkit.engines.base import Engine
from toolkit.engines.objectives.formulas import SequenceSums
from toolkit.parity.run.observe import gather_on_rank_0
from toolkit.parity.sequence_facts import SequenceFacts


class ObjectiveObserver:
    """Watches the objective of an engine from `start` to `stop`; changes nothing of what it computes."""

    def __init__(self, engine: Engine) -> None:
        self._objective = engine.objective
        # Ranks that share a completion, or that have copies of it, see the same: one of them tells.
        partition = engine.partition
        is_first_copy = partition is None or partition.groups.is_first_of_tensor
        self._tells = self._objective is not None and self._objective.is_first and is_first_copy
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._rows: list[torch.Tensor] = []

    def start(self) -> None:
        """Watch from here on."""
        if self._objective is not None:
            self._objective.observer = self._note

    def stop(self) -> SequenceFacts:
        """Return what all ranks have seen, complete on rank 0. A collective call."""
        if self._objective is None:
            return SequenceFacts()
        self._objective.observer = None
        local = torch.cat(self._rows).cpu().numpy() if self._rows and self._tells else np.empty((0, 7))
        self._rows = []
        parts = gather_on_rank_0(local)
        columns = np.concatenate(parts).T if parts else np.empty((7, 0))
        pieces, sides, ranks, targets = columns[:4].astype(np.int64)
        policy, reference, coefficients = columns[4:]
        return SequenceFacts(
            pieces=pieces,
            sides=sides,
            ranks=ranks,
            targets=targets,
            policy=policy,
            reference=reference,
            coefficients=coefficients,
        )

    def _note(self, sequences: Sequences, inputs: SequenceSums, losses: torch.Tensor, weights: torch.Tensor) -> None:
        assert self._objective is not None
        count = 2 * len(sequences.pieces)
        sums = torch.zeros(count + 1, 3, dtype=torch.float64, device=losses.device)  # positions, targets, weights
        rows = torch.stack([torch.ones_like(losses), losses.detach() != 0, weights], dim=-1)
        sums.index_add_(0, sequences.numbers.flatten(), rows.flatten(0, 1).double())
        self._objective.sum_over_sequence_ranks(sums)
        positions, targets, weight_sums = sums[:-1].unbind(1)
        facts = torch.stack(
            [
                sequences.pieces.repeat_interleave(2).double(),
                torch.arange(count, device=losses.device).remainder(2).double(),
                torch.full_like(targets, self._rank),
                targets,
                inputs.policy.flatten().double(),
                inputs.reference.flatten().double(),
                weight_sums / positions.clamp(min=1.0),
            ],
            dim=-1,
        )
        is_there = (sequences.tokens.flatten() > 0) & sequences.is_counted.repeat_interleave(2)
        self._rows.append(facts[is_there])
