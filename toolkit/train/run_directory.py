"""The run directory: what a run leaves behind. Rank 0 writes; the others only gather.

recipe.yaml      as resolved: running it again gives the same run
ds_config.json   what DeepSpeed was given
environment.json versions and the machine
metrics.jsonl    one object a step
events.jsonl     what happened besides: steps left out, rollbacks; only where there was something
loss.png         the curve
step-00000100/   checkpoints (toolkit/checkpoint/), each a Hugging Face directory
latest           the newest of them
model/           the trained model, likewise
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from toolkit.checkpoint.hf_directory import write_model
from toolkit.errors import RunDirectoryError
from toolkit.recipe import Recipe
from toolkit.recipe_file import dump
from toolkit.train.engines.base import Engine
from toolkit.train.environment import describe_environment
from toolkit.train.metrics import MetricsFile
from toolkit.train.run_names import unused_run_directory

EVENTS = "events.jsonl"


class RunDirectory:
    """One run's files. Nothing is written before `open`, and nothing by ranks other than 0."""

    def __init__(self, path: Path, *, is_writer: bool, automatic_name: str | None = None) -> None:
        self.path = path
        self.is_writer = is_writer
        self.metrics: MetricsFile | None = None
        self._automatic_name = automatic_name

    @classmethod
    def choose(
        cls, recipe: Recipe, *, name: str, is_writer: bool, overwrite: bool = False, goes_on_in: Path | None = None
    ) -> "RunDirectory":
        """The recipe's run_dir, or the first unused runs/NAME, runs/NAME-2, … where it gives none.

        A run that goes on stays in `goes_on_in` unless the recipe names another run_dir. Every rank chooses alike,
        before any of them opens. Raises RunDirectoryError when run_dir holds another run and `overwrite` is not set, or
        holds a model that is not of a run.
        """
        if goes_on_in is not None and (
            recipe.run_dir is None or Path(recipe.run_dir).expanduser().resolve() == goes_on_in.resolve()
        ):
            return cls(goes_on_in, is_writer=is_writer)
        if recipe.run_dir is None:
            return cls(unused_run_directory(name), is_writer=is_writer, automatic_name=name)
        path = Path(recipe.run_dir).expanduser()
        if path.exists() and not path.is_dir():
            raise RunDirectoryError(f"run_dir={recipe.run_dir}: not a directory. Choose another run_dir.")
        is_run = (path / "metrics.jsonl").exists()
        if is_run and not overwrite:
            raise RunDirectoryError(
                f"run_dir={recipe.run_dir}: there is a run in it already. "
                "Choose another run_dir, or add --overwrite to replace it."
            )
        if not is_run and ((path / "model").exists() or any(path.glob("step-*"))):
            raise RunDirectoryError(
                f"run_dir={recipe.run_dir}: it holds model or step-… folders that no run of ours left, and a run would "
                "replace them. Choose another run_dir."
            )
        if is_run and Path(recipe.model.name_or_path).expanduser().resolve().is_relative_to(path.resolve()):
            raise RunDirectoryError(
                f"run_dir={recipe.run_dir}: it holds the model that this run starts from, and --overwrite would delete "
                "it. Choose another run_dir."
            )
        return cls(path, is_writer=is_writer)

    def open(
        self, recipe: Recipe, ds_config: Mapping[str, Any] | None, device: torch.device, *, goes_on_after: int = 0
    ) -> None:
        """Create the directory with the resolved recipe, the DeepSpeed config, and what the run runs on.

        Of an earlier run in it, what came after step `goes_on_after` is removed, and all of it where that is 0.
        A collective call. Raises RunDirectoryError where it cannot be written.
        """
        if self.is_writer:
            self._open(recipe, ds_config, device, goes_on_after)
        if dist.is_initialized():
            # The writer may have had to take another name, and every rank writes its share of a checkpoint.
            chosen: list[Any] = [self.path]
            dist.broadcast_object_list(chosen, src=0, device=device)
            self.path = chosen[0]

    def _open(
        self, recipe: Recipe, ds_config: Mapping[str, Any] | None, device: torch.device, goes_on_after: int
    ) -> None:
        try:
            self._create()
            kept = self._steps_until(goes_on_after)
            if not goes_on_after:
                self._remove_old_run()
            (self.path / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
            environment = describe_environment(device)
            (self.path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
            if ds_config is not None:
                (self.path / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n", encoding="utf-8")
            self.metrics = MetricsFile(self.path / "metrics.jsonl", kept)
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir={self.path}: cannot be written ({error.strerror or error}). "
                "Choose a directory that you may write."
            ) from error

    def _create(self) -> None:
        if self._automatic_name is None:
            self.path.mkdir(parents=True, exist_ok=True)
            return None
        while True:
            try:
                return self.path.mkdir(parents=True)
            except FileExistsError:  # another job chose the same name in the meantime
                self.path = unused_run_directory(self._automatic_name)

    def _remove_old_run(self) -> None:
        """What an earlier run left here would be taken for this one's; `choose` made sure that it was a run's."""
        for unfinished in (*self.path.glob(".*.tmp"), *self.path.glob(".*.old")):
            shutil.rmtree(unfinished, ignore_errors=True)
        for file in ("metrics.jsonl", EVENTS, "loss.png", "ds_config.json", "environment.json"):
            (self.path / file).unlink(missing_ok=True)
        for folder in (self.path / "model", *self._snapshots()):
            if folder.exists():
                shutil.rmtree(folder)

    def _steps_until(self, step: int) -> list[str]:
        """The lines of metrics.jsonl up to a step; a line that a crash has torn ends them."""
        file = self.path / "metrics.jsonl"
        if not step or not file.exists():
            return []
        kept = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                number = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError, TypeError):
                break
            if number <= step:
                kept.append(line)
        return kept

    def go_back_to(self, step: int, *, at: int, reason: str, left_out: int) -> None:
        """Forget the steps after `step`; the event says why, in step `at`, and how many global batches it left out."""
        if self.metrics is None:
            return
        self.metrics.close()
        self.metrics = MetricsFile(self.path / "metrics.jsonl", self._steps_until(step))
        self.note(step=at, kind="rollback", reason=reason, to=step, left_out=left_out)

    def note(self, **event: Any) -> None:
        """Append to events.jsonl: `step`, `kind`, `reason` and what else there is to say."""
        if self.is_writer:
            with (self.path / EVENTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def _snapshots(self) -> list[Path]:
        return sorted(path for path in self.path.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))

    def save_model(self, name: str, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Path:
        """Write the current weights as the Hugging Face directory `name`. A collective call."""
        model = engine.model

        def beside(folder: Path) -> None:
            model.config.save_pretrained(folder)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        def tensors() -> Any:
            yield from engine.full_parameters()
            yield from engine.buffers()

        try:
            write_model(self.path / name, tensors(), is_writer=self.is_writer, beside=beside)
        except OSError as error:
            failure = RunDirectoryError(
                f"{self.path / name}: cannot be written ({error.strerror or error}). What was there is whole. "
                "Make room, or choose another run_dir."
            )
            failure.scope = "rank"
            raise failure from error
        if dist.is_initialized():
            # A rank that went on, or ended, while the writer is at work could take the writer down with it.
            dist.barrier()
        return self.path / name

    def curve(self) -> tuple[list[float], list[tuple[int, float]]]:
        """Losses of all steps, and (step, loss) of the validations, from what has been written. The writer only."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines]
        losses = [math.nan if step["loss"] is None else float(step["loss"]) for step in steps]
        return losses, [(step["step"], step["eval_loss"]) for step in steps if step.get("eval_loss") is not None]

    def close(self) -> None:
        """Close open files."""
        if self.metrics is not None:
            self.metrics.close()
