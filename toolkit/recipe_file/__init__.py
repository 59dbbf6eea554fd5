"""A recipe as a YAML file: decoded strictly, every problem reported at once with its line and column.

What reads YAML is imported at its first use: the rules alone (`parallelism`) are also asked where there is no file.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.recipe_file.decode import dump, load
    from toolkit.recipe_file.rules import cut_problems, problems
    from toolkit.recipe_file.schema import json_schema

__all__ = ["load", "dump", "problems", "cut_problems", "json_schema"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    module = {
        "load": "decode",
        "dump": "decode",
        "problems": "rules",
        "cut_problems": "rules",
        "json_schema": "schema",
    }.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = found
    return found
