"""recipes/train.py for chaos.py: a file `flip-RANK` in the working directory flips a bit of that rank's weights."""

import os
import sys
from pathlib import Path

import torch

import toolkit
from toolkit.launch.output import quiet, reported_errors
from toolkit.training.arguments import parse_arguments


class FlippedBits(toolkit.Callback):
    """Flips a bit of one weight, as a fault of memory does, in the step after the file appeared."""

    def __init__(self) -> None:
        self._order = Path(f"flip-{os.environ['RANK']}")

    def on_step_begin(self, run: toolkit.train) -> None:  # type: ignore[valid-type]
        if not self._order.exists():
            return
        self._order.unlink()
        weight = next(iter(run.engine.model.parameters()))  # type: ignore[attr-defined]
        with torch.no_grad():
            bits = weight.data.view(-1)[:1].view(torch.int32)
            bits ^= 1 << 20


def main(argv: list[str]) -> None:
    """Train as recipes/train.py does, with bits that flip."""
    arguments = parse_arguments(argv, description=__doc__ or "")
    job = toolkit.load_job(arguments.config, arguments.overrides, arguments.layout)
    quiet(debug=False)
    toolkit.train(job, [FlippedBits()], arguments.options)


if __name__ == "__main__":
    with reported_errors():
        main(sys.argv[1:])
