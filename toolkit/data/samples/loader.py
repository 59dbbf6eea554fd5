"""MicroBatchLoader: the micro-batches of one rank, in order, built ahead; and its share of the validation samples."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from toolkit.config.job import Job
from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import DataSection, Recipe
from toolkit.data.samples.document_samples import DocumentSamples
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.token_cache import Split, TokenCorpus
from toolkit.errors import DataError
from toolkit.parallel.loss import IGNORE
from toolkit.phases import PhaseReporter, ignore_phase
from toolkit.seeds import derive_seed

_EMPTY = torch.empty(0, dtype=torch.long)


@contextmanager
def prefetched(micro_batches: Iterable[MicroBatch], *, depth: int = 2) -> Iterator[Iterator[MicroBatch]]:
    """Iterate over `micro_batches` in order, built by a thread up to `depth` ahead; in pinned memory if there is CUDA.

    An error in the thread is raised where its micro-batch is asked for. The thread ends with the `with` block.
    """
    source = iter(micro_batches)
    pins = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"

    def build() -> MicroBatch | None:
        micro_batch = next(source, None)
        return micro_batch.pin_memory() if pins and micro_batch is not None else micro_batch

    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        ahead = deque(pool.submit(build) for _ in range(depth))

        def take() -> Iterator[MicroBatch]:
            while (micro_batch := ahead.popleft().result()) is not None:
                ahead.append(pool.submit(build))
                yield micro_batch

        try:
            yield take()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def open_samples(
    corpus: TokenCorpus, section: DataSection, *, split: Split, seed: int, global_batch_size: int
) -> Samples:
    """Open the samples of one split. Raises DataError if there is not one."""
    fields: dict[str, Any] = {
        "seq_len": section.seq_len,
        "packing": section.packing,
        "split": split,
        "seed": seed,
        "global_batch_size": global_batch_size,
    }
    if corpus.trained_tokens is not None:
        if section.packing == "packed" and not section.masks_documents:
            reason = "its labels leave tokens out, and such rows are whole documents that do not attend to each other"
            given = (("data.format", section.format), ("data.document_masking", False))
            raise DataError.between(given, reason, ("data.document_masking", True), ("data.packing", "padded"))
        return DocumentSamples(corpus, overlong=section.overlong, **fields)
    return Samples(corpus, document_masking=section.document_masking, **fields)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoader:
    """Which micro-batches a rank computes in each step. Needs no communication.

    `reads`: whether this rank needs tokens. The middle stages of a pipeline do not; their micro-batches are empty but
    for the dropout seeds.
    """

    recipe: Recipe
    layout: Layout
    batch: Batch
    data_rank: int
    reads: bool = True
    train: Samples
    validation: Samples | None = None
    report_phase: PhaseReporter = ignore_phase

    @classmethod
    def open(cls, job: Job, corpus: TokenCorpus, *, rank: int) -> Self:
        """Build the loader of global rank `rank`. Raises DataError if the corpus is too small for one sample."""
        recipe, layout, batch = job.recipe, job.layout, job.batch
        samples = partial(
            open_samples, corpus, recipe.data, seed=recipe.train.seed, global_batch_size=batch.global_batch_size
        )
        coordinate = layout.coordinate(rank)
        return cls(
            recipe=recipe,
            layout=layout,
            batch=batch,
            data_rank=coordinate.data,
            reads=coordinate.pipe in (0, layout.pp - 1),
            train=samples(split="train"),
            validation=samples(split="eval") if recipe.train.eval_every else None,
        )

    def prefetch(
        self, first_step: int = 0, *, skipped_batches: int = 0
    ) -> AbstractContextManager[Iterator[MicroBatch]]:
        """Build this rank's micro-batches from `first_step` on in the background, at most two steps ahead.

        `skipped_batches`: step i reads the global batch i + skipped_batches.
        """
        micro_batches = (
            self._micro_batch(step + skipped_batches, self._positions(accumulation_step))
            for step in range(first_step, self.recipe.train.steps)
            for accumulation_step in range(self.batch.accumulation)
        )
        return prefetched(micro_batches, depth=2 * self.batch.accumulation)

    def micro_batches(self, step: int, prefetched: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Take this rank's share of the global batch of `step` (from 0) from the `prefetched` micro-batches."""
        for _ in range(self.batch.accumulation):
            self.report_phase("data", step + 1)
            micro_batch = next(prefetched)
            self.report_phase("forward")
            yield micro_batch

    def target_tokens(self, batch_index: int) -> int:
        """Count the target tokens of a whole global batch."""
        return self.train.target_count(batch_index, np.arange(self.batch.global_batch_size))

    def validation_batches(self) -> Iterator[MicroBatch]:
        """This rank's share of the validation samples, which are spread evenly over the validation split.

        Every rank yields the same number of batches, as sharded engines need: the last ones are padded with samples
        whose labels are all ignored.
        """
        assert self.validation is not None
        count = min(self.recipe.train.eval_samples, len(self.validation))
        chosen = np.arange(count) * len(self.validation) // count
        stride = self.batch.micro_batch_size * self.batch.dp
        for start in range(0, count, stride):
            self.report_phase("evaluate")
            if not self.reads:
                yield MicroBatch(input_ids=_EMPTY, labels=_EMPTY)
                continue
            positions = start + self.data_rank * self.batch.micro_batch_size + np.arange(self.batch.micro_batch_size)
            micro_batch = self.validation.batch(0, chosen[np.minimum(positions, count - 1)])
            micro_batch.labels[torch.from_numpy(positions >= count)] = IGNORE
            yield micro_batch

    def first_batch(self) -> Iterator[MicroBatch]:
        """Yield every sample of the first global batch by itself, on any rank."""
        for position in range(self.batch.global_batch_size):
            yield self.train.batch(0, [position])

    def _micro_batch(self, batch_index: int, positions: range) -> MicroBatch:
        # Seeded by the position, not by the rank: every layout, and a resumed run, drops the same activations.
        seed = derive_seed("dropout", self.recipe.train.seed, batch_index, positions[0])
        if not self.reads:
            return MicroBatch(input_ids=_EMPTY, labels=_EMPTY, dropout_seed=seed)
        return self.train.batch(batch_index, positions, dropout_seed=seed)

    def _positions(self, accumulation_step: int) -> range:
        start = self.batch.block_start(accumulation_step=accumulation_step, data_rank=self.data_rank)
        return range(start, start + self.batch.micro_batch_size)
