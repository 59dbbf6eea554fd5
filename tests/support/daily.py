"""Which parameters of a test run in `make test`; the others have the marker `whole`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def daily(cases: Iterable[Any], is_daily: Callable[[int, Any], bool]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `is_daily` gets a case's number and the case."""
    return [pytest.param(case, marks=[] if is_daily(i, case) else [pytest.mark.whole]) for i, case in enumerate(cases)]
