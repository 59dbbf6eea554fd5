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
    """

    def __init__(
        self, recording: Recording, layers: range, b: int, s: int, allocator: CachingAllocator, *, casts: bool = True
    ) -> None:
        assert recording.events is not None
        self._allocator, self._ends = allocator, recording.events.ends
        self._kinds = [recording.pattern[index] for index in layers]
        values = tuple(b**i * s**j for i, j in MONOMIALS)
        sizes = [sum(map(int.__mul__, size, values)) // recording.unit for size in recording.events.sizes]
        for index in () if casts else recording.events.casts:
            sizes[index] = 0
        self._sections = {
            name: [
                _parsed(event) if isinstance(event, str) else sizes[event] if event >= 0 else event for event in each
            ]
            for name, each in recording.events.sections.items()
        }

    def forward(self, live: Live) -> Iterator[Place]:
        """Replay the forward pass with the loss; `live` gets what it leaves. Yields behind each section."""
        yield self._run(live, "embedding")
        for layer in range(len(self._kinds)):
            yield self._run(live, "forward", layer)
        yield self._run(live, "head")
        yield self._run(live, "loss")

    def backward(self, live: Live) -> Iterator[Place]:
        """Replay the backward pass of the micro-batch that left `live`. What then is left goes with the micro-batch."""
        yield self._run(live, "head_backward")
        for layer in reversed(range(len(self._kinds))):
            yield self._run(live, "backward", layer)
        yield self._run(live, "embedding_backward")
        for blocks in live.values():
            for block in blocks:
                if block is not None and block is not _NOTHING:
                    self._allocator.free(block)

    def _run(self, live: Live, name: str, layer: int | None = None) -> Place:
        allocate, free = self._allocator.allocate, self._allocator.free
        own: list[Block | None] = []
        for event in self._sections.get(name if layer is None else self._section(name, layer), ()):
            if isinstance(event, int) and event >= 0:
                own.append(allocate(event) if event else _NOTHING)
                continue
            found = [(own, ~event)] if isinstance(event, int) else self._named(live, event, layer)
            for blocks, at in found:
                block = blocks[at] if at < len(blocks) else None
                if block is not None:
                    blocks[at] = None
                    if block is not _NOTHING:
                        free(block)
        live[name, layer] = [block for block in reversed(own) if block is not None]
        return name, layer

    def _section(self, direction: str, layer: int) -> str:
        """The section that stands for a layer's."""
        last = len(self._kinds) - 1
        for role, place, kind in (("last", last, self._ends[1]), ("first", 0, self._ends[0])):
            if layer == place and self._kinds[layer] == kind:
                return f"{direction} {role}"
        return f"{direction} {self._kinds[layer]}"

    def _named(
        self, live: Live, event: tuple[str, str, int], layer: int | None
    ) -> list[tuple[list[Block | None], int]]:
        """What another section allocated, and which of it. A neighbor of another kind may not have that many."""
        direction, which, at = event
        if not which:
            places: list[Place] = [(direction, None)]
        elif layer is not None:
            places = [(direction, layer + int(which))]
        elif which in ("first", "last"):
            places = [(direction, 0 if which == "first" else len(self._kinds) - 1)]
        else:
            alike = (other for other in range(len(self._kinds)) if self._section("", other) == f" {which}")
            places = [(direction, other) for other in alike]
        return [(live[place], at) for place in places if place in live]


def _parsed(event: str) -> tuple[str, str, int]:
    section, _, at = event.partition(":")
    direction, _, which = section.partition(" ")
    return direction, which, int(at)
