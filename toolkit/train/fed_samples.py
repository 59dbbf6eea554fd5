"""What a rank was fed, as its share of each step's digest (toolkit/train/data/digest.py)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from toolkit.train.data.digest import digest_name, share_of_digest
from toolkit.train.engines.base import MicroBatch
from toolkit.train.feed import Feed


class FedSamples:
    """Hashes micro-batches on their way into an engine."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        # From the layout and not from the feed: a feed that reads for another place must be noticed.
        self._place = feed.layout.coordinate(dist.get_rank() if dist.is_initialized() else 0)
        self.shares: list[int] = []
        """Of each step that is through."""

    def watch(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The same micro-batches, of one step."""
        total = 0
        for number, micro_batch in enumerate(micro_batches):
            if self._feed.reads:
                start = self._feed.batch.block_start(accumulation_step=number, data_rank=self._place.data)
                places = range(start, start + len(micro_batch.input_ids))
                total += share_of_digest(micro_batch.input_ids, micro_batch.labels, places)
            yield micro_batch
        self.shares.append(total)

    def last_digest(self, device: torch.device, *, stop: bool = False) -> tuple[str, bool]:
        """The digest of the last step's global batch, as the first rank of each replica read it; and whether any rank
        wants to `stop`, which travels in the same sum. A collective call.
        """
        self._feed.mark("digest")
        is_first = self._place.pipe == 0 and self._place.model == 0
        sums = torch.tensor([self.shares[-1] if is_first else 0, int(stop)], dtype=torch.int64, device=device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        total, stops = sums.tolist()
        return digest_name(total), stops > 0


def merged_digests(feed: Feed, ranks: list[list[int]]) -> tuple[str, ...]:
    """The digest of each step from every rank's shares; `a!=b` where ranks of one replica were fed differently."""
    layout = feed.layout
    replicas: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for rank, shares in enumerate(ranks):
        place = layout.coordinate(rank)
        if place.pipe in (0, layout.pp - 1):
            replicas[place.pipe, place.model].append(shares)
    totals = [[sum(step) for step in zip(*shares, strict=True)] for shares in replicas.values()]
    return tuple("!=".join(dict.fromkeys(digest_name(total) for total in step)) for step in zip(*totals, strict=True))
