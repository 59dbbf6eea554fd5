"""What a run was estimated to take, beside what it took: only where its model, its layout and its GPU are known."""

from toolkit.errors import ToolkitError
from toolkit.planner.run_memory import estimate_for_run
from toolkit.report.training_run import TrainingRun


def estimated_bytes(run: TrainingRun) -> int | None:
    """The peak of PyTorch's allocations on rank 0, whose memory a run's metrics have; None where it is not known."""
    if run.recipe is None or run.layout is None or run.shape is None or run.gpu is None:
        return None
    try:
        batch = run.recipe.resolve_batch(run.layout)
        return estimate_for_run(run.recipe, run.layout, batch)[0].allocated
    except ToolkitError:
        return None  # a model, or a way to train it, that the estimate does not cover
