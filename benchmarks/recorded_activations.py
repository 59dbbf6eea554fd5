"""Activation memory, recorded from models' own code and estimated, against live runs, for every family with pp support.

    python benchmarks/recorded_activations.py [FAMILY...]
    python benchmarks/recorded_activations.py --save       # writes results/recorded_activations.md

A tiny model of each family (its own defaults, bf16, two samples of 48 positions) runs forward and backward on this CPU.
What lives when the forward pass is over ("kept"), and the most that lives at once ("peak"), are compared with the
recording of its config (`recorder/`: the model runs on tensors without memory, and every size is a polynomial in
samples and positions) and with the estimate of `dstk memory`, which knows fewer families. Takes some minutes.
"""

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
import transformers
from allocations import LiveBytes  # type: ignore[import-not-found]
from measure.table import Sheet, publish_all
from measured_activations import SEQ_LEN, Case, peak_bytes  # type: ignore[import-not-found]
from recorder.record import record
from recorder.recording import Setup, config_text

from toolkit.errors import ToolkitError
from toolkit.models.support import all_families
from toolkit.parallel.loss import token_loss_sum

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
                title="Activation memory, recorded and estimated, against live runs: errors in percent",
                headings=["family", "attention", "recompute", "recorded: kept", "peak", "estimated: kept", "peak"],
                rows=rows,
                text_columns=3,
            )
        ],
        notes=["-: transformers has no such attention or recomputation for the family, or there is no estimate"],
        save=options.save,
    )


def row(family: str, attention: str, recompute: str) -> list[str]:
    """Errors of what is kept and of the peak, or why there are none."""
    case = Case(family=family, attention=attention, recompute=recompute, drops=False)
    cells = [family, attention, recompute]
    try:
        model = case.model()
    except Exception:  # transformers has no such attention, or no such recomputation, for it
        return [*cells, *"----"]
    live = kept_bytes(case, model), peak_bytes(case, model)
    return [*cells, *errors(recorded, case, live), *errors(estimated, case, live)]


def errors(predict: Any, case: Any, live: Bytes) -> list[str]:
    """Of a prediction, in percent."""
    try:
        return [f"{100 * (own / true - 1):+.2f}" for own, true in zip(predict(case), live, strict=True)]
    except ToolkitError:  # which names what it does not know
        return ["-", "-"]


def kept_bytes(case: Any, model: Any) -> int:
    """What lives when the forward pass is over, with what the model was given."""
    inputs, labels = case.inputs(model)
    with LiveBytes() as live:
        loss = token_loss_sum(case.logits(model, inputs), labels)
        gc.collect()
        found = int(live.live_bytes)
    del loss
    return found + int(labels.nbytes) + sum(one.nbytes for one in inputs.values() if isinstance(one, torch.Tensor))


def recorded(case: Any) -> Bytes:
    """By the recording of the config."""
    setup = Setup(
        config=config_text(case.config().to_dict()), recompute=case.recompute, attention=case.attention, device="cpu"
    )
    found, layers = record(setup, SEQ_LEN).at(case.samples, SEQ_LEN), range(layers_of(case))
    return found.kept(layers), found.worst_moment(layers)[0]


def estimated(case: Any) -> Bytes:
    """By the estimate. Raises ModelError for a family that it does not know."""
    found, layers = case.estimate(), layers_of(case)
    return found.kept(layers=layers), found.worst_moment(layers=layers)[0]


def layers_of(case: Any) -> int:
    """Decoder layers."""
    return int(case.config().get_text_config(decoder=True).num_hidden_layers)


if __name__ == "__main__":
    main()
