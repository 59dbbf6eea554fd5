"""nonempty: what a test loops over, with a failure where there is nothing to loop over."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def nonempty(values: Iterable[T]) -> list[T]:
    """Return the values as a list. Without any, a test that asserts in a loop over them would pass unseen."""
    found = list(values)
    assert found, "there is nothing to check"
    return found
