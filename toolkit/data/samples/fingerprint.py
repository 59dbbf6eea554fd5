"""A fingerprint of each global batch: equal if the same samples are at the same positions, for any layout.

The fingerprint is a random linear form, modulo 2^64, of the tokens and labels of a batch (Carter and Wegman, Universal
Classes of Hash Functions, 1979): each is multiplied by an odd number of its position in the sequence and one of its
sample's position in the global batch. Each rank adds up what it reads, samples or parts of them; the sum over the ranks
is the fingerprint of the batch.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from toolkit.data.permutation import mix
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch

_HALF = 1 << 32
"""A sum is summed over ranks as two numbers, of its upper and its lower bits: fp64 has both exactly."""
_MODULUS = 1 << 64


def hash_samples(
    input_ids: ArrayLike, labels: ArrayLike, positions: ArrayLike, held: Sequence[range] | None = None
) -> int:
    """Add up the linear forms of samples. input_ids and labels [b, s]; positions [b] in the global batch.

    `held`: the positions of the sequences that input_ids and labels have; None: all of them. Sums of parts are added
    modulo 2^64.
    """
    ids = np.asarray(input_ids).astype(np.uint64)
    targets = np.asarray(labels).astype(np.uint64)
    runs = [range(ids.shape[1])] if held is None else held
    places = np.concatenate([np.arange(run.start, run.stop, dtype=np.uint64) for run in runs])
    of_ids = _odd(places * np.uint64(2))
    of_targets = _odd(places * np.uint64(2) + np.uint64(1))
    samples = (ids * of_ids + targets * of_targets).sum(axis=1, dtype=np.uint64)  # [b]
    of_samples = _odd(mix(np.asarray(positions).astype(np.uint64)))
    return int((samples * of_samples).sum(dtype=np.uint64))


def _odd(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a random odd factor for each number: a difference of one token always changes the sum."""
    factors: NDArray[np.uint64] = mix(numbers) | np.uint64(1)
    return factors


def format_fingerprint(total: int) -> str:
    """Write the sum over all ranks as sixteen hexadecimal digits."""
    return f"{total % _MODULUS:016x}"


class BatchFingerprints:
    """Hashes micro-batches on their way into an engine."""

    def __init__(self, loader: MicroBatchLoader) -> None:
        self._loader = loader
        # From the layout and not from the loader: a loader that reads another rank's samples must be noticed.
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._coordinate = loader.layout.coordinate(rank)
        self._sample_rank = loader.layout.sample_rank(rank)
        self.local_sums: list[int] = []
        """This rank's sum for each completed step, modulo 2^64."""

    def watch(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Hash the micro-batches of one step while passing them on."""
        total = 0
        for accumulation_step, micro_batch in enumerate(micro_batches):
            if self._loader.reads:
                start = self._loader.batch.block_start(accumulation_step=accumulation_step, data_rank=self._sample_rank)
                positions = range(start, start + len(micro_batch.input_ids))
                total += hash_samples(micro_batch.input_ids, micro_batch.labels, positions, micro_batch.held)
            yield micro_batch
        self.local_sums.append(total % _MODULUS)

    def step_numbers(
        self, device: torch.device, *, stop: bool, count: int = 0, others: Mapping[int, float] | None = None
    ) -> torch.Tensor:
        """Return what `read_step_numbers` reads, fp64 [3 + count] on `device`, summed over ranks. A collective call.

        The fingerprint is that of the last step's global batch, as the first rank of each replica read it, or the ranks
        that share its samples; whether any rank wants to `stop` travels with it, and so do `count` numbers, of which
        `others` has this rank's by their places. The host does not wait for the device.
        """
        self._loader.report_phase("fingerprint")
        place = self._coordinate
        reads_own = place.data % self._loader.layout.cp == 0 or self._loader.share is not None
        is_first = place.pipe == 0 and place.model == 0 and reads_own
        high, low = divmod(self.local_sums[-1] if is_first else 0, _HALF)
        numbers = torch.zeros(3 + count, dtype=torch.float64, device=device)
        # A copy of a list to a GPU waits for all that the GPU has to do; a value to fill with goes with the kernel.
        for position, number in {0: high, 1: low, 2: int(stop)}.items():
            numbers[position].fill_(number)
        for index, other in (others or {}).items():
            numbers[3 + index].fill_(other)
        if dist.is_initialized():
            dist.all_reduce(numbers)
        return numbers


def read_step_numbers(numbers: Sequence[float]) -> tuple[str, bool, list[float]]:
    """Return the fingerprint of a global batch, whether any rank wants to stop, and the numbers that came with them.

    `numbers`: those of `step_numbers`, on the host.
    """
    high, low, stops, *others = numbers
    return format_fingerprint(int(high) * _HALF + int(low)), stops > 0, others


def merge_fingerprints(loader: MicroBatchLoader, ranks: list[list[int]]) -> tuple[str, ...]:
    """Merge every rank's `local_sums` to the fingerprint of each step; `a!=b` if ranks of one replica read different
    samples."""
    layout = loader.layout
    shares = 1 if loader.share is not None else layout.cp
    replicas: dict[tuple[int, int, int], list[list[int]]] = defaultdict(list)
    for rank, sums in enumerate(ranks):
        coordinate = layout.coordinate(rank)
        if coordinate.pipe in (layout.stage_ranks[0], layout.stage_ranks[-1]):
            replicas[coordinate.pipe, coordinate.model, coordinate.data % shares].append(sums)
    totals = [[sum(step) for step in zip(*sums, strict=True)] for sums in replicas.values()]
    return tuple(
        "!=".join(dict.fromkeys(format_fingerprint(total) for total in step)) for step in zip(*totals, strict=True)
    )
