"""`torch.cuda` of the stub GPU. It is imported once stub_cuda.cpp is loaded, in the process of stub_cuda.py alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from stub_facts import LOG, MEMORY_BYTES, NAME, PEAK_BYTES
from torch._subclasses.fake_tensor import FakeTensorMode

GPU = torch.device("cuda", 0)


class Stream(torch.Stream):
    """A stream of the stub GPU, whose waits and events are logged."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> "Stream":
        made: Stream = super().__new__(cls, device=GPU, priority=priority)
        return made

    def __init__(self, *arguments: Any, **options: Any) -> None:
        LOG.append(("stream", str(self.stream_id)))

    def wait_stream(self, stream: Any) -> None:
        LOG.append(("wait_stream", str(self.stream_id), str(stream.stream_id)))

    def wait_event(self, event: Any) -> None:
        LOG.append(("wait_event", str(self.stream_id), event.name))

    def record_event(self, event: Any = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        LOG.append(("synchronize", str(self.stream_id)))

    def query(self) -> bool:
        return True


class Event:
    """An event of the stub GPU, named by its number."""

    made = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        Event.made += 1
        self.name = f"event {Event.made}"

    def record(self, stream: Any = None) -> None:
        LOG.append(("record", str((stream or current_stream()).stream_id), self.name))

    def wait(self, stream: Any = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        LOG.append(("synchronize", self.name))

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


_default = Stream()
_active = [_default]
"""Streams that were made the current one, the innermost last."""


def current_stream(device: Any = None) -> Stream:
    """Return the stream on which operations would run."""
    return _active[-1]


class StreamContext:
    """Makes a stream the current one inside; with None nothing changes."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        _active.append(_active[-1] if self._stream is None else self._stream)

    def __exit__(self, *error: Any) -> None:
        _active.pop()


def _logged(name: str) -> Callable[..., None]:
    return lambda *arguments, **options: LOG.append((name, *map(str, arguments)))


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: answer


_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": NAME,
    "get_device_capability": (9, 0),
    "get_device_properties": SimpleNamespace(
        name=NAME, total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132
    ),
    "get_arch_list": ["sm_90"],
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "memory_allocated": 0,
    "max_memory_allocated": PEAK_BYTES,
    "memory_reserved": 0,
    "max_memory_reserved": PEAK_BYTES,
    "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
    "memory_stats": {},
    "default_stream": _default,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
}
_LOGGED = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_stream")


def install() -> None:
    """Let `torch.cuda` have the stub GPU."""
    LOG.clear()
    cuda: Any = torch.cuda
    for name, answer in _ANSWERS.items():
        setattr(cuda, name, _answering(answer))
    for name in _LOGGED:
        setattr(cuda, name, _logged(name))
    for name in ("_record_memory_history", "_dump_snapshot"):
        setattr(cuda.memory, name, _logged(name))
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, _answering(0))
    cuda.nccl.version = _answering((2, 27, 5))
    cuda._initialized = True
    cuda.default_generators = (torch.Generator(GPU),)
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.stream = StreamContext
    cuda.StreamContext = StreamContext
    cuda.current_stream = current_stream
    # torch's C++ functions for CUDA, which its CPU build lacks, as far as other packages call them.
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        setattr(torch._C, name, _answering(0))
    # torch.tensor(1.0, device="cuda") would ask the device for memory before it is a fake tensor.
    FakeTensorMode.avoid_device_init = True  # type: ignore[assignment, method-assign]
    torch.Tensor.record_stream = lambda tensor, stream: LOG.append(  # type: ignore[method-assign]
        ("record_stream", str(stream.stream_id))
    )
