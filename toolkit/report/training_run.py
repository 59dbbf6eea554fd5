"""A training run as its directory tells it: steps, recipe, layout, snapshots, and what of the machine is known.

What is not written down stays unknown. A run directory may hold environment.json, a flat object of names and values
(`device`, versions); without it the device is not known, and neither is the MFU unless the reader names the GPU.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit import hardware
from toolkit.errors import ReportError, RunError, ToolkitError
from toolkit.estimate.flops import mfu
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.recipe_file import load
from toolkit.report.training_log import TrainingLog, read_log
from toolkit.shape import ModelShape, families, find_config, with_overrides


@dataclass(frozen=True, kw_only=True)
class Incident:
    """What training did about a step. `to`: the step it went back to, None where it only left the step out."""

    step: int
    reason: str
    to: int | None


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run. None is what is not known."""

    label: str
    folder: Path
    log: TrainingLog
    recipe: Recipe | None
    recipe_text: str
    recipe_trouble: str
    """Why a recipe.yaml that is there could not be decoded."""
    layout: Layout | None
    environment: dict[str, str]
    snapshots: tuple[int, ...]
    """Steps whose weights are on disk."""
    has_model: bool
    written: datetime
    """When the last step was reported."""
    gpu: hardware.Gpu | None
    shape: ModelShape | None
    incidents: tuple[Incident, ...] = ()
    """From events.jsonl."""

    @property
    def finished(self) -> bool:
        """Whether all steps of the recipe are done."""
        return self.recipe is not None and self.log.last.step >= self.recipe.train.steps

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization at this speed, where GPU, model and number of ranks are known."""
        if self.gpu is None or self.shape is None or self.recipe is None or self.layout is None:
            return None
        try:
            peak = self.gpu.peak_flops(self.recipe.precision)
        except RunError:
            return None
        return mfu(tokens_per_second / self.layout.world_size, self.shape, self.recipe.data.seq_len, peak)


def read_runs(names: Sequence[str], *, gpu: hardware.Gpu | None = None) -> list[TrainingRun]:
    """The runs, each under a name of its own. Raises ReportError where one of them cannot be reported on."""
    paths = [_metrics(name) for name in names]
    twice = [names[i] for i, path in enumerate(paths) if path.resolve() in {other.resolve() for other in paths[:i]}]
    if twice:
        raise ReportError(f"{twice[0]}: this run is given twice. Give each run once.")
    short = [path.resolve().parent.name if path.name == "metrics.jsonl" else path.stem for path in paths]
    unique = len(set(short)) == len(short)
    return [
        _read(path, label=label if unique else name.rstrip("/"), gpu=gpu)
        for path, label, name in zip(paths, short, names, strict=True)
    ]


def _metrics(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "metrics.jsonl").is_file():
            raise ReportError(
                f"{name}: no metrics.jsonl lies in this directory. Give the run_dir of a run that has started."
            )
        return path / "metrics.jsonl"
    if not path.exists():
        raise ReportError(f"{name}: there is no such run. Give a run directory or a metrics.jsonl.")
    return path


def _read(path: Path, *, label: str, gpu: hardware.Gpu | None) -> TrainingRun:
    log = read_log(path)
    folder = path.parent
    recipe, trouble, text = None, "", ""
    file = folder / "recipe.yaml"
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            recipe = load(file)
        except ToolkitError as error:
            trouble = str(error).split("\n")[0]
    environment = _environment(folder / "environment.json")
    if gpu is None and "device" in environment:
        gpu = hardware.find_gpu(environment["device"])
    snapshots = sorted(
        int(found[1])
        for found in (re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.glob("step-*"))
        if found
    )
    return TrainingRun(
        label=label,
        folder=folder,
        log=log,
        recipe=recipe,
        recipe_text=text,
        recipe_trouble=trouble,
        layout=None if recipe is None else _layout(recipe, folder),
        environment=environment,
        snapshots=tuple(snapshots),
        has_model=(folder / "model" / "config.json").is_file(),
        written=datetime.fromtimestamp(path.stat().st_mtime, tz=UTC),
        gpu=gpu,
        incidents=tuple(_incidents(folder / "events.jsonl")),
        shape=None if recipe is None else _shape(recipe, folder, snapshots),
    )


def _layout(recipe: Recipe, folder: Path) -> Layout | None:
    """As the recipe fixes it, or as the DeepSpeed config of the run implies: dp = batch / (micro x accumulation)."""
    ranks = 1 if recipe.train.engine == "reference" else recipe.world_size
    config = _object(folder / "ds_config.json")
    if ranks is None and config:
        sizes = [
            config.get(name)
            for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        ]
        whole, micro, accumulation = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
        if micro and accumulation and whole and whole % (micro * accumulation) == 0:
            section = recipe.parallel
            ranks = whole // (micro * accumulation) * section.tp * section.pp * section.ulysses
    if ranks is None:
        return None
    try:
        return recipe.layout(ranks)
    except ToolkitError:
        return None


def _shape(recipe: Recipe, folder: Path, snapshots: Sequence[int]) -> ModelShape | None:
    """Of a model that the run saved; else of the recipe's, whose vocabulary training keeps, whatever the tokenizer."""
    saved = [folder / "model", *(folder / f"step-{step:08d}" for step in snapshots)]
    name = next((str(path.resolve()) for path in saved if (path / "config.json").is_file()), None)
    try:
        if name is not None:
            config = find_config(name)
        else:
            config = find_config(recipe.model.name_or_path)
            config = config and with_overrides(config, recipe.model.overrides)
        return ModelShape.from_config(config) if config and config.get("model_type") in families() else None
    except ToolkitError:
        return None


def _incidents(path: Path) -> Iterator[Incident]:
    """Lines that are none are left out: a page about a run is no judge of its files."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
            to = int(event["to"]) if event["kind"] == "rollback" else None
            yield Incident(step=int(event["step"]), reason=str(event["reason"]), to=to)
        except (ValueError, KeyError, TypeError):
            continue


def _environment(path: Path) -> dict[str, str]:
    return {str(key): str(value) for key, value in _object(path).items() if not isinstance(value, (dict, list))}


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
