"""Experiment trackers (tensorboard, wandb, mlflow, trackio, …): accelerate's own, on rank 0."""

import importlib.util
from typing import Any

from typing_extensions import override

from toolkit.config.recipe import Recipe
from toolkit.config.recipe_schema import flat_fields
from toolkit.errors import RunError, nearest
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Callback
from toolkit.training.loop import TrainingRun


class Trackers(Callback):
    """All trackers of log.report_to, on rank 0."""

    def __init__(self) -> None:
        self._trackers: list[Any] = []

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Raise RunError for a tracker that accelerate does not know or that is not installed."""
        known = _known()
        for name in recipe.log.report_to:
            if name not in known:
                reason = f"accelerate has {', '.join(sorted(known))}"
                raise RunError.of("log.report_to", name, reason, nearest(name, known).strip())
            if importlib.util.find_spec(name) is None:
                raise RunError.of("log.report_to", name, "it is not installed", f"run `pip install {name}`")

    @override
    def on_run_begin(self, run: TrainingRun) -> None:
        if run.directory is None or not run.directory.is_writer:
            return
        for name in run.recipe.log.report_to:
            tracker_class = _known()[name]
            arguments = {"logging_dir": str(run.directory.path)} if tracker_class.requires_logging_directory else {}
            tracker = tracker_class(run.directory.path.name, **arguments)
            if hasattr(tracker, "start"):
                tracker.start()
            fields = flat_fields(run.recipe.model_dump())
            plain = {
                key: value if isinstance(value, int | float | str) else str(value) for key, value in fields.items()
            }
            tracker.store_init_configuration(plain)
            self._trackers.append(tracker)

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        if not self._trackers:
            return
        for tracker in self._trackers:
            tracker.log(metrics.scalars(), step=metrics.step)

    @override
    def on_run_end(self, run: TrainingRun) -> None:
        for tracker in self._trackers:
            tracker.finish()


def _known() -> dict[str, Any]:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return dict(LOGGER_TYPE_TO_CLASS)
