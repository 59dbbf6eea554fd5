"""Write the tables of recipe fields in docs/recipes.md, from the types and docstrings of toolkit/config/recipe.py.

python docs/generate_recipes.py

Only the part between the two markers is replaced; the rest of the page is written by hand.
"""

import json
from pathlib import Path as FilePath

from toolkit.config.recipe_schema import allowed, fields, is_section, lookup
from toolkit.config.source_text import Path, dotted

PAGE = FilePath(__file__).parent / "recipes.md"
BEGIN = "<!-- fields: written by docs/generate_recipes.py -->"
END = "<!-- end of fields -->"
_HEAD = "| field | type | default | meaning |\n|---|---|---|---|"


def page(current: str) -> str:
    """`current` with new tables between the markers."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def tables() -> str:
    """One table a section, in the order of the recipe; fields outside of sections come last."""
    sections = [name for name in fields(()) if is_section(lookup((name,)) or {})]
    parts = [part for name in sections for part in _sections((name,))]
    single = [_row((name,)) for name in fields(()) if name not in sections]
    parts.append("\n".join(["### Outside of sections", "", _HEAD, *single]))
    return "\n\n".join(parts)


def _sections(path: Path) -> list[str]:
    """The table of a section, and those of the sections inside it."""
    schema, names = lookup(path) or {}, fields(path)
    needed = path[-1] in (lookup(path[:-1]) or {}).get("required", []) or path[-1] == 0
    optional = "" if needed else " This section is optional."
    rows = [_row((*path, name)) for name in names]
    title = dotted(path).removesuffix("[0]")
    own = "\n".join([f"### {title}", "", f"{_one_line(schema['description'])}{optional}", "", _HEAD, *rows])
    below = [place for name in names for place in ((*path, name), (*path, name, 0))]  # 0: an entry of a list
    return [own, *(part for place in below if is_section(lookup(place) or {}) for part in _sections(place))]


def _row(path: Path) -> str:
    section, name = lookup(path[:-1]) or {}, path[-1]
    field = section["properties"][name]
    preset = "required" if name in section.get("required", []) else f"`{json.dumps(field.get('default', {}))}`"
    kind = allowed(lookup(path) or {}).removeprefix("a ") + ", or null" * (preset == "`null`")
    return f"| `{name}` | {kind} | {preset} | {_one_line(field['description'])} |"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
