"""Golden curves: recorded losses of small recipes, in golden/ as YAML and JSON.

make golden                                                  all of them
python tests/parity/golden_curves.py                         the same
python tests/parity/golden_curves.py llama                   one

Parity compares two runs of the same code; a mistake that both make shows only here. A changed curve is a change in what
the toolkit computes: the commit with a new JSON says why.
"""

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from toolkit.config import load_recipe
from toolkit.config.recipe import Recipe
from toolkit.parity import LossCurve

FOLDER = Path(__file__).parent / "golden"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
_VERSIONS = ("torch", "transformers", "numpy", "tokenizers")


def recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a golden curve, run by the reference engine unless `overrides` say otherwise."""
    return load_recipe(FOLDER / f"{name}.yaml", overrides)


def read(name: str) -> LossCurve:
    """The committed curve."""
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return LossCurve.from_steps(f"golden {name}", zip(kept["losses"], kept["grad_norms"], strict=True))


def write(name: str) -> None:
    """Train the recipe on the reference engine and keep its curve."""
    from toolkit.parity.run.train_in_memory import train_in_memory

    curve = train_in_memory(recipe(name)).curve
    kept = {
        "about": f"Written by `make golden` from {name}.yaml. A commit that changes it says why in its message.",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in _VERSIONS},
        "machine": platform.machine(),
        # The digits of fp32 and one more: any further digit is noise that differs between machines.
        "losses": [float(f"{loss:.9g}") for loss in curve.losses],
        "grad_norms": [float(f"{norm:.9g}") for norm in curve.grad_norms],
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(names: Sequence[str]) -> None:
    """Write the named curves, or all."""
    import torch

    torch.set_num_threads(1)
    for name in names or NAMES:
        write(name)
        print(f"{FOLDER / name}.json: loss {read(name).losses[0]:.4f} -> {read(name).losses[-1]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
