"""Feed: the micro-batches of one rank, in order, built ahead; and its share of the validation samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from toolkit.batch import Batch
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.train.data.prefetch import Prefetcher, TensorBatch
from toolkit.train.data.samples import Samples
from toolkit.train.data.tokens import Split, TokenCorpus
from toolkit.train.engines.base import MicroBatch
from toolkit.train.loss import IGNORE
from toolkit.train.seeds import derive_seed
from toolkit.train.watchdog.mark import Mark, unwatched

_NOTHING = TensorBatch(input_ids=torch.empty(0, dtype=torch.long), labels=torch.empty(0, dtype=torch.long))


@dataclass(frozen=True, kw_only=True)
class Feed:
    """The samples of one rank: which micro-batches it computes in each step. Needs no communication.

    `reads`: whether this rank looks at tokens. The stages in the middle of a pipeline do not; their micro-batches are
    empty but for the seeds.
    """

    recipe: Recipe
    layout: Layout
    batch: Batch
    data_rank: int
    reads: bool = True
    train: Samples
    held_out: Samples | None = None
    mark: Mark = unwatched
    """Told when this rank waits for data, and when it goes on with them."""

    @classmethod
    def open(cls, recipe: Recipe, layout: Layout, batch: Batch, corpus: TokenCorpus, *, rank: int) -> Self:
        """The feed of global rank `rank`. Raises DataError where the corpus is too small for one sample."""

        def samples(split: Split) -> Samples:
            return Samples(
                corpus,
                seq_len=recipe.data.seq_len,
                packing=recipe.data.packing,
                split=split,
                seed=recipe.train.seed,
                global_size=batch.global_size,
            )

        place = layout.coordinate(rank)
        return cls(
            recipe=recipe,
            layout=layout,
            batch=batch,
            data_rank=place.data,
            reads=place.pipe in (0, layout.pp - 1),
            train=samples("train"),
            held_out=samples("eval") if recipe.train.eval_every else None,
        )

    def prefetch(self, first_step: int = 0, *, left_out: int = 0) -> Prefetcher:
        """This rank's micro-batches from `first_step` on, built ahead in the background; two steps at most.

        `left_out`: how many global batches later than its own a step reads.
        """
        schedule = (
            (step + left_out, self._positions(accumulation_step))
            for step in range(first_step, self.recipe.train.steps)
            for accumulation_step in range(self.batch.accumulation)
            if self.reads
        )
        return Prefetcher(self.train, schedule, depth=2 * self.batch.accumulation)

    def micro_batches(self, step: int, ahead: Iterator[TensorBatch], *, left_out: int = 0) -> Iterator[MicroBatch]:
        """This rank's share of the global batch of `step` (from 0), taken from what is built `ahead`."""
        for accumulation_step in range(self.batch.accumulation):
            self.mark("data", step + 1)
            tensors = next(ahead) if self.reads else _NOTHING
            self.mark("forward")
            start = self._positions(accumulation_step)[0]
            yield MicroBatch(
                input_ids=tensors.input_ids,
                labels=tensors.labels,
                position_ids=tensors.position_ids,
                # Seeded by the block, not by the rank: every layout, and a restart, drops the same activations.
                dropout_seed=derive_seed("dropout", self.recipe.train.seed, step + left_out, start),
            )

    def target_tokens(self, step: int) -> int:
        """Target tokens of the whole global batch of `step`."""
        return self.train.target_count(step, np.arange(self.batch.global_size))

    def held_out_batches(self) -> Iterator[MicroBatch]:
        """This rank's share of the validation samples, which are spread evenly over the held-out text.

        Every rank yields the same number of batches, as sharded engines need: the last ones are filled up with samples
        that do not count.
        """
        assert self.held_out is not None
        count = min(self.recipe.train.eval_samples, len(self.held_out))
        chosen = np.arange(count) * len(self.held_out) // count
        stride = self.batch.micro_size * self.batch.dp
        for start in range(0, count, stride):
            self.mark("evaluate")
            if not self.reads:
                yield MicroBatch(input_ids=_NOTHING.input_ids, labels=_NOTHING.labels, dropout_seed=0)
                continue
            positions = start + self.data_rank * self.batch.micro_size + np.arange(self.batch.micro_size)
            samples = self.held_out.batch(0, chosen[np.minimum(positions, count - 1)])
            samples.labels[positions >= count] = IGNORE
            yield MicroBatch(
                input_ids=torch.from_numpy(samples.input_ids),
                labels=torch.from_numpy(samples.labels),
                position_ids=None if samples.position_ids is None else torch.from_numpy(samples.position_ids),
                dropout_seed=0,
            )

    def first_batch(self) -> Iterator[MicroBatch]:
        """Every sample of the first global batch by itself, whoever computes it when training."""
        for place in range(self.batch.global_size):
            sample = self.train.batch(0, [place])
            yield MicroBatch(
                input_ids=torch.from_numpy(sample.input_ids),
                labels=torch.from_numpy(sample.labels),
                position_ids=None if sample.position_ids is None else torch.from_numpy(sample.position_ids),
                dropout_seed=0,
            )

    def _positions(self, accumulation_step: int) -> range:
        start = self.batch.block_start(accumulation_step=accumulation_step, data_rank=self.data_rank)
        return range(start, start + self.batch.micro_size)
