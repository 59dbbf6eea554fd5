"""Experiment trackers (tensorboard, wandb, mlflow, trackio, …): accelerate's own, on rank 0."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import RunError, nearest
from toolkit.recipe import Recipe
from toolkit.train.metrics import StepMetrics


class Trackers:
    """All trackers of a recipe; nothing happens where it names none."""

    def __init__(self, trackers: Sequence[Any]) -> None:
        self._trackers = list(trackers)

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Raise RunError for a tracker that accelerate does not know or that is not installed."""
        known = _known()
        for name in recipe.log.report_to:
            if name not in known:
                raise RunError(
                    f"log.report_to: {name!r} is not a tracker; accelerate has {', '.join(sorted(known))}."
                    f"{nearest(name, known)}"
                )
            if not _installed(name):
                raise RunError(f"log.report_to: the tracker {name!r} is not installed. Run `pip install {name}`.")

    @classmethod
    def start(cls, recipe: Recipe, run_path: Path, *, enabled: bool) -> "Trackers":
        """Start the recipe's trackers where `enabled` (rank 0). The process group must exist."""
        if not enabled or not recipe.log.report_to:
            return cls([])
        known = _known()
        started = []
        for name in recipe.log.report_to:
            tracker_class = known[name]
            arguments = {"logging_dir": str(run_path)} if tracker_class.requires_logging_directory else {}
            tracker = tracker_class(run_path.name, **arguments)
            if hasattr(tracker, "start"):
                tracker.start()
            tracker.store_init_configuration(_flat(recipe.model_dump()))
            started.append(tracker)
        return cls(started)

    def step(self, metrics: StepMetrics) -> None:
        """Report a step."""
        if not self._trackers:
            return
        values: dict[str, float] = {
            "loss": metrics.loss,
            "lr": metrics.lr,
            "grad_norm": metrics.grad_norm,
            "tokens_per_second": metrics.tokens / metrics.seconds,
            "memory_bytes": metrics.memory_bytes,
        }
        if metrics.eval_loss is not None:
            values["eval_loss"] = metrics.eval_loss
        for tracker in self._trackers:
            tracker.log(values, step=metrics.step)

    def finish(self) -> None:
        """Flush and close."""
        for tracker in self._trackers:
            tracker.finish()


def _known() -> dict[str, Any]:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return dict(LOGGER_TYPE_TO_CLASS)


def _installed(name: str) -> bool:
    package = {"comet_ml": "comet_ml", "tensorboard": "tensorboard"}.get(name, name)
    return importlib.util.find_spec(package) is not None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `section.field`, with values that every tracker can store."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat
