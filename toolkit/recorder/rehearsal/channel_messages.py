"""Names of a pipeline schedule's messages where a recorder sees them: what they carry, of which micro-batch, to whom.

All messages of a schedule have the same shapes, so that those of another micro-batch or another chunk would fit, and
train something else. Their names are compared as well. Nobody waits where messages are sent, or asked for: a rank waits
where it needs one, which is recorded as a call of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from toolkit.config.pipeline_messages import Message
from toolkit.parallel.pipeline.channels import Channels
from toolkit.recorder.rehearsal.collectives import CollectiveRecorder


def message_text(message: Message) -> str:
    """`activation of micro-batch 3 to stage 2`."""
    return f"{message.carries} of micro-batch {message.micro_batch} to stage {message.stage}"


@contextmanager
def messages_named(recorder: CollectiveRecorder) -> Iterator[None]:
    """Let `recorder` see inside how the messages of pipeline channels are called, and where this rank waits."""
    send = Channels.send
    post_receive = Channels._post_receive
    receive = Channels.receive

    def sending(channels: Channels, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        with recorder.carrying(message_text(message)):
            send(channels, message, tensors)

    def posting_receive(channels: Channels, channel: Any) -> None:
        with recorder.carrying(message_text(channel.expected[channel.place])):
            post_receive(channels, channel)

    def receiving(channels: Channels, message: Message) -> list[torch.Tensor]:
        peer = channels._routes[message].peer
        with recorder.carrying(message_text(message)):
            received = receive(channels, message)
            recorder.note_wait(peer)
        return received

    with (
        mock.patch.object(Channels, "send", sending),
        mock.patch.object(Channels, "_post_receive", posting_receive),
        mock.patch.object(Channels, "receive", receiving),
    ):
        yield
