"""Arguments of a run as they are taken one by one, each with the type that it must have; what is left has no field."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.strict_yaml import resolve
from toolkit.errors import RecipeError
from toolkit.files import printable

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("trainer_arguments.json").read_text(encoding="utf-8"))
_OFF: tuple[Any, ...] = (None, False, 0, "", "no", "none", [], {}, ["none"])


class ArgumentReader:
    """The arguments of a file, of which each is taken once."""

    def __init__(self, file: str, arguments: Mapping[str, Any]) -> None:
        self.file = file
        self._left = {name: resolve(value) if isinstance(value, str) else value for name, value in arguments.items()}

    def __contains__(self, name: str) -> bool:
        return self._left.get(name) is not None

    def take(self, *names: str) -> Any:
        """The value of the first of these names that has one, None if none has."""
        values = [self._left.pop(name, None) for name in names]
        return next((value for value in values if value is not None), None)

    def take_if(self, name: str, is_served: Callable[[Any], bool]) -> None:
        """Take a value that needs no field; any other is left, and so is a line of `leftovers`."""
        if name in self and is_served(self._left[name]):
            del self._left[name]

    def number(self, name: str, default: float, *, least: float = 0.0) -> float:
        """A number of at least `least`. Raises RecipeError for anything else."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            raise self.refused(name, value, f"a number of at least {least:g} is needed")
        return value

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number of at least `least`. Raises RecipeError for anything else."""
        value = self.number(name, default, least=least)
        if int(value) != value:
            raise self.refused(name, value, "a whole number is needed")
        return int(value)

    def flag(self, *names: str) -> bool:
        """Whether one of these is on; `auto` counts as on. Raises RecipeError for what is neither on nor off."""
        value = self.take(*names)
        if value not in (None, True, False, "auto"):
            raise self.refused(names[0], value, "true or false is needed")
        return bool(value)

    def text(self, *names: str) -> str | None:
        """A text, None where it is not given or empty. Raises RecipeError for anything else."""
        value = self.take(*names)
        if value is not None and not isinstance(value, str):
            raise self.refused(names[0], value, "a text is needed")
        return value or None

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object, which may be given as JSON; empty where it is not given. Raises RecipeError for anything else."""
        value = self.take(name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                value = json.loads(value)
            except ValueError:
                raise self.refused(name, value, "this is not JSON") from None
        if value is not None and not isinstance(value, Mapping):
            raise self.refused(name, value, "an object with names and values is needed")
        return value or {}

    def refused(self, name: str, value: Any, reason: str, advice: str = "Correct it") -> RecipeError:
        """The error about one argument."""
        return RecipeError(f"{printable(self.file)}: {name}={printable(str(value))}: {reason}. {advice}.")

    def leftovers(self) -> Iterator[str]:
        """A line for each argument that was not taken, is not off, and may matter for what is trained."""
        silent = set(_TABLE["silent"])
        prefixes = tuple(_TABLE["silent_prefixes"])
        for name, value in self._left.items():
            if value in _OFF or name in silent or name.startswith(prefixes):
                continue
            effect = _TABLE["otherwise"].get(name, "nothing of it is in the recipe")
            if effect is not None:
                shown = value if isinstance(value, str | int | float) else json.dumps(value, default=str)
                yield f"{printable(name)}={printable(str(shown))} has no counterpart: {effect}"
