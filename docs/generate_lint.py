"""Write the table of docs/lint.md: every rule of `dstk lint`, from toolkit/lint/rules.json.

python docs/generate_lint.py

Only what is between the two markers is replaced; the rest of the page is written by hand.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.lint import Rule
from toolkit.lint.finding import GROUPS

PAGE = Path(__file__).parent / "lint.md"
BEGIN = "<!-- rules: written by docs/generate_lint.py -->"
END = "<!-- end of rules -->"
_HEADER = "distributed_type: DEEPSPEED\nnum_processes: 8\n"


def page(current: str) -> str:
    """`current` with the rules between the markers made new."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def tables() -> str:
    """One table a group, one row a rule."""
    parts = []
    for title, group in GROUPS:
        head = ["| rule | severity | what is wrong | for example |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {title}\n", *head, *(_row(rule) for rule in group)]))
    return "\n\n".join(parts)


def _row(rule: Rule) -> str:
    sources = ", ".join(f"[#{source.split('/')[-1]}]({source})" for source in rule.sources)
    what = rule.title + (f" ({sources})" if sources else "")
    severity = f"{rule.severity}{' 🔧' if rule.fixable else ''}"
    return f"| {rule.id} | {severity} | {what} | {_example(rule)}{_given(rule.facts)} |"


def _given(given: Mapping[str, Any]) -> str:
    """The options of `dstk lint` without which the example is right."""
    words = {
        "trainer": lambda values: " ".join(f"--trainer-args {key}={json.dumps(item)}" for key, item in values.items()),
        "runner": lambda value: "--recipe …" if value == "toolkit" else f"--for {value}",
        "conflicts": lambda value: "",
        "gpu_bytes": lambda value: f"--gpu-memory {value}",
        "mixed_precision": lambda value: f"accelerate: mixed_precision {value}",
    }
    said = [words.get(name, lambda value, name=name: f"--{name} {value}")(value) for name, value in given.items()]
    return "".join(f"<br>`{word}`" for word in said if word)


def _example(rule: Rule) -> str:
    text = rule.example if isinstance(rule.example, str) else json.dumps(rule.example)
    lines = text.removeprefix(_HEADER).replace("\ufeff", "<U+FEFF>").rstrip().split("\n")
    return "<br>".join(f"`{line}`" for line in lines).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
