"""TrainingStep: the order in which a rank allocates, from model states to the second update, on PyTorch's allocator;
PassReplay: what a pass of a recording allocates and frees, with all layers of a stage.

Activations are replayed event by event. Of the rest the estimate knows bytes and how long they live: each part is a few
blocks, one for each group of the optimizer where the engine has flat buffers, else one for each parameter.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from toolkit.estimate.caching_allocator import CachingAllocator, MemoryBlock, OutOfMemoryError
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.pipeline_buffers import PipelineBuffers
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.recorded.activations import ALL_RECORDED, UnrecordedInLayer
from toolkit.estimate.recorded.recording import AT_ATTENTION, RankPass, Recording, monomial_values, value_of
from toolkit.estimate.recorded.recordings import recording
from toolkit.estimate.states import ModelStates, TorchStates
from toolkit.estimate.training_setup import TrainingSetup

Place = tuple[str, int | None]
"""A section: `forward` or `backward` with a layer's number on the stage, or the name of an end."""
Live = dict[Place, list[MemoryBlock | None]]
"""Storages that outlived the sections of a micro-batch's pass, latest first; None for one that was freed since."""
_MARK = (AT_ATTENTION, "", 0)
"""AT_ATTENTION in the form of other events."""
_NOT_HERE = -1
"""Start of a block that is not on the device."""
_NOTHING = MemoryBlock(_NOT_HERE, 0, is_small=True)
"""The block that stands for a copy of a weight that is not made."""
_STEPS = 2
"""Moments exist from the first update on, and its temporaries leave a cache: the second step is like all others."""


class PassReplay:
    """Passes of micro-batches of b samples of s positions.

    `layers`: those of the stage. `casts`: whether autocast finds weights that it must copy, in fp32.
    `offloads`: whether what layers keep goes to the host. `unrecorded`: what the recording of a layer's backward pass
    lacks.
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
        unrecorded: UnrecordedInLayer = ALL_RECORDED,
    ) -> None:
        events = recording.events
        self._offloads = offloads
        self._in_attention = unrecorded.in_attention
        self._before_attention = unrecorded.before_attention
        if not any(AT_ATTENTION in section for section in events.sections.values()):
            self._before_attention = unrecorded.largest
        self._unrecorded: MemoryBlock | None = None
        self._allocator = allocator
        kinds = [recording.pattern[index] for index in layers]
        monomials = monomial_values(b, s)
        self._roles = [str(kind) for kind in kinds]
        self._ends = {"first": 0, "last": len(layers) - 1}
        for (role, layer), kind in zip(self._ends.items(), events.ends, strict=True):
            if layers and kinds[layer] == kind:
                self._roles[layer] = role
        self._sizes = [
            0 if index in events.casts and not casts else value_of(size, monomials) // recording.unit
            for index, size in enumerate(events.sizes)
        ]
        self._sections = {
            name: [_parsed(event) if isinstance(event, str) else event for event in section]
            for name, section in events.sections.items()
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
            if self._before_attention:
                self._unrecorded = self._allocator.allocate(self._before_attention)
            place = self._run(live, "backward", layer)
            self._free_unrecorded()
            yield place
        yield self._run(live, "embedding_backward")
        for blocks in live.values():
            for block in blocks:
                if block is not None and block.start >= 0:
                    self._allocator.free(block)

    def _free_unrecorded(self) -> None:
        """Free what a layer has until its attention."""
        if self._unrecorded is not None:
            self._allocator.free(self._unrecorded)
            self._unrecorded = None

    def _run(self, live: Live, name: str, layer: int | None = None) -> Place:
        sizes = self._sizes
        allocate = self._allocator.allocate
        free = self._allocator.free
        made: list[MemoryBlock | None] = []
        for event in self._sections.get(name if layer is None else f"{name} {self._roles[layer]}", ()):
            if isinstance(event, int) and event >= 0:
                made.append(allocate(sizes[event]) if sizes[event] else _NOTHING)
                continue
            if event == _MARK:
                self._free_unrecorded()
                if self._in_attention:
                    free(allocate(self._in_attention))
                continue
            blocks_at = [(made, ~event)] if isinstance(event, int) else self._named(live, event, layer)
            for blocks, at in blocks_at:
                block = blocks[at] if at < len(blocks) else None
                if block is not None:
                    blocks[at] = None
                    if block.start >= 0:
                        free(block)
        live[name, layer] = [block for block in reversed(made) if block is not None]
        return name, layer

    def _move(self, live: Live, layer: int, *, to_host: bool) -> None:
        """Free what a layer keeps, or allocate it again; its blocks stand for it meanwhile."""
        blocks = live.get(("forward", layer), [])
        for at, block in enumerate(blocks):
            if block is None or not block.size:
                continue
            if to_host:
                blocks[at] = MemoryBlock(_NOT_HERE, block.size, is_small=False)
                self._allocator.free(block)
            else:
                blocks[at] = self._allocator.allocate(block.size)

    def _named(
        self, live: Live, event: tuple[str, str, int], layer: int | None
    ) -> list[tuple[list[MemoryBlock | None], int]]:
        """Find what another section allocated. A neighbor of another kind may not have that many."""
        direction, which, at = event
        if not which or layer is not None:
            others: list[int | None] = [layer + int(which) if which and layer is not None else None]
        else:
            others = [
                other for other, role in enumerate(self._roles) if which == role or self._ends.get(which) == other
            ]
        return [(live[direction, other], at) for other in others if (direction, other) in live]


def _parsed(event: str) -> tuple[str, str, int]:
    if event == AT_ATTENTION:
        return _MARK
    section, _, at = event.partition(":")
    direction, _, which = section.partition(" ")
    return direction, which, int(at)


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Allocations of the steps of one rank of a pipeline stage."""

    setup: TrainingSetup
    engine: DeepSpeedSettings | TorchStates
    rank_pass: RankPass
    """The pass over a micro-batch on the rank."""
    layers: range
    """Decoder layers of the stage."""
    in_flight: int
    """Micro-batches whose activations are live at once on the stage."""
    states: ModelStates
    params: RankParameters
    buffers: PipelineBuffers
    unrecorded: UnrecordedInLayer
    """What the recording of a layer's backward pass lacks."""
    workspace: int
    """Bytes that stay allocated beside model states and buffers."""

    def footprint(self) -> tuple[int, int]:
        """Bytes that suffice, found to one percent, and what the allocator reserves where there is room for it.

        With less room it gives its cache back when it must, and then finds other places for what comes.
        """
        free = self.replay()
        least = free.peak_needed
        enough = free.peak_reserved
        tried = least
        while enough - least > enough // 100:
            if self.suffices(tried):
                enough = tried
            else:
                least = tried
            tried = (least + enough) // 2
        return enough, free.peak_reserved

    def suffices(self, capacity: int) -> bool:
        """Whether a replay ends well in so many bytes."""
        try:
            self.replay(capacity)
        except OutOfMemoryError:
            return False
        return True

    def replay(self, capacity: int | None = None) -> CachingAllocator:
        """Run two steps. Raises OutOfMemoryError if `capacity` is too little."""
        recorded = recording(self.rank_pass, self.setup.rank_positions)
        allocator = CachingAllocator(capacity)
        resident = self.states.resident
        _held(allocator, self._blocks(resident.parameters, frozen=self.params.frozen))
        for size in (resident.reference, resident.gradients, resident.masters, resident.optimizer):
            _held(allocator, self._blocks(size))
        half = self.workspace // 2
        _held(allocator, [resident.buckets, resident.model_buffers, self.buffers.at_peak, half, half])
        # FSDP's weights are in 16 bits when autocast sees them.
        gathers_16_bits = isinstance(self.engine, TorchStates) and self.engine.gathered_bytes == 2
        passes = PassReplay(
            recorded,
            self.layers,
            self.setup.micro_batch_size,
            self.setup.rank_positions,
            allocator,
            casts=not gathers_16_bits,
            offloads=self.setup.layout.offload_activations,
            unrecorded=self.unrecorded,
        )
        for _ in range(_STEPS):
            gradients = self._micro_batches(allocator, passes)
            made = sum(block.size for block in gradients)
            _free(allocator, _held(allocator, self._buffers(self.states.reduction - made)))
            _free(allocator, _held(allocator, self._blocks(self.states.step - made)))
            _free(allocator, gradients)
        return allocator

    def _micro_batches(self, allocator: CachingAllocator, passes: PassReplay) -> list[MemoryBlock]:
        """Replay one micro-batch more than are in flight, in the order of 1F1B. Returns the gradients."""
        states = self.states
        gradients: list[MemoryBlock] = []
        waiting: list[Live] = []
        made = self._made_gradients()
        count = min(self.setup.accumulation, self.in_flight + 1)
        for number in range(count + self.in_flight):
            if number >= self.in_flight:
                held = _held(allocator, [states.gathered, *self._buffers(states.buckets)])
                for _ in passes.backward(waiting.pop(0)):
                    gradients += _held(allocator, next(made, []))
                _free(allocator, held)
                last = _held(allocator, [states.gathered, *self._buffers(states.last_gradient)])
                _free(allocator, last)
            if number < count:
                held = _held(allocator, [states.gathered])
                waiting.append(Live())
                deque(passes.forward(waiting[-1]), maxlen=0)
                _free(allocator, held)
        return gradients

    def _made_gradients(self) -> Iterator[list[int]]:
        """Bytes of the gradients that each section of a backward pass leaves: those of the last parameters first."""
        states = self.states
        params = self.params
        sections = len(self.layers) + 2
        if states.fresh_layer:
            element_bytes = states.fresh_layer / params.trained_layer
        else:
            element_bytes = states.accumulated / max(1, params.trained)
        groups = [list(group)[::-1] for group in params.groups]
        for at in range(sections):
            parts = (numels[len(numels) * at // sections : len(numels) * (at + 1) // sections] for numels in groups)
            yield [int(element_bytes * numel) for part in parts for numel in part]

    def _buffers(self, size: int) -> list[int]:
        """Communication buffers: under DeepSpeed a bucket and its copies, each of the same size."""
        bucket = size
        if isinstance(self.engine, DeepSpeedSettings):
            bucket = self.engine.communication_bytes * self.engine.reduce_bucket_size
        bucket = max(1, bucket)
        whole, rest = divmod(max(0, size), bucket)
        return [bucket] * whole + [rest]

    def _blocks(self, size: int, *, frozen: Iterable[int] = ()) -> list[int]:
        groups = self.params.groups
        is_flat = isinstance(self.engine, DeepSpeedSettings) and self.engine.wrapper not in ("none", "unfused")
        if is_flat:
            numels = [group.numel for group in groups]
        else:
            numels = [numel for group in groups for numel in group]
        numels += frozen
        return [size * numel // max(1, sum(numels)) for numel in numels]


def _held(allocator: CachingAllocator, sizes: list[int]) -> list[MemoryBlock]:
    return [allocator.allocate(size) for size in sizes if size > 0]


def _free(allocator: CachingAllocator, blocks: list[MemoryBlock]) -> None:
    for block in blocks:
        allocator.free(block)
