"""Recipes: YAML files decoded strictly into frozen sections, every problem reported at once with its line and column.

What reads YAML is imported at its first use: the rules alone (`parallel_rules`) also apply where there is no file.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.config.decode import dump_recipe, load_recipe, load_rounded, overrides_between, recipe_layouts
    from toolkit.config.recipe_rules import parallelism_conflicts, recipe_conflicts, recipe_problems
    from toolkit.config.recipe_schema import recipe_json_schema

_MODULES = {
    **dict.fromkeys(("load_recipe", "load_rounded", "dump_recipe", "overrides_between", "recipe_layouts"), "decode"),
    **dict.fromkeys(("recipe_conflicts", "recipe_problems", "parallelism_conflicts"), "recipe_rules"),
    "recipe_json_schema": "recipe_schema",
}
# fmt: off
__all__ = ["dump_recipe", "load_recipe", "load_rounded", "overrides_between", "parallelism_conflicts",
           "recipe_conflicts", "recipe_json_schema", "recipe_layouts", "recipe_problems"]
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
