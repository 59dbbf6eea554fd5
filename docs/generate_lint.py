"""Write docs/lint.md: every rule of `dstk lint`, from toolkit/dsconfig/lint/rules/.

python docs/generate_lint.py

Only what stands between the two markers is replaced; the rest of the page is written by hand.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.dsconfig.lint import Rule
from toolkit.dsconfig.lint.rules import GROUPS, RULES

PAGE = Path(__file__).parent / "lint.md"
BEGIN = "<!-- rules: written by docs/generate_lint.py -->"
END = "<!-- end of rules -->"


def page(current: str) -> str:
    """`current` with the rules between the markers made new."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rules()}\n\n{END}{after}"


def rules() -> str:
    """One section a group, one entry a rule."""
    counted = f"{len(RULES)} rules. `--fix` stands where the mend is mechanical in at least one case."
    parts = [counted]
    for title, group in GROUPS:
        parts.append(f"### {title}")
        parts += [_entry(rule) for rule in group]
    return "\n\n".join(parts)


def _entry(rule: Rule) -> str:
    fixable = ", `--fix`" if rule.fixable else ""
    lines = [
        f"**{rule.id}** ({rule.severity}{fixable}): {rule.title}.",
        f"{rule.effect} Mend: {rule.mend}",
    ]
    if rule.sources:
        lines.append("Reported: " + ", ".join(f"[{_short(source)}]({source})" for source in rule.sources) + ".")
    given = _given(rule.given)
    lines.append(f"For instance{given}:\n\n```text\n{_example(rule)}\n```")
    return "\n".join(lines[:-1]) + "\n" + lines[-1]


def _short(url: str) -> str:
    parts = url.split("/")
    return f"{parts[-3]} #{parts[-1]}"


def _given(given: Mapping[str, Any]) -> str:
    said = {
        "gpus": lambda value: f"`--gpus {value}`",
        "layout": lambda value: f"`--layout {value}`",
        "shape": lambda value: f"`--model {value.family}`",
        "trainer": lambda value: " ".join(f"`--trainer-args {key}={json.dumps(item)}`" for key, item in value.items()),
        "runner": lambda value: f"`--for {value}`",
        "deepspeed": lambda value: f"`--deepspeed {'.'.join(map(str, value))}`",
        "mixed_precision": lambda value: f"accelerate's `mixed_precision: {value}`",
    }
    words = [said[key](value) for key, value in given.items() if key in said and value != "toolkit"]
    words += ["`--recipe`"] if "conflicts" in given else []
    return f", with {' and '.join(words)}" if words else ""


def _example(rule: Rule) -> str:
    if isinstance(rule.example, str):
        return rule.example.replace("\ufeff", "<U+FEFF>").rstrip()
    return json.dumps(rule.example)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
