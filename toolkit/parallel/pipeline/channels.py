"""Messages between pipeline ranks that keep nobody from computing: one channel for each ordered pair of ranks.

A channel delivers messages in the order in which the sender's schedule produces them. What is ready is sent at once,
the next message is received while the rank computes, and a rank waits only where it needs what has not arrived. The two
directions have process groups of their own: with two ranks and several chunks, activations and gradients go both ways.

A sent tensor is released when a later message from the same peer shows that the peer has received it; the schedule
tells which message that is. Polling does not suffice: under gloo `Work.is_completed()` stays false until the sender
calls `wait()`.

The first message of a stage's activations is preceded by their shapes; its gradients have the same ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from toolkit.config.pipeline_messages import Message, messages, taken_before
from toolkit.config.pipeline_schedules import Schedule
from toolkit.parallel.groups import ParallelGroups

Format = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor of a message."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
_MOST_TENSORS = 3
"""The hidden state, position ids, and the sums of routers."""
_MOST_DIMS = 19
_HEADER = 1 + _MOST_TENSORS * (2 + _MOST_DIMS)
"""Numbers of a message about shapes: how many tensors, and the dtype, the number of dims and the dims of each."""


@dataclass(kw_only=True)
class _Channel:
    """One direction between this rank and a peer, in one step."""

    peer: int
    group: dist.ProcessGroup
    expected: Sequence[Message]
    place: int = 0
    """Messages sent, or asked for."""
    taken: Mapping[Message, int] = field(default_factory=dict)
    """How many messages of the opposite direction the sender of each one had taken before."""
    arriving: dict[Message, list[tuple[dist.Work, torch.Tensor]]] = field(default_factory=dict)
    leaving: list[tuple[int, dist.Work, torch.Tensor]] = field(default_factory=list)
    """The place of each message that is kept, and its tensors."""


class Channels:
    """The channels of one rank of a replica. Construction is a collective call."""

    def __init__(self, groups: ParallelGroups, device: torch.device) -> None:
        ranks = groups.layout.ranks_along("pipe")
        down, _ = dist.new_subgroups_by_enumeration(ranks, group_desc="pipeline down")
        up, _ = dist.new_subgroups_by_enumeration(ranks, group_desc="pipeline up")
        self._groups = (down, up)
        self._rank = groups.coordinate.pipe
        self._peers = dist.get_process_group_ranks(groups.pipe)
        self._device = device
        self._formats: dict[int, Format] = {}
        self._to: dict[int, _Channel] = {}
        self._from: dict[int, _Channel] = {}
        self._routes: dict[Message, _Channel] = {}

    def begin_step(self, schedule: Schedule) -> None:
        """Expect the messages of a schedule, and begin to receive."""
        self._to = {}
        self._from = {}
        self._routes = {}
        for (sender, receiver), expected in messages(schedule).items():
            group = self._groups[0 if sender < receiver else 1]
            if sender == self._rank:
                self._to[receiver] = _Channel(peer=self._peers[receiver], group=group, expected=expected)
            if receiver == self._rank:
                taken = taken_before(schedule, sender, receiver)
                self._from[sender] = _Channel(peer=self._peers[sender], group=group, expected=expected, taken=taken)
        for channel in self._to.values():
            self._routes |= dict.fromkeys(channel.expected, channel)
        for channel in self._from.values():
            self._routes |= dict.fromkeys(channel.expected, channel)
            self._post_next_receive(channel)

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send a message and go on."""
        channel = self._routes[message]
        assert channel.expected[channel.place] == message, "messages leave in the schedule's order"
        channel.place += 1
        channel.leaving = [entry for entry in channel.leaving if not entry[1].is_completed()]
        if message.carries == "activation":
            formats = [(tensor.shape, tensor.dtype) for tensor in tensors]
            if message.boundary not in self._formats:
                self._formats[message.boundary] = formats
                self._send(channel, torch.tensor(_encoded(formats), device=self._device))
            assert self._formats[message.boundary] == formats, "the micro-batches of a run have one shape"
        for tensor in tensors:
            self._send(channel, tensor.detach().contiguous())

    def receive(self, message: Message) -> list[torch.Tensor]:
        """Wait for a message, and begin to receive the one behind it."""
        channel = self._routes[message]
        if message not in channel.arriving:
            assert channel.expected[channel.place] == message, "messages arrive in the schedule's order"
            if message.boundary not in self._formats:
                header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
                dist.recv(header, channel.peer, group=channel.group)
                self._formats[message.boundary] = list(_decoded(header.tolist()))
            self._post_receive(channel)
        self._post_next_receive(channel)
        arrived = channel.arriving.pop(message)
        for work, _ in arrived:
            work.wait()
        self._release(channel, message)
        return [tensor for _, tensor in arrived]

    def finish_step(self) -> None:
        """Wait until everything has been sent."""
        for channel in self._to.values():
            _wait_for(channel.leaving)
            channel.leaving.clear()
            assert channel.place == len(channel.expected), "every message was sent"
        assert not any(channel.arriving for channel in self._from.values()), "every message was taken"

    def _send(self, channel: _Channel, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, channel.peer, group=channel.group)
        assert work is not None
        channel.leaving.append((channel.place, work, tensor))

    def _release(self, channel: _Channel, message: Message) -> None:
        """Let go of what the sender of `message` had taken when it sent it: waiting for that takes no time."""
        opposite = next((other for other in self._to.values() if other.peer == channel.peer), None)
        if opposite is None:
            return
        taken = channel.taken[message]
        _wait_for(entry for entry in opposite.leaving if entry[0] <= taken)
        opposite.leaving = [entry for entry in opposite.leaving if entry[0] > taken]

    def _post_next_receive(self, channel: _Channel) -> None:
        """Begin to receive the next message, unless its shapes are still to come."""
        if channel.place < len(channel.expected) and channel.expected[channel.place].boundary in self._formats:
            self._post_receive(channel)

    def _post_receive(self, channel: _Channel) -> None:
        message = channel.expected[channel.place]
        channel.place += 1
        arriving = []
        for shape, dtype in self._formats[message.boundary]:
            if message.carries == "gradient" and not dtype.is_floating_point:
                continue
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(tensor, channel.peer, group=channel.group)
            assert work is not None
            arriving.append((work, tensor))
        channel.arriving[message] = arriving


def _wait_for(leaving: Iterable[tuple[int, dist.Work, torch.Tensor]]) -> None:
    for _, work, _ in leaving:
        work.wait()


def _encoded(made: Format) -> list[int]:
    numbers = [len(made)]
    for shape, dtype in made:
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    assert len(numbers) <= _HEADER, "a message about shapes has one length"
    return numbers + [0] * (_HEADER - len(numbers))


def _decoded(numbers: Sequence[int]) -> Iterator[tuple[torch.Size, torch.dtype]]:
    place = 1
    for _ in range(numbers[0]):
        dtype, dims = numbers[place : place + 2]
        place += 2
        yield torch.Size(numbers[place : place + dims]), _DTYPES[dtype]
        place += dims
