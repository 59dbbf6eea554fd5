"""The page of a rank outlives its process, and is not taken for the page that the rank has open of another one."""

import os
import signal
from collections.abc import Iterator

import pytest

from toolkit.launch.health.progress_page import ProgressPage


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    made = ProgressPage.create()
    assert made is not None
    yield made
    made.close()


def test_the_page_of_a_process_that_was_killed_says_where_it_was(page: ProgressPage) -> None:
    page.write(1, "forward")
    ready, written = os.pipe()
    pid = os.fork()
    if not pid:
        while os.open(os.devnull, os.O_RDONLY) < 64:
            pass  # so that the inherited page is found before this one
        mine = ProgressPage.create()
        assert mine is not None
        mine.write(6, "data")
        mine.write(7, "backward")
        os.write(written, b"1")
        signal.pause()
    os.read(ready, 1)
    theirs = ProgressPage.of_process(pid)
    assert theirs is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert theirs.read() == (7, "backward")
    assert page.read() == (1, "forward")
    theirs.close()
    os.close(ready)
    os.close(written)


def test_a_process_without_a_page_has_none() -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
    try:
        assert ProgressPage.of_process(pid) is None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
