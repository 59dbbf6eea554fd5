"""Finding: a contradiction between the fields of a recipe."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from toolkit.recipe_file.strict_yaml import Path  # which reads YAML, and findings are also made without


class Finding(NamedTuple):
    """A contradiction, and the field where one would look for it."""

    path: "Path"
    message: str
