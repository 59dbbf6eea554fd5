"""Errors about settings, checked by their fields."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from toolkit.errors import Refusal, ToolkitError


@contextmanager
def refused(kind: type[ToolkitError], *fields: str, remedy: Any = None) -> Iterator[list[Refusal]]:
    """The block raises one refusal of the values of `fields`, and `remedy` is among its remedies; it is appended."""
    found: list[Refusal] = []
    with pytest.raises(kind) as caught:
        yield found
    assert len(caught.value.refusals) == 1, caught.value
    found += caught.value.refusals
    assert "\n" not in str(caught.value)
    assert [item if isinstance(item, str) else item[0] for item in found[0].settings] == list(fields)
    assert remedy is None or remedy in found[0].remedy, found[0].remedy
