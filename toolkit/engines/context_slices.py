"""What a rank takes of a micro-batch for the toolkit's attention: its chunks of each sequence, and where documents
begin. Without context parallelism it takes all of it. Loaders of most data read a rank's chunks alone, and it takes
them as they are.

Positions are those of the whole sequence, and labels were shifted before it is cut, so that the last target of a chunk
is the first token of the next one, wherever that is. Dims: b samples, s positions, n = s/cp positions on a rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from toolkit.config.context_exchange import ExchangeKind, chosen_exchange
from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.parallel.context.attention import SequenceView, attending
from toolkit.parallel.context.exchange import make_exchange
from toolkit.parallel.context.sequence import SequenceShare, SequenceSlice
from toolkit.parallel.groups import heads_and_ring
from toolkit.seeds import derive_seed


class ContextSlices:
    """This rank's part of the micro-batches of a job. `group`: the ranks that share each sequence; None: it has all."""

    def __init__(self, job: Job, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._heads: dist.ProcessGroup | None = None
        ring = group
        if job.layout.cp_ulysses > 1:
            self._heads, ring = heads_and_ring(job.layout)
        rank = 0 if group is None else group.rank()
        ranks = 1 if group is None else group.size()
        self._share = SequenceShare(rank=rank, ranks=ranks, heads=job.layout.cp_ulysses, length=job.recipe.data.seq_len)
        self._exchange = make_exchange(ring, _exchange_of(job))
        self._plain = self._share.sequence(((0,),) * job.batch.micro_batch_size)
        self.positions = self._held(self._plain)
        """Positions of the sequence on this rank in the last forward pass, int64 [n], on the CPU."""

    def sequence(self, micro_batch: MicroBatch) -> SequenceSlice:
        """Return this rank's part of the sequences of a micro-batch, from where documents begin in it, or from its
        position ids on the CPU."""
        if not micro_batch.is_packed:
            return self._plain
        if micro_batch.starts is not None:
            return self._share.sequence(micro_batch.starts)
        if micro_batch.position_ids is None:
            return self._plain
        starts = (micro_batch.position_ids.diff(dim=-1) != 1).tolist()
        return self._share.sequence(tuple((0, *(i + 1 for i, begins in enumerate(row) if begins)) for row in starts))

    def take(self, micro_batch: MicroBatch, sequence: SequenceSlice) -> MicroBatch:
        """Return this rank's part of a micro-batch, whose sequences are these. Ranks drop different activations."""
        if self.group is None:
            return replace(micro_batch, is_packed=False)  # documents are kept apart by the attention
        seed = derive_seed("slice", micro_batch.dropout_seed, self.group.rank())
        if not micro_batch.input_ids.numel():  # of a stage that reads no tokens
            return replace(micro_batch, dropout_seed=seed)
        if micro_batch.held is not None:  # read so
            return replace(micro_batch, is_packed=False, dropout_seed=seed)
        held = self._held(sequence)
        sequences = micro_batch.sequences
        if sequences is not None:
            sequences = replace(sequences, numbers=sequences.numbers[:, held])
        positions = micro_batch.position_ids
        if positions is None:
            positions = torch.arange(self._share.length).expand(len(micro_batch.input_ids), -1)
        return replace(
            micro_batch,
            input_ids=micro_batch.input_ids[:, held],  # [b, s] -> [b, n]
            labels=micro_batch.labels[:, held],
            weights=None if micro_batch.weights is None else micro_batch.weights[:, held],
            teacher=None if micro_batch.teacher is None else micro_batch.teacher.map(lambda tensor: tensor[:, held]),
            places=None if micro_batch.places is None else micro_batch.places[:, held],
            position_ids=positions[:, held],
            is_packed=False,  # documents are kept apart by the attention, which knows where they begin
            dropout_seed=seed,
            sequences=sequences,
        )

    def view(self) -> SequenceView:
        """Return how a layer without a window sees samples of one document each."""
        return SequenceView(sequence=self._plain, exchange=self._exchange, heads=self._heads)

    @contextmanager
    def attending(self, sequence: SequenceSlice) -> Iterator[None]:
        """Let a forward pass inside attend within these sequences."""
        if self.group is not None:
            self.positions = self._held(sequence)
        with attending(sequence, self._exchange, self._heads):
            yield

    def _held(self, sequence: SequenceSlice) -> torch.Tensor:
        """Return the positions that this rank holds: a part of those of the ranks with which it exchanges heads."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self._share.held(sequence)])


def _exchange_of(job: Job) -> ExchangeKind:
    tokens = job.batch.micro_batch_size * job.recipe.data.seq_len
    itemsize = 4 if job.recipe.precision == "fp32" else 2
    shares = job.layout.cp_ulysses * job.layout.tp
    return chosen_exchange(job.recipe.parallel.cp_exchange, job.shape, tp=shares, tokens=tokens, itemsize=itemsize)
