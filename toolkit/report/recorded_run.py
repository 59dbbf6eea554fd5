"""A training run as read from its directory: steps (metrics.jsonl), recipe, layout, checkpoints and environment.

environment.json is a flat object of names and values (`device`, versions); without it the device is unknown, and so is
the MFU unless the GPU is given.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit import hardware
from toolkit.config import load_recipe
from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.errors import ReportError, ToolkitError
from toolkit.estimate.flops import mfu
from toolkit.files import (
    MAX_LOG_BYTES,
    decode_json_object,
    expanded,
    read_json_object,
    read_regular,
    reason_of,
)
from toolkit.models.shape import ModelShape, families, find_config, with_overrides
from toolkit.step_metrics import StepMetrics

_MAX_RECIPE_BYTES = 1 << 20
_WARM_UP = 2
"""First steps that the speed of a longer run excludes: they compile, allocate and warm caches."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A point at which step numbers go back: the run resumed from an earlier step."""

    after: int
    at: int


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """The effective steps: of a step that was trained twice, the later one."""

    steps: tuple[StepMetrics, ...]
    restarts: tuple[ResumePoint, ...]
    is_truncated: bool
    """The last line is incomplete: it is being written, or the run ended while writing it."""

    @property
    def last(self) -> StepMetrics:
        return self.steps[-1]


def read_metrics(path: Path) -> TrainingLog:
    """Read a metrics.jsonl. Raises ReportError with the number of a line that is not a step."""
    try:
        text = read_regular(path, max_bytes=MAX_LOG_BYTES, follow=True).decode("utf-8-sig", errors="replace")
    except OSError as error:
        advice = "Give a run directory or a metrics.jsonl."
        raise ReportError(f"{path}: cannot be read ({reason_of(error)}). {advice}") from error
    lines = text.split("\n")
    unfinished = lines.pop()  # '' if the last line is complete
    steps = [_step(path, number, line) for number, line in enumerate(lines, start=1)]
    is_truncated = False
    if unfinished.strip():
        try:
            steps.append(_step(path, len(lines) + 1, unfinished))
        except ReportError:
            is_truncated = True
    if not steps:
        reason = "its only line is still incomplete" if is_truncated else "it has no line yet"
        raise ReportError(f"{path}: no finished step, {reason}. Wait for the first step, or give another run.")
    latest: dict[int, StepMetrics] = {}
    restarts = []
    previous = None
    for step in steps:
        if previous is not None and step.step <= previous:
            restarts.append(ResumePoint(after=previous, at=step.step))
            latest = {number: earlier for number, earlier in latest.items() if number < step.step}
        latest[step.step] = step
        previous = step.step
    return TrainingLog(steps=tuple(latest.values()), restarts=tuple(restarts), is_truncated=is_truncated)


def _step(path: Path, number: int, line: str) -> StepMetrics:
    try:
        return StepMetrics.from_json(line)
    except ReportError as error:
        raise ReportError(f"{path}:{number}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What happened in a step: a handled failure, or a rank that was slow.

    `kind`: `rollback`, `skip` or `slow`. `to`: the step that training rolled back to.
    """

    kind: str
    step: int
    reason: str
    to: int | None


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One run. None means unknown."""

    label: str
    folder: Path
    log: TrainingLog
    recipe: Recipe | None
    recipe_text: str
    recipe_trouble: str
    """Reason why an existing recipe.yaml could not be decoded; empty otherwise."""
    layout: Layout | None
    environment: dict[str, str]
    checkpoints: tuple[int, ...]
    """Steps whose checkpoints are on disk."""
    has_model: bool
    written: datetime
    """Time of the last reported step."""
    gpu: hardware.Gpu | None
    shape: ModelShape | None
    incidents: tuple[Incident, ...] = ()
    """Handled failures of steps, from events.jsonl."""

    @property
    def finished(self) -> bool:
        return self.recipe is not None and self.log.last.step >= self.recipe.train.steps

    @property
    def device(self) -> str:
        """The GPU or processor of a rank, by its own name, without how many there are; '' if unknown."""
        return _device(self.environment)

    @property
    def timed_steps(self) -> list[StepMetrics]:
        """The steps whose speed counts."""
        timed = [step for step in self.log.steps if step.tokens_per_second is not None]
        return timed[_WARM_UP:] if len(timed) > 5 * _WARM_UP else timed

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the model FLOPs utilization at this speed; None if GPU, model or number of ranks is unknown."""
        if self.gpu is None or self.shape is None or self.recipe is None or self.layout is None:
            return None
        peak = self.gpu.peak_flops(self.recipe.precision)
        rate = tokens_per_second / self.layout.world_size
        return None if peak is None else mfu(rate, self.shape, self.recipe.data.seq_len, peak)


def read_runs(names: Sequence[str], *, gpu: hardware.Gpu | None = None) -> list[RecordedRun]:
    """Read runs under distinct labels. Raises ReportError if one of them cannot be read."""
    paths = [_metrics(name) for name in names]
    earlier: set[Path] = set()
    for name, path in zip(names, paths, strict=True):
        if path.resolve() in earlier:
            raise ReportError(f"{name}: this run is given twice. Give each run once.")
        earlier.add(path.resolve())
    short = [path.resolve().parent.name if path.name == "metrics.jsonl" else path.stem for path in paths]
    unique = len(set(short)) == len(short)
    return [
        _read(path, label=label if unique else name.rstrip("/"), gpu=gpu)
        for path, label, name in zip(paths, short, names, strict=True)
    ]


def _metrics(name: str) -> Path:
    path = expanded(name)
    if path.is_dir():
        if not (path / "metrics.jsonl").is_file():
            raise ReportError(
                f"{name}: this directory has no metrics.jsonl. Give the run_dir of a run that has started."
            )
        return path / "metrics.jsonl"
    if not path.exists():
        raise ReportError(f"{name}: there is no such run. Give a run directory or a metrics.jsonl.")
    return path


def _read(path: Path, *, label: str, gpu: hardware.Gpu | None) -> RecordedRun:
    log = read_metrics(path)
    folder = path.parent
    recipe = None
    trouble = ""
    text = ""
    file = folder / "recipe.yaml"
    if file.is_file():
        try:
            text = read_regular(file, max_bytes=_MAX_RECIPE_BYTES, follow=True).decode("utf-8", errors="replace")
            recipe = load_recipe(file, stored=True)
        except OSError as error:
            trouble = f"{file}: {reason_of(error)}"
        except ToolkitError as error:
            trouble = error.problems[0]
    known = _object(folder / "environment.json").items()
    environment = {str(name): str(value) for name, value in known if not isinstance(value, (dict, list))}
    gpu = gpu or hardware.find_gpu(_device(environment))
    names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.glob("step-*"))
    checkpoints = sorted(int(name[1]) for name in names if name)
    return RecordedRun(
        label=label,
        folder=folder,
        log=log,
        recipe=recipe,
        recipe_text=text,
        recipe_trouble=trouble,
        layout=None if recipe is None else _layout(recipe, folder),
        environment=environment,
        checkpoints=tuple(checkpoints),
        has_model=(folder / "model" / "config.json").is_file(),
        written=datetime.fromtimestamp(path.stat().st_mtime, tz=UTC),
        gpu=gpu,
        incidents=tuple(_incidents(folder / "events.jsonl")),
        shape=None if recipe is None else _shape(recipe, folder, checkpoints),
    )


def _device(environment: Mapping[str, str]) -> str:
    return re.sub(r" x \d+$", "", environment.get("device", ""))


def _layout(recipe: Recipe, folder: Path) -> Layout | None:
    """Return the layout of the recipe, or of the run's DeepSpeed config: dp = batch / (micro x accumulation)."""
    ranks = 1 if recipe.train.engine == "reference" else recipe.world_size
    config = _object(folder / "ds_config.json")
    if ranks is None and config:
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        sizes = [config.get(name) for name in names]
        whole, micro, accumulation = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
        if micro and accumulation and whole and whole % (micro * accumulation) == 0:
            ranks = whole // (micro * accumulation) * recipe.parallel.model_size
    try:
        return None if ranks is None else recipe.layout(ranks)
    except ToolkitError:
        return None


def _shape(recipe: Recipe, folder: Path, checkpoints: Sequence[int]) -> ModelShape | None:
    """Return the shape of the model that the run saved, else of the recipe's model."""
    saved = [folder / "model", *(folder / f"step-{step:08d}" for step in checkpoints)]
    name = next((str(path.resolve()) for path in saved if (path / "config.json").is_file()), None)
    try:
        config = find_config(name or recipe.model.name_or_path)
        if name is None and config:
            config = with_overrides(config, recipe.model.overrides)
        return ModelShape.from_config(config) if config and config.get("model_type") in families() else None
    except ToolkitError:
        return None


def _incidents(path: Path) -> Iterator[Incident]:
    """Read events.jsonl without malformed lines: the page does not validate the files of a run."""
    try:
        content = read_regular(path, follow=True)
    except OSError:
        return
    for line in content.decode("utf-8", errors="replace").splitlines():
        incident = incident_of(line)
        if incident is not None:
            yield incident


def incident_of(line: str) -> Incident | None:
    """Read a line of events.jsonl; None where it has no incident, for instance where it was not written to its end."""
    try:
        event = decode_json_object(line)
        to = int(event["to"]) if event["kind"] == "rollback" else None
        return Incident(kind=str(event["kind"]), step=int(event["step"]), reason=str(event["reason"]), to=to)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, follow=True)
    except (OSError, ValueError):
        return {}
