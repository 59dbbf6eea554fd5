"""Activation memory, recorded from models' own code, against live runs, for every family with pipeline support.

    python benchmarks/recorded_activations.py [FAMILY...]
    python benchmarks/recorded_activations.py --save       # writes results/recorded_activations.md

A tiny model of each family (its own defaults, bf16, two samples of 48 positions) runs forward and backward on this CPU.
What lives when the forward pass is over ("kept"), and the most that lives at once ("peak"), are compared with the
recording of its config, which `dstk memory` uses too (`toolkit.recorder`: the model runs on tensors without memory, and
every size is a polynomial in samples and positions). Takes some 25 minutes.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import transformers
from measure.table import Sheet, publish_all
from measured_activations import Case, kept_bytes, peak_bytes  # type: ignore[import-not-found]

from toolkit.errors import ToolkitError
from toolkit.models.support import all_families

SETTINGS = (("eager", "none"), ("sdpa", "none"), ("eager", "full"), ("sdpa", "full"))
"""Attention, and what is recomputed."""
Errors = tuple[float, float] | None
"""Of what is kept and of the peak, in percent; none where there is nothing to compare."""


def main() -> None:
    """Print the tables, and save them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--save", action="store_true", help="write results/recorded_activations.md")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known = [name for name, support in all_families().items() if support.supports("pipeline")]
    families = options.families or known
    found = {(family, *setting): errors(family, *setting) for setting in SETTINGS for family in families}
    publish_all(
        "recorded_activations",
        sheets=[
            Sheet(
                title="Recorded activation memory against live runs",
                headings=["attention", "recompute", "families", "largest error of kept, %", "of the peak, %"],
                rows=[summary(setting, [found[family, *setting] for family in families]) for setting in SETTINGS],
                text_columns=2,
            ),
            Sheet(
                title="Errors of what is kept and of the peak, in percent",
                headings=["family", *(f"{attention}, {recompute}" for attention, recompute in SETTINGS)],
                rows=[[family, *(cell(found[family, *setting]) for setting in SETTINGS)] for family in families],
            ),
        ],
        notes=[
            "-: transformers has no such attention or recomputation for the family",
            "-, of dbrx and longcat_flash: refused, since they find each expert's tokens by value",
        ],
        save=options.save,
    )


def errors(family: str, attention: str, recompute: str) -> Errors:
    """Of the recording of a tiny config, against the run of its model."""
    case = Case(family=family, attention=attention, recompute=recompute, drops=False)
    try:
        model = case.model()
    except Exception:  # transformers has no such attention, or no such recomputation, for it
        return None
    case.logits(model, case.inputs(model)[0])  # the first pass may convert buffers, which then stay with the model
    kept, peak = kept_bytes(case, model), peak_bytes(case, model)
    try:
        return 100 * (case.predicted_kept() / kept - 1), 100 * (case.predicted_peak() / peak - 1)
    except ToolkitError:  # which names what it does not know
        return None


def summary(setting: tuple[str, str], found: Sequence[Errors]) -> list[str]:
    """How many families there are, and the largest errors."""
    given = [one for one in found if one is not None]
    largest = (max((one[i] for one in given), key=abs, default=0.0) for i in range(2))
    return [*setting, str(len(given)), *(f"{error:+.2f}" for error in largest)]


def cell(found: Errors) -> str:
    """Both errors."""
    return "-" if found is None else " ".join(f"{error:+.2f}" for error in found)


if __name__ == "__main__":
    main()
