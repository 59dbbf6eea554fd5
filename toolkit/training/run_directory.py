"""The run directory: the files of a run. Rank 0 writes them, under a lock; the other ranks only take part in gathering.

recipe.yaml      as resolved: running it again gives the same run
ds_config.json   what DeepSpeed was given
environment.json versions and the machine
metrics.jsonl    one object per step
compile.json     with train.compile: compiled graphs, and what breaks them, on rank 0
events.jsonl     skipped steps and rollbacks; only where there were some
loss.png         the loss curve; written last, so it says that the run is finished
step-00000100/   checkpoints (toolkit/checkpoint/), each a Hugging Face directory, or adapters in the format of peft
latest           the newest of them
model/           the trained model, in the same format
base/            the weights beside adapters, where none are published (model.init=random)
.lock-1          who trains here now (toolkit/training/run_lock.py)

With checkpoint.url the checkpoints, `latest` and a lock of their own are there, and hosts need not share this
directory: that of the first rank's host has the files above, and every host stages in its own what it uploads.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from toolkit.checkpoint.manifest import list_checkpoints
from toolkit.checkpoint.model_directory import write_model
from toolkit.checkpoint.names import step_of
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.remote_commit import check_writable, delete_uploaded
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.trainer_state import changed_fields
from toolkit.config import dump_recipe, load_recipe
from toolkit.config.recipe import Recipe
from toolkit.engines.base import Engine
from toolkit.engines.local_tensors import buffer_specs, parameter_specs
from toolkit.errors import FinishedError, Refusal, RunDirectoryError
from toolkit.files import expanded, reason_of
from toolkit.host_memory.filesystem import RUN_URL
from toolkit.launch.environment import describe_environment
from toolkit.launch.health.local_process import exit_calls
from toolkit.parallel.gather import Names
from toolkit.remote_files import RemotePath, advice_of, is_url
from toolkit.training.arguments import TrainOptions, unused_run_directory
from toolkit.training.callback import Rollback
from toolkit.training.checkpointing import BASE, EVENTS, METRICS, adapter_config, copy_records, save_small_files
from toolkit.training.metrics import MetricsFile
from toolkit.training.resume import AUTO, run_of
from toolkit.training.run_lock import Holder, RunLock, UrlLock, holds, is_locked
from toolkit.units import plural, some

COMPILE = "compile.json"
CURVE = "loss.png"
_ANOTHER = "choose another run_dir"
_VISIBLE_SECONDS = 60.0
"""How long a host may take to see a new file of another host: NFS caches directories so long (nfs(5), acdirmax)."""


def _is_seen(run_dir: Path, holder: Holder) -> bool:
    """Wait until this host sees the lock of the directory's writer; False where it does not."""
    began = time.monotonic()
    announced = False
    while not holds(holder, run_dir):
        waited = time.monotonic() - began
        if waited > _VISIBLE_SECONDS:
            return False
        if waited > _VISIBLE_SECONDS / 12 and not announced and os.environ.get("LOCAL_RANK", "0") == "0":
            announced = True
            where = f"{socket.gethostname()} does not see {run_dir} of {holder.host} yet"
            print(f"{where}: waiting for the shared file system", file=sys.stderr, flush=True)
        time.sleep(0.2)
    return True


@contextmanager
def _reported(url: RemotePath) -> Iterator[None]:
    """Turn what fails behind checkpoint.url into one line that says what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{reason_of(error)}, on {socket.gethostname()}"
        remedies = advice_of(error), ("checkpoint.url", "another directory")
        raise RunDirectoryError.of("checkpoint.url", str(url), reason, *remedies) from None


def _check_unused(url: RemotePath) -> None:
    """Raise RunDirectoryError where there are checkpoints of another run, or of this one, which does not resume."""
    with _reported(url):
        listed = list_checkpoints(url)
    if listed:
        advice = "add --resume auto to go on from them", "add --overwrite to replace them"
        reason = f"it already holds {plural(len(listed), 'checkpoint')}"
        raise RunDirectoryError.of("checkpoint.url", str(url), reason, ("checkpoint.url", "another directory"), *advice)


def _check_outside_data(recipe: Recipe, path: Path) -> None:
    """Raise RunDirectoryError where the run's files would be text of the next run: below a directory of `data`."""
    data = recipe.data
    texts = [("data.source", data.source)]
    for kind, corpora in (("sources", data.sources), ("validation", data.validation)):
        texts += [(f"data.{kind}[{index}].path", text.path) for index, text in enumerate(corpora or ())]
    for field, name in texts:
        if name is None or is_url(name):
            continue
        folder = expanded(name)
        is_saved_dataset = (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()
        inside = path.resolve()
        if not folder.is_dir() or is_saved_dataset or not inside.is_relative_to(folder.resolve()):
            continue
        is_hidden = any(part.startswith(".") for part in inside.relative_to(folder.resolve()).parts)
        if is_hidden:
            continue
        reason = f"it is in {field}={name}, whose files are all text, and the next run would read those of this one"
        raise RunDirectoryError.of("run_dir", str(path), reason, _ANOTHER)


class RunDirectory:
    """One run's files. Nothing is written before `claim`, and nothing by ranks other than 0."""

    def __init__(
        self, path: Path, *, is_writer: bool, automatic_name: str | None = None, url: RemotePath | None = None
    ) -> None:
        self.path = path
        self.url = url
        """The place of its checkpoints, where that is not this directory."""
        self.is_writer = is_writer
        self.metrics: MetricsFile | None = None
        self.hosts: tuple[str, ...] = ()
        """The hosts of the ranks in the order of their first ranks, once the directory is claimed."""
        self.host_of_rank: tuple[str, ...] = ()
        """The host of each rank, likewise."""
        self._automatic_name = automatic_name
        self._lock: RunLock | None = None
        self._url_lock: RunLock | None = None
        self._is_new = False

    @classmethod
    def choose(
        cls, recipe: Recipe, options: TrainOptions, *, is_writer: bool, has_lock: bool = False
    ) -> "RunDirectory":
        """The recipe's run_dir, or the first unused runs/NAME, runs/NAME-2, … where it has none.

        A resumed run stays in its directory unless the recipe names another run_dir. Every rank makes the same choice
        before rank 0 claims it. Raises RunDirectoryError if run_dir holds another run that may not be replaced, or if
        it holds models that no run left. A run in progress, or a finished one, is left to `claim`, which says more.
        """
        resume_dir = run_of(options.resume, recipe) if options.resume else None
        url = None if recipe.checkpoint.url is None else RemotePath(recipe.checkpoint.url)
        if url is not None and resume_dir != url and not options.overwrite:
            _check_unused(url)
        continues_url = url is not None and resume_dir == url
        if (
            resume_dir is not None
            and not isinstance(resume_dir, RemotePath)
            and (recipe.run_dir is None or expanded(recipe.run_dir).resolve() == resume_dir.resolve())
        ):
            return cls(resume_dir, is_writer=is_writer, url=url)
        if recipe.run_dir is None:
            unused = unused_run_directory(options.name)
            _check_outside_data(recipe, unused)
            return cls(unused, is_writer=is_writer, automatic_name=options.name, url=url)
        path = expanded(recipe.run_dir)
        if path.exists() and not path.is_dir():
            raise RunDirectoryError.of("run_dir", recipe.run_dir, "it is not a directory", _ANOTHER)
        _check_outside_data(recipe, path)
        is_run = (path / "metrics.jsonl").exists()
        # A run that ended before its first checkpoint left nothing but its metrics: a job script starts it again.
        may_replace = options.overwrite or continues_url or (options.resume == AUTO and not (path / "model").exists())
        if is_run and not may_replace and (has_lock or not (options.resume == AUTO or is_locked(path))):
            advice = "add --overwrite to replace it"
            is_finished = options.resume == AUTO
            reason = "it holds a finished run, and no checkpoint to resume" if is_finished else "it already holds a run"
            raise RunDirectoryError.of("run_dir", recipe.run_dir, reason, _ANOTHER, advice)
        if not is_run and ((path / "model").exists() or any(path.glob("step-*"))):
            reason = "it holds model or step-… folders that no run of this toolkit left, and a run would replace them"
            raise RunDirectoryError.of("run_dir", recipe.run_dir, reason, _ANOTHER)
        model = expanded(recipe.model.name_or_path).resolve()
        if is_run and not continues_url and model.is_relative_to(path.resolve()):
            reason = "it holds the model that this run starts from, and --overwrite would delete it"
            raise RunDirectoryError.of("run_dir", recipe.run_dir, reason, _ANOTHER)
        return cls(path, is_writer=is_writer, url=url)

    @property
    def checkpoints(self) -> Path:
        """Directory or URL of the checkpoints."""
        return self.url or self.path

    def check_url(self) -> None:
        """Write a small file to checkpoint.url, and delete it. Raises RunDirectoryError where that is not possible."""
        if self.url is not None:
            with _reported(self.url):
                check_writable(self.url)

    def claim(self, recipe: Recipe, options: TrainOptions) -> None:
        """Create and lock the directory, so that no other job writes there until `release`. A collective call.

        Raises, the same on every rank, RunDirectoryError where another job trains there or has left a run since
        `choose`, or where a node has another file system there and there is no checkpoint.url, and FinishedError where
        `--resume auto` finds nothing left to train.
        """
        # The writer may have to take another name, and every rank writes its shards of a checkpoint.
        ranks = Ranks.of()
        self.path, holder = ranks.run_on_first(lambda: self._claim(recipe, options))
        if self.url is None:
            self._check_shared(ranks, holder)
            return
        self._remove_staged()
        self._set_hosts(ranks.gather(socket.gethostname()))

    def _set_hosts(self, hosts_of_ranks: Sequence[str]) -> None:
        self.host_of_rank = tuple(hosts_of_ranks)
        self.hosts = tuple(dict.fromkeys(hosts_of_ranks))

    def _remove_staged(self) -> None:
        """Remove what ranks of dead jobs were about to upload from this host."""
        for path in self.path.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _check_shared(self, ranks: Ranks, holder: Holder) -> None:
        """Raise RunDirectoryError, the same on every rank, where a host does not see what the writer writes there."""
        seen_by = ranks.gather((socket.gethostname(), _is_seen(self.path, holder)))
        self._set_hosts([host for host, _ in seen_by])
        blind_hosts = sorted({host for host, is_seen in seen_by if not is_seen})
        if not blind_hosts:
            return
        reason = f"{some(blind_hosts)} cannot see what rank 0 writes there on {holder.host}"
        remedy = "set it to a path at which all nodes mount the same file system"
        raise RunDirectoryError(Refusal.of("run_dir", str(self.path), reason, remedy), scope="job")

    def _claim(self, recipe: Recipe, options: TrainOptions) -> tuple[Path, Holder]:
        try:
            self._is_new = self._create()
            self._lock = RunLock(self.path)
            self._lock.acquire()
            exit_calls.append(self.release)  # also where a watchdog or a signal ends this process
            if self.url is not None:
                with _reported(self.url):
                    self._url_lock = UrlLock(self.url)
                    self._url_lock.acquire()
            if options.resume == AUTO:
                self._check_unfinished(recipe)
            if self._automatic_name is None:
                RunDirectory.choose(recipe, options, is_writer=True, has_lock=True)
            return self.path, self._lock.holder
        except (OSError, RunDirectoryError) as error:
            problem = self._cannot_write(error) if isinstance(error, OSError) else error
        problem.scope = "job"
        raise problem

    def _check_unfinished(self, recipe: Recipe) -> None:
        """Raise FinishedError where the run that this recipe describes is here, with all its steps."""
        if not (self.path / CURVE).exists():
            return
        done = load_recipe(self.path / "recipe.yaml", stored=True)
        if done.train.steps < recipe.train.steps or changed_fields(recipe, done.model_dump(mode="json")):
            return
        model = self.path / "model"
        has_checkpoint = run_of(AUTO, recipe) is not None
        more = f"set train.steps to more than {done.train.steps}"
        raise FinishedError(
            f"{self.path} is finished: {done.model.name_or_path}, {done.train.steps} steps. Its model is {model}. "
            f"To train longer, {more if has_checkpoint else f'start a new run with model.name_or_path={model}'}."
        )

    def release(self) -> None:
        """Let other jobs write there. A directory in which nothing was written is removed."""
        if self._url_lock is not None:
            self._url_lock.release()
        if self._lock is not None:
            self._lock.release()
            if self._is_new:
                with contextlib.suppress(OSError):
                    self.path.rmdir()

    def check_lock(self, *, quickly: bool = False) -> None:
        """Raise RunDirectoryError where another job has taken the directory over; on the writer."""
        if self._lock is not None:
            self._lock.check(quickly=quickly)

    def check_locks(self) -> None:
        """Raise RunDirectoryError where another job has taken over the directory, or checkpoint.url; on the writer."""
        self.check_lock()
        if self._url_lock is not None:
            self._url_lock.check()

    def open(
        self,
        recipe: Recipe,
        ds_config: Mapping[str, Any] | None,
        device: torch.device,
        *,
        resumed_step: int = 0,
        resumed: Path | None = None,
    ) -> None:
        """Write the resolved recipe, the DeepSpeed config and the environment, on the writer.

        The steps of an earlier run after `resumed_step` are removed, and all of its files if that is 0. If the run
        goes on from the checkpoint `resumed` of its own URL, or one in the memory of hosts, what it recorded comes from
        there: it may have trained on another host. Raises RunDirectoryError if the directory cannot be written.
        """
        if not self.is_writer:
            return
        self.check_locks()
        if self.url is not None:
            with _reported(self.url):
                self._read_url(resumed, resumed_step)
        try:
            earlier = self._steps_until(resumed_step)
            if not resumed_step:
                self._remove_old_run()
            (self.path / CURVE).unlink(missing_ok=True)
            (self.path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
            environment = describe_environment(device) | {"hosts": some(self.hosts, limit=8)}
            (self.path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
            if ds_config is not None:
                (self.path / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n", encoding="utf-8")
            self.metrics = MetricsFile(self.path / "metrics.jsonl", earlier)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _read_url(self, resumed: Path | None, resumed_step: int) -> None:
        assert self.url is not None
        if not resumed_step:
            for listed in list_checkpoints(self.url):
                delete_uploaded(RemotePath(listed.path))
        if resumed is not None and resumed.parent in (self.url, RemotePath(RUN_URL)):
            copy_records(resumed, self.path)

    def _cannot_write(self, error: OSError) -> RunDirectoryError:
        reason = f"it cannot be written ({error.strerror or error})"
        return RunDirectoryError.of("run_dir", str(self.path), reason, "choose a directory that you may write")

    def _create(self) -> bool:
        """Create the directory; whether it is new."""
        if self._automatic_name is None:
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            return is_new
        while True:
            try:
                self.path.mkdir(parents=True)
                return True
            except FileExistsError:  # another job chose the same name in the meantime
                self.path = unused_run_directory(self._automatic_name)

    def _remove_old_run(self) -> None:
        """Remove the files of an earlier run; `choose` made sure that they are of a run."""
        for unfinished in (*self.path.glob(".*.tmp"), *self.path.glob(".*.old")):
            shutil.rmtree(unfinished, ignore_errors=True)
        for file in (METRICS, EVENTS, COMPILE, "ds_config.json", "environment.json"):
            (self.path / file).unlink(missing_ok=True)
        for folder in self.path.iterdir():
            if folder.name in ("model", BASE) or step_of(folder.name) is not None:
                shutil.rmtree(folder)

    def _steps_until(self, step: int) -> list[str]:
        """The lines of metrics.jsonl up to a step, or up to a line that a crash truncated."""
        file = self.path / "metrics.jsonl"
        if not step or not file.exists():
            return []
        lines = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                number = json.loads(line)["step"]
            except (json.JSONDecodeError, KeyError, TypeError):
                break
            if number <= step:
                lines.append(line)
        return lines

    def go_back_to(self, rollback: Rollback) -> None:
        """Remove the metrics after the step that was restored, and note the rollback in events.jsonl."""
        if self.metrics is None:
            return
        self.check_lock()
        self.metrics.close()
        self.metrics = MetricsFile(self.path / "metrics.jsonl", self._steps_until(rollback.restored_step))
        self.note(
            step=rollback.failed_step,
            kind="rollback",
            reason=rollback.reason,
            to=rollback.restored_step,
            skipped_batches=rollback.skipped_batches,
        )

    def note(self, **event: Any) -> None:
        """Append an event to events.jsonl: `step`, `kind`, `reason` and other fields."""
        if self.is_writer:
            self.check_lock(quickly=True)
            with (self.path / EVENTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def save_model(self, name: str, engine: Engine, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Path:
        """Write the current weights as the Hugging Face directory `name`, or adapters as peft's. A collective call."""
        adapters = adapter_config(engine, recipe, self.path)
        if adapters is not None:
            return self._write(name, engine, engine.trained_names(), [], adapters, tokenizer)
        return self._write_whole(name, engine, engine.parameter_names(), tokenizer)

    def save_base(self, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the weights beside new adapters once, for those who load the adapters. A collective call."""
        if Ranks.of().run_on_first((self.path / BASE).is_dir):
            return
        trained = {name for name, _ in engine.trained_names()}
        names = [entry for entry in engine.parameter_names() if entry[0] not in trained]
        self._write_whole(BASE, engine, names, tokenizer)

    def _write_whole(self, name: str, engine: Engine, names: Names, tokenizer: PreTrainedTokenizerBase) -> Path:
        model = engine.model
        buffers = buffer_specs(engine)
        return self._write(name, engine, names, buffers, model.config, model.generation_config, tokenizer)

    def _write(self, name: str, engine: Engine, names: Names, buffers: list[TensorSpec], *small: Any) -> Path:
        def write_small_files(folder: Path) -> None:
            save_small_files(folder, *small)
            self.check_lock()  # the last moment before an earlier model is replaced

        specs = parameter_specs(names, next(engine.model.parameters()).dtype) + buffers
        tensors = chain(engine.full_parameters(names), engine.buffers() if buffers else ())
        options: dict[str, Any] = {"is_writer": self.is_writer, "write_small_files": write_small_files}
        try:
            write_model(self.path / name, specs, tensors, **options)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path / name}: cannot be written ({error.strerror or error}). An earlier model there is intact. "
                "Make room, or choose another run_dir.",
                scope="rank",
            ) from error
        if dist.is_initialized():
            # A rank that continues or ends while the writer works could take the writer down with it.
            dist.barrier()
        return self.path / name

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
