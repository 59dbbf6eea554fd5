"""A recipe as a YAML file: decoded strictly, every problem reported at once with its line and column."""

from toolkit.recipe_file.decode import dump, load
from toolkit.recipe_file.rules import cut_problems, problems
from toolkit.recipe_file.schema import json_schema

__all__ = ["load", "dump", "problems", "cut_problems", "json_schema"]
