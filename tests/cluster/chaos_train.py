"""recipes/train.py for chaos.py: a file `flip-RANK` in the working directory flips a bit of that rank's weights."""

import os
import sys
from pathlib import Path

import toolkit  # which imports torch later, when its warnings are silenced
from toolkit.launch.output import quiet, reported_errors
from toolkit.training.arguments import parse_arguments


def main(argv: list[str]) -> None:
    """Train as recipes/train.py does, with bits that flip."""
    import torch

    from toolkit.training.loop import TrainingRun

    class FlippedBits(toolkit.Callback):
        """Flips a bit of one weight, as a fault of memory does, in the step after the file appeared."""

        def on_step_begin(self, run: TrainingRun) -> None:
            order = Path(f"flip-{os.environ['RANK']}")
            if not order.exists():
                return
            order.unlink()
            weight = next(iter(run.engine.model.parameters()))
            with torch.no_grad():
                bits = weight.data.view(-1)[:1].view(torch.int32)
                bits ^= 1 << 20

    arguments = parse_arguments(argv, description=__doc__ or "")
    job = toolkit.load_job(arguments.config, arguments.overrides, arguments.layout)
    quiet(debug=False)
    toolkit.train(job, [FlippedBits()], arguments.options)


if __name__ == "__main__":
    with reported_errors():
        main(sys.argv[1:])
