"""Write the numbers of docs/known-bugs.md: run examples/plain_deepspeed and compare it with one process.

python docs/generate_known_bugs.py [NAME...]

Only the text between markers is replaced; the rest of the page is written by hand. With names, the numbers of those
bugs are only printed. Takes about a minute.
"""

import datetime
import importlib
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import accelerate
import deepspeed
import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "plain_deepspeed"))

from cases import BUGS, KnownBug, Runs  # noqa: E402

from toolkit.launch.local_ranks import run_ranks  # noqa: E402
from toolkit.launch.output import quiet  # noqa: E402
from toolkit.parity import ParityResult, ParityRun  # noqa: E402

PAGE = Path(__file__).parent / "known-bugs.md"
END = "<!-- end of numbers -->"


def numbers(bug: KnownBug, runs: Runs) -> str:
    """The table of one bug, and what the comparison says."""
    reference = runs.reference(bug)
    plain = ParityResult.of(runs.plain(bug), reference)
    fixed = ParityResult.of(runs.plain(bug, repaired=True), reference)
    ours = ParityResult.of(runs.toolkit(bug), reference)
    steps = len(reference.curve)
    headings = f"loss, step 1 | loss, step {steps} | gradient norm, step 1 | gradients, step 1 | all weights"
    lines = [
        f"| | {headings} | differs from step |",
        "|---|---|---|---|---|---|---|",
        f"| one process | {_curve(reference)} | | | |",
        f"| this script | {_row(plain)} |",
        f"| fixed | {_row(fixed)} |",
        f"| the toolkit, `{ours.curves.label}` | {_row(ours)} |",
        "",
        f"> {plain.diagnosis}",
    ]
    if bug.is_hidden_by_adam:
        adamw = bug.with_adamw()
        report = ParityResult.of(runs.plain(adamw), runs.reference(adamw)).curves
        gap = f"{report.max_loss_difference:.1e} at most (relative)"
        lines += [
            "",
            f"With AdamW at a rate of 3e-4, in {report.steps} steps the losses of this script are off by {gap}.",
        ]
    return "\n".join(lines)


def page(current: str, found: dict[str, str]) -> str:
    """`current` with the text between markers made new."""
    for name, text in found.items():
        begin = f"<!-- numbers: {name} -->"
        if begin not in current:
            sys.exit(f"{PAGE.name}: no {begin}")
        pattern = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
        current = pattern.sub(lambda _, text=text, begin=begin: f"{begin}\n\n{text}\n\n{END}", current)  # type: ignore[misc]
    return current


def versions() -> str:
    """What the numbers were measured with."""
    return (
        f"Measured on {datetime.date.today()}: deepspeed {deepspeed.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, accelerate {accelerate.__version__}, Python "
        f"{platform.python_version()}, CPU ranks over gloo, fp32."
    )


def _curve(run: ParityRun) -> str:
    curve = run.curve
    return f"{curve.losses[0]:.6f} | {curve.losses[-1]:.6f} | {curve.grad_norms[0]:.6f}"


def _row(result: ParityResult) -> str:
    wrong, count, worst = len(result.wrong_gradients), len(result.gradients), result.gradients[0]
    shown = (
        f"{wrong} of {count} wrong; ratio {worst.ratio:.4f}, cosine {worst.cosine:.4f} in `{worst.name}`"
        if wrong
        else "right"
    )
    first = {
        "loss": result.curves.first_loss_beyond,
        "norm": result.curves.first_norm_beyond,
    }
    beyond = ", ".join(f"{step} ({name})" for name, step in first.items() if step is not None) or "none"
    return f"{_curve(result.run)} | {shown} | {result.parameters:.1e} | {beyond} |".removesuffix(" |")


def main(names: list[str]) -> None:
    """Run, and write the page if no name was given."""
    unknown = set(names) - {bug.name for bug in BUGS}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not among {', '.join(bug.name for bug in BUGS)}.")
    torch.set_num_threads(1)
    quiet(debug=False)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for late in ("deepspeed.moe.ep_count", "deepspeed.runtime.zero.muon.muon_optimizer"):
        importlib.import_module(late)  # here once, and not in every rank
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), run_ranks)
        for bug in BUGS:
            if not names or bug.name in names:
                found[bug.name] = numbers(bug, runs)
                print(f"{bug.name}\n\n{found[bug.name]}\n", flush=True)
    if not names:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), {"versions": versions()} | found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
