"""Finding: a contradiction between the fields of a recipe."""

from typing import NamedTuple

from toolkit.recipe_file.strict_yaml import Path


class Finding(NamedTuple):
    """A contradiction, and the field where one would look for it."""

    path: Path
    message: str
