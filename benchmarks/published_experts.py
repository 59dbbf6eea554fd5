"""Published steps of mixtures of experts, predicted by the function that `dstk plan --layout` calls.

    python benchmarks/published_experts.py            # benchmarks/published/experts.csv
    python benchmarks/published_experts.py --save     # results/published_experts.md

A row is a run; its columns become public options of the time model. Nothing here computes a time. Megatron counts
tensor-parallel ranks among the expert-parallel ones where experts are whole (expert tensor parallelism 1); here they
are two axes.
"""

import argparse
import csv
import sys
from collections.abc import Mapping
from pathlib import Path

from measure.table import publish

from toolkit.config.layout import Batch, Layout
from toolkit.errors import LayoutError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.hardware import gpu
from toolkit.models.shape import local_config
from toolkit.planner.cluster import Cluster
from toolkit.planner.execution import Execution
from toolkit.planner.request import PlanRequest
from toolkit.planner.step_time import StepTime

_ROWS = Path(__file__).parent / "published" / "experts.csv"
_NOTES = (
    "asked: the runs that an issue asked for within 15 %; a row's source is in published/experts.csv",
    "all with balanced experts; consecutive: a token's experts are neighbors, as in NeMo Automodel's balanced gate",
    "no constant was set on these rows; docs/time-model.md names what was read in sources after a first prediction",
)


def predicted(row: Mapping[str, str]) -> tuple[Layout, StepTime, MemoryBreakdown | None]:
    """The layout of a row, its step, and its memory if the framework's profile has the layout.

    Raises ToolkitError, KeyError or ValueError for what no option means.
    """
    number = {name: int(row[name]) for name in ("gpus", "tp", "pp", "vp", "ep", "micro_batch", "accumulation")}
    dp = number["gpus"] // (number["tp"] * number["pp"])
    layout = Layout(
        dp=dp,
        ep=number["ep"] // number["tp"],
        tp=number["tp"],
        pp=number["pp"],
        zero_stage=int(row["zero"]),
        sequence_parallel=number["tp"] > 1,
        recompute=row["recompute"],  # type: ignore[arg-type]
    )
    batch = Batch(
        global_batch_size=number["micro_batch"] * number["accumulation"] * dp,
        micro_batch_size=number["micro_batch"],
        dp=dp,
    )
    execution = Execution(
        framework=row["framework"],
        precision=row["precision"],  # type: ignore[arg-type]
        attention=row["attention"],  # type: ignore[arg-type]
        dispatcher=row["dispatcher"],  # type: ignore[arg-type]
        routing=row["routing"],  # type: ignore[arg-type]
        virtual_stages=number["vp"],
    )
    request = PlanRequest.of(
        row["model"],
        local_config(row["model"]),
        cluster=Cluster.of(gpu(row["gpu"])),
        gpus=number["gpus"],
        seq_len=int(row["seq_len"]),
        global_batch_size=batch.global_batch_size,
        execution=execution,
    )
    try:
        memory = request.memory(layout, batch)
    except LayoutError:
        memory = None
    return layout, request.step(layout, batch), memory


def rows() -> list[dict[str, str]]:
    """All runs."""
    with _ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/published_experts.md")
    save = parser.parse_args().save
    table = []
    for row in rows():
        layout, step, memory = predicted(row)
        measured = step.tokens / step.gpus / float(row["tokens_per_s_gpu"])
        largest = sorted(step.terms.items(), key=lambda term: -term[1])[:3]
        table.append(
            [
                row["model"],
                row["framework"],
                f"{row['gpus']}x{row['gpu']}, {row['precision']}",
                f"{layout}{'-recompute' if layout.recompute == 'full' else ''}-m{row['micro_batch']}",
                ", ".join(f"{name} {seconds:.2f}" for name, seconds in largest),
                "asked" if row["asked"] == "1" else "",
                "" if memory is None else f"{memory.total / 2**30:.0f}",
                f"{measured:.2f}",
                f"{step.seconds:.2f}",
                f"{100 * (step.seconds / measured - 1):+.1f}",
            ]
        )
    publish(
        "published_experts",
        title="Published steps of mixtures of experts, predicted by the function that `dstk plan --layout` calls",
        headings=["model", "framework", "GPUs", "layout", "goes to (s)", "", "GiB", "published s", "predicted s", "%"],
        rows=table,
        text_columns=6,
        notes=_NOTES,
        save=save,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
