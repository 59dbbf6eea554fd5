"""PassReplay: what a recording's pass allocates and frees, with all layers of a stage, on PyTorch's allocator."""

from collections.abc import Iterator

from toolkit.estimate.caching_allocator import Block, CachingAllocator
from toolkit.estimate.recording import MONOMIALS, Recording

Place = tuple[str, int | None]
"""A section: `forward` or `backward` with a layer's number on the stage, or the name of an end."""
Live = dict[Place, list[Block | None]]
"""What outlived the sections of a micro-batch's pass, latest first; None for what was freed since."""
_NOTHING = Block(0, 0, is_small=True)
"""In the place of a copy of a weight that is not made."""


class PassReplay:
    """Passes of micro-batches of b samples of s positions.

    `layers`: those of the stage. `casts`: whether autocast finds weights that it must copy, in fp32.
    `offloads`: whether what layers keep goes to the host.
    """

    def __init__(
        self,
        recording: Recording,
        layers: range,
        b: int,
        s: int,
        allocator: CachingAllocator,
        *,
        casts: bool = True,
        offloads: bool = False,
    ) -> None:
        events = recording.events
        self._offloads = offloads
        self._allocator = allocator
        kinds, values = [recording.pattern[index] for index in layers], tuple(b**i * s**j for i, j in MONOMIALS)
        self._roles, self._ends = [str(kind) for kind in kinds], {"first": 0, "last": len(layers) - 1}
        for (role, layer), kind in zip(self._ends.items(), events.ends, strict=True):
            if layers and kinds[layer] == kind:
                self._roles[layer] = role
        self._sizes = [
            0 if index in events.casts and not casts else sum(map(int.__mul__, size, values)) // recording.unit
            for index, size in enumerate(events.sizes)
        ]
        self._sections = {
            name: [_parsed(event) if isinstance(event, str) else event for event in each]
            for name, each in events.sections.items()
        }

    def forward(self, live: Live) -> Iterator[Place]:
        """Replay the forward pass with the loss; `live` gets what it leaves. Yields behind each section."""
        yield self._run(live, "embedding")
        for layer in range(len(self._roles)):
            yield self._run(live, "forward", layer)
            if self._offloads:
                self._move(live, layer - 1, to_host=True)
        yield self._run(live, "head")
        yield self._run(live, "loss")

    def backward(self, live: Live) -> Iterator[Place]:
        """Replay the backward pass of the micro-batch that left `live`. What then is left goes with the micro-batch."""
        yield self._run(live, "head_backward")
        for layer in reversed(range(len(self._roles))):
            if self._offloads:
                self._move(live, layer - 1, to_host=False)
            yield self._run(live, "backward", layer)
        yield self._run(live, "embedding_backward")
        for blocks in live.values():
            for block in blocks:
                if block is not None and block is not _NOTHING:
                    self._allocator.free(block)

    def _run(self, live: Live, name: str, layer: int | None = None) -> Place:
        sizes, allocate, free = self._sizes, self._allocator.allocate, self._allocator.free
        own: list[Block | None] = []
        for event in self._sections.get(name if layer is None else f"{name} {self._roles[layer]}", ()):
            if isinstance(event, int) and event >= 0:
                own.append(allocate(sizes[event]) if sizes[event] else _NOTHING)
                continue
            blocks_at = [(own, ~event)] if isinstance(event, int) else self._named(live, event, layer)
            for blocks, at in blocks_at:
                block = blocks[at] if at < len(blocks) else None
                if block is not None:
                    blocks[at] = None
                    if block is not _NOTHING:
                        free(block)
        live[name, layer] = [block for block in reversed(own) if block is not None]
        return name, layer

    def _move(self, live: Live, layer: int, *, to_host: bool) -> None:
        """Free what a layer keeps, or allocate it again; its blocks stand for it meanwhile."""
        blocks = live.get(("forward", layer), [])
        for at, block in enumerate(blocks):
            if block is None or block is _NOTHING:
                continue
            if to_host:
                blocks[at] = Block(0, block.size, is_small=False)
                self._allocator.free(block)
            else:
                blocks[at] = self._allocator.allocate(block.size)

    def _named(
        self, live: Live, event: tuple[str, str, int], layer: int | None
    ) -> list[tuple[list[Block | None], int]]:
        """What another section allocated, and which of it. A neighbor of another kind may not have that many."""
        direction, which, at = event
        if not which or layer is not None:
            others: list[int | None] = [layer + int(which) if which and layer is not None else None]
        else:
            others = [
                other for other, role in enumerate(self._roles) if which == role or self._ends.get(which) == other
            ]
        return [(live[direction, other], at) for other in others if (direction, other) in live]


def _parsed(event: str) -> tuple[str, str, int]:
    section, _, at = event.partition(":")
    direction, _, which = section.partition(" ")
    return direction, which, int(at)
