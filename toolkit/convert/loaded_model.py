"""Loading a Hugging Face model whose files must have every weight of the model that config.json describes.

transformers initializes missing weights randomly and goes on, with a warning. What such a model computes looks like the
output of a badly trained one, so it is refused here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.files import reason_of
from toolkit.units import plural


def load_model(folder: Path, *, unexpected: bool = True, **options: Any) -> Any:
    """Load the model in `folder`, in evaluation mode.

    `unexpected`: whether weights that the model has no place for are allowed. `options`: of transformers'
    from_pretrained. Raises CheckpointError where weights are missing or have other shapes, and for what transformers
    cannot load; one line each.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the shapes are in the report
            trust_remote_code=False,
            **options,
        )
    except Exception as error:
        raise CheckpointError(f"{folder}: transformers cannot load it ({reason_of(error)}).") from error
    advice = "Give a model whose config.json and weights belong together."
    if report["mismatched_keys"]:
        name, stored, asked = min(report["mismatched_keys"])
        shapes = f"{name} has shape {list(stored)}, but by config.json it has {list(asked)}"
        raise CheckpointError(f"{folder}: {shapes}. {advice}")
    missing = missing_weights(report)
    if missing is not None:
        raise CheckpointError(f"{folder}: missing weights: {missing}. {advice}")
    if report["unexpected_keys"] and not unexpected:
        unexpected_names = _first_name(report["unexpected_keys"])
        raise CheckpointError(f"{folder}: weights that config.json has no place for: {unexpected_names}. {advice}")
    return model.eval()


def missing_weights(report: Mapping[str, Any]) -> str | None:
    """Name the weights that transformers initialized randomly; None where the files have all.

    `report`: what its from_pretrained returns with `output_loading_info`.
    """
    return _first_name(report["missing_keys"]) if report["missing_keys"] else None


def _first_name(names: set[str]) -> str:
    """Return the first name, and how many others there are."""
    first = min(names)
    return first if len(names) == 1 else f"{first} and {plural(len(names) - 1, 'other')}"
