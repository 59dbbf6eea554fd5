"""Activation memory, recorded from models' own code, against live runs, for every family with pipeline support.

    python benchmarks/recorded_activations.py [FAMILY...]
    python benchmarks/recorded_activations.py --save       # writes results/recorded_activations.md

A tiny model of each family (its own defaults, bf16, two samples of 48 positions) runs forward and backward on this CPU.
What lives when the forward pass is over ("kept"), and the most that lives at once ("peak"), are compared with the
recording of its config, which `dstk memory` uses too (`toolkit.recorder`: the model runs on tensors without memory, and
every size is a polynomial in samples and positions). Takes some minutes.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import transformers
from measure.table import Sheet, publish_all
from measured_activations import Case, kept_bytes, peak_bytes  # type: ignore[import-not-found]

from toolkit.errors import ToolkitError
from toolkit.models.support import all_families

SETTINGS = (("eager", "none"), ("sdpa", "none"), ("eager", "full"))
Bytes = tuple[int, int]
"""Kept, and the peak."""


def main() -> None:
    """Print the table, and save it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--save", action="store_true", help="write results/recorded_activations.md")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known = [name for name, support in all_families().items() if support.supports("pipeline")]
    rows = [row(family, *setting) for family in options.families or known for setting in SETTINGS]
    publish_all(
        "recorded_activations",
        sheets=[
            Sheet(
                title="Recorded activation memory against live runs: errors in percent",
                headings=["family", "attention", "recompute", "kept", "peak"],
                rows=rows,
                text_columns=3,
            )
        ],
        notes=["-: transformers has no such attention or recomputation for the family, or it cannot be recorded"],
        save=options.save,
    )


def row(family: str, attention: str, recompute: str) -> list[str]:
    """Errors of what is kept and of the peak, or why there are none."""
    case = Case(family=family, attention=attention, recompute=recompute, drops=False)
    cells = [family, attention, recompute]
    try:
        model = case.model()
    except Exception:  # transformers has no such attention, or no such recomputation, for it
        return [*cells, *"--"]
    live = kept_bytes(case, model), peak_bytes(case, model)
    return [*cells, *errors(recorded, case, live)]


def errors(predict: Any, case: Any, live: Bytes) -> list[str]:
    """Of a prediction, in percent."""
    try:
        return [f"{100 * (own / true - 1):+.2f}" for own, true in zip(predict(case), live, strict=True)]
    except ToolkitError:  # which names what it does not know
        return ["-", "-"]


def recorded(case: Any) -> Bytes:
    """By the recording of the config."""
    return case.predicted_kept(), case.predicted_peak()


if __name__ == "__main__":
    main()
