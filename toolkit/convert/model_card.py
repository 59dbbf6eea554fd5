"""The model card of an export (README.md): base model, data, layout, curve and versions, from what a checkpoint says.

It has the front matter that the Hugging Face hub reads. Nothing in it is guessed: what a checkpoint does not say is
left out.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.files import read_text

CARD = "README.md"
_METRICS = "metrics.jsonl"
_MOST_METRICS_BYTES = 2**28
_CURVE_POINTS = 8
_VERSIONS = ("toolkit", "torch", "transformers", "deepspeed")


def model_card(checkpoint: Path, state: Mapping[str, Any]) -> str:
    """The card of a checkpoint whose trainer_state.json is `state`, in Markdown."""
    recipe = _section(state, "recipe")
    model = _section(recipe, "model")
    data = _section(recipe, "data")
    base = _text(model.get("name_or_path"))
    is_base = model.get("init") == "pretrained" and "/" in base and not Path(base).is_absolute() and base[0] != "."
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    lines += [f"base_model: {json.dumps(base)}"] if is_base else []
    lines += ["---", "", f"# {Path(base).name or 'A language model'}, {state.get('step')} steps", ""]
    facts = {
        "Base model": f"{base} ({_text(model.get('init')) or 'random'} weights)",
        "Data": _data(data),
        "Trained on": f"{state.get('samples')} samples, {state.get('tokens')} target tokens, {state.get('step')} steps",
        "Layout": f"{state.get('layout')}, {state.get('engine')}, {state.get('precision')}",
        "Optimizer": _settings(_section(recipe, "optimizer")),
        "Schedule": _settings(_section(recipe, "schedule")),
        "Versions": _settings({name: _section(state, "versions").get(name) for name in _VERSIONS}),
    }
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in facts.items() if text]
    curve = list(_curve(checkpoint.parent / _METRICS, int(state.get("step") or 0)))
    if curve:
        lines += ["", "| step | loss |", "|---|---|", *(f"| {step} | {loss:.4f} |" for step, loss in curve)]
    return "\n".join([*lines, ""])


def _section(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = of.get(name)
    return value if isinstance(value, Mapping) else {}


def _data(data: Mapping[str, Any]) -> str:
    sources = data.get("sources") or [{"source": data.get("source")}]
    names = [_text(source.get("source")) for source in sources if isinstance(source, Mapping)]
    return ", ".join(filter(None, names))


def _settings(section: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in section.items() if value not in (None, "", {}, []))


def _text(value: Any) -> str:
    """A value for a cell of a table."""
    text = "" if value is None else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _curve(file: Path, last: int) -> Iterator[tuple[int, float]]:
    """A few points of the loss up to the step, the first and the last among them."""
    try:
        lines = read_text(file, max_bytes=_MOST_METRICS_BYTES).splitlines()
        rows = [json.loads(line) for line in lines]
        points = [(int(row["step"]), float(row["loss"])) for row in rows if "loss" in row and row["step"] <= last]
    except (OSError, ValueError, KeyError, TypeError):
        return
    stride = max(1, -(-len(points) // _CURVE_POINTS))
    for number, point in enumerate(points):
        if number % stride == 0 or number == len(points) - 1:
            yield point
