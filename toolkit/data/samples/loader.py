"""MicroBatchLoader: the micro-batches of one rank, in order, built ahead; and its share of the validation samples."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.config.data_section import PREFERENCE_FORMATS, DataSection
from toolkit.config.job import Job
from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.data.samples.document_samples import DocumentSamples
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.samples.mixture import MixtureSamples, choose_weights
from toolkit.data.samples.preference_samples import PreferenceSamples
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.corpora import Corpora
from toolkit.data.tokens.token_cache import Split, TokenCorpus
from toolkit.errors import DataError
from toolkit.parallel.context.sequence import SequenceShare
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
    corpus: TokenCorpus,
    section: DataSection,
    *,
    split: Split,
    seed: int,
    global_batch_size: int,
    shuffled: bool = True,
    has_mismatched: bool = False,
) -> Samples:
    """Open the samples of one split of a corpus. Raises DataError if there is not one.

    `has_mismatched`: beside each completion of unpaired data, also its prompt with the completion of another row.
    """
    fields: dict[str, Any] = {
        "seq_len": section.seq_len,
        "packing": section.packing,
        "split": split,
        "shuffled": shuffled,
        "seed": seed,
        "global_batch_size": global_batch_size,
    }
    if section.format in PREFERENCE_FORMATS:
        return PreferenceSamples(corpus, overlong=section.overlong, has_mismatched=has_mismatched, **fields)
    if corpus.trained_tokens is not None:
        if section.packing == "packed" and not section.masks_documents:
            reason = "its labels leave tokens out, and such rows are whole documents that do not attend to each other"
            settings = (("data.format", section.format), ("data.document_masking", False))
            raise DataError.between(settings, reason, ("data.document_masking", True), ("data.packing", "padded"))
        return DocumentSamples(corpus, overlong=section.overlong, **fields)
    return Samples(corpus, document_masking=section.document_masking, **fields)


def training_samples(recipe: Recipe, corpora: Corpora) -> Samples:
    """Open the samples that a recipe trains on. Raises DataError if there is none, or not what a mixture asks for."""
    size = recipe.batch.global_batch_size
    fields: dict[str, Any] = {"split": "train", "seed": recipe.train.seed, "global_batch_size": size}
    fields["has_mismatched"] = recipe.train.objective.name == "kto"
    parts = {name: open_samples(text.corpus, text.section, **fields) for name, text in corpora.sources.items()}
    if recipe.data.sources is None:
        return next(iter(parts.values()))
    weights = choose_weights(recipe.data, parts, steps=recipe.train.steps, global_batch_size=size)
    return MixtureSamples(parts, weights, global_batch_size=size)


def validation_samples(recipe: Recipe, corpora: Corpora) -> dict[str, Samples]:
    """Open the validation sets of a recipe. Raises DataError if one has no sample, or there is none."""
    if not corpora.validation:
        reason = "no text is held out for the validation, and no dataset has a validation split"
        settings = (("train.eval_every", recipe.train.eval_every), ("data.eval_fraction", recipe.data.eval_fraction))
        raise DataError.between(settings, reason, ("data.eval_fraction", 0.01), ("train.eval_every", 0))
    fields: dict[str, Any] = {"seed": recipe.train.seed, "global_batch_size": recipe.batch.global_batch_size}
    return {
        name: open_samples(text.corpus, text.section, split=text.split, shuffled=False, **fields)
        for name, text in corpora.validation.items()
    }


def _reads(recipe: Recipe, layout: Layout, rank: int) -> bool:
    """Whether a rank has the first or the last pipeline stage, or shares sequences and must know their documents."""
    ends = (layout.stage_ranks[0], layout.stage_ranks[-1])
    return layout.coordinate(rank).pipe in ends or (layout.cp > 1 and recipe.data.masks_documents)


def _share(layout: Layout, rank: int, samples: Iterable[Samples]) -> SequenceShare | None:
    """Return what a rank reads of each sample; None: all of it."""
    if layout.cp == 1 or not all(part.reads_parts for part in samples):
        return None
    context_rank = layout.coordinate(rank).data % layout.cp
    length = next(iter(samples)).seq_len
    return SequenceShare(rank=context_rank, ranks=layout.cp, heads=layout.cp_ulysses, length=length)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoader:
    """The micro-batches that a rank computes in each step. Needs no communication.

    `reads`: whether this rank needs tokens. The middle stages of a pipeline do not; their micro-batches are empty but
    for the dropout seeds, the lengths and whether documents are packed.
    """

    recipe: Recipe
    layout: Layout
    batch: Batch
    data_rank: int
    reads: bool = True
    train: Samples
    validation: Mapping[str, Samples] = field(default_factory=dict)
    """Validation sets by name; the part that a single source holds out has the empty name."""
    share: SequenceShare | None = None
    """What this rank reads of each sample, where ranks share these; None: all of it."""
    report_phase: PhaseReporter = ignore_phase

    @classmethod
    def open(cls, job: Job, corpora: Corpora | TokenCorpus, *, rank: int) -> Self:
        """Build the loader of global rank `rank`. Raises DataError if a corpus is too small for one sample."""
        recipe = job.recipe
        layout = job.layout
        batch = job.batch
        if not isinstance(corpora, Corpora):
            corpora = Corpora.of(recipe.data, corpora)
        train = training_samples(recipe, corpora)
        validation = validation_samples(recipe, corpora) if recipe.train.eval_every else {}
        for samples in (train, *validation.values()):
            # The same for all texts: stages of a pipeline agree once on what they send to each other.
            samples.has_positions = recipe.data.masks_documents
        return cls(
            recipe=recipe,
            layout=layout,
            batch=batch,
            data_rank=layout.sample_rank(rank),
            reads=_reads(recipe, layout, rank),
            train=train,
            validation=validation,
            share=_share(layout, rank, [train, *validation.values()]),
        )

    def in_job(self, job: Job, *, rank: int) -> Self:
        """Return a loader of the same samples for global rank `rank` of another job."""
        return replace(
            self,
            layout=job.layout,
            batch=job.batch,
            data_rank=job.layout.sample_rank(rank),
            reads=_reads(job.recipe, job.layout, rank),
            share=_share(job.layout, rank, [self.train, *self.validation.values()]),
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

    def first_micro_batch(self, batch_index: int, data_rank: int) -> MicroBatch:
        """Build the first micro-batch of a replica in a global batch, on any rank."""
        theirs = replace(self, data_rank=data_rank)
        return theirs._micro_batch(batch_index, theirs._positions(0))

    def target_tokens(self, batch_index: int) -> int:
        """Count the target tokens of a whole global batch."""
        return self.train.target_count(batch_index, np.arange(self.batch.global_batch_size))

    def loss_terms(self, batch_index: int) -> int:
        """Count what the loss of a whole global batch is a mean over (`Samples.loss_terms`)."""
        return self.train.loss_terms(batch_index, np.arange(self.batch.global_batch_size))

    def source_tokens(self, batch_index: int) -> dict[str, int]:
        """Count the target tokens of each source of a mixture in a whole global batch; empty for a single source."""
        if not isinstance(self.train, MixtureSamples):
            return {}
        counts = self.train.target_counts(batch_index, np.arange(self.batch.global_batch_size))
        return dict(zip(self.train.names, counts, strict=True))

    def validation_tokens(self, name: str) -> int:
        """Count the target tokens of a validation set's samples."""
        return self.validation[name].target_count(0, self._validation_ids(name))

    def _validation_ids(self, name: str) -> NDArray[np.int64]:
        """Samples spread evenly over a validation set."""
        size = len(self.validation[name])
        count = min(self.recipe.train.eval_samples, size)
        return np.arange(count) * size // count

    def validation_batches(self, name: str | None = None) -> Iterator[MicroBatch]:
        """This rank's share of the samples of a validation set, or of all, which are spread evenly over each set.

        Every rank yields the same number of batches, as sharded engines need: the last ones are padded with samples
        whose labels are all ignored.
        """
        if name is None:
            for validation_set in self.validation:
                yield from self.validation_batches(validation_set)
            return
        samples = self.validation[name]
        chosen = self._validation_ids(name)
        count = len(chosen)
        chosen_token_share = 0.0
        if isinstance(samples, PreferenceSamples):
            chosen_token_share = samples.chosen_token_share(0, chosen)
        stride = self.batch.micro_batch_size * self.batch.dp
        for start in range(0, count, stride):
            self.report_phase("evaluate")
            positions = start + self.data_rank * self.batch.micro_batch_size + np.arange(self.batch.micro_batch_size)
            places = chosen[np.minimum(positions, count - 1)]
            if not self.reads:
                yield MicroBatch(input_ids=_EMPTY, labels=_EMPTY, is_packed=samples.is_packed(0, places))
                continue
            repeats = torch.from_numpy(positions >= count)
            yield _without_repeats(samples.batch(0, places, share=self.share), repeats, chosen_token_share)

    def ordered_batches(self, samples: Samples, first: int, end: int) -> Iterator[MicroBatch]:
        """This rank's share of the rows [first, end) of samples that are in the order of their text, with `places`.

        Every rank yields the same number of batches; rows that only fill the last ones are not counted.
        """
        size = self.batch.micro_batch_size
        for start in range(first, end, size * self.batch.dp):
            positions = start + self.data_rank * size + np.arange(size)
            places = np.minimum(positions, end - 1)
            if not self.reads:
                yield MicroBatch(input_ids=_EMPTY, labels=_EMPTY, is_packed=samples.is_packed(0, places))
                continue
            batch = samples.batch(0, places, share=self.share)
            micro_batch = _without_repeats(batch, torch.from_numpy(positions >= end), 0.0)
            if not micro_batch.sequences:
                targets = samples.places(0, places)
                parts = [targets[:, run.start : run.stop] for run in micro_batch.held or [range(samples.seq_len)]]
                micro_batch = replace(micro_batch, places=torch.cat(parts, dim=1))
            yield micro_batch

    def first_batch(self) -> Iterator[MicroBatch]:
        """Yield every sample of the first global batch by itself, on any rank."""
        for position in range(self.batch.global_batch_size):
            yield self.train.batch(0, [position])

    def _micro_batch(self, batch_index: int, positions: range) -> MicroBatch:
        # Seeded by the position, not by the rank: every layout, and a resumed run, drops the same activations.
        seed = derive_seed("dropout", self.recipe.train.seed, batch_index, positions[0])
        if not self.reads:
            lengths = self.train.lengths(batch_index, positions)
            is_packed = self.train.is_packed(batch_index, positions)
            return MicroBatch(input_ids=_EMPTY, labels=_EMPTY, dropout_seed=seed, lengths=lengths, is_packed=is_packed)
        return self.train.batch(batch_index, positions, dropout_seed=seed, share=self.share)

    def _positions(self, accumulation_step: int) -> range:
        start = self.batch.block_start(accumulation_step=accumulation_step, data_rank=self.data_rank)
        return range(start, start + self.batch.micro_batch_size)


def _without_repeats(micro_batch: MicroBatch, repeats: torch.Tensor, chosen_token_share: float) -> MicroBatch:
    """Ignore the samples that only fill a micro-batch, `repeats` bool [b]: their labels, pairs and completions.

    All others weigh the same.
    """
    micro_batch.labels[repeats] = IGNORE
    micro_batch = replace(micro_batch, weights=None, teacher=None)
    sequences = micro_batch.sequences
    if sequences is None:
        return micro_batch
    counted = ~repeats[sequences.rows]
    changed = replace(
        sequences,
        is_counted=counted,
        chosen_token_share=chosen_token_share,
        weights=torch.ones_like(sequences.weights),
    )
    return replace(micro_batch, sequences=changed)
