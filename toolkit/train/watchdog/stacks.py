"""What the threads of this process are doing. Imports no torch."""

import linecache
import sys
import threading
import traceback
from types import FrameType

_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")


def stacks(title: str) -> str:
    """The stack of each Python thread but those that watch, the main thread's last."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("watchdog")]
    threads.sort(key=lambda thread: thread is threading.main_thread())
    shown = [
        f"{title}, thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    ]
    return "\n".join(shown)


def is_in_collective() -> bool:
    """Whether the main thread is seen to wait for other ranks: in a call of torch.distributed, or for its handle."""
    frame = main_frame()
    if frame is None:
        return False
    if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)  # None between two lines
    return "handle" in line and ".wait(" in line


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)
