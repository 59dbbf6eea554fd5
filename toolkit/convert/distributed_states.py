"""Training states in PyTorch's distributed checkpoint format: who wrote them, and under which names.

    Trainer, accelerate   pytorch_model_fsdp_0/ and optimizer_0/, with FSDP1 and FSDP2 (SHARDED_STATE_DICT); what one
                          rank gathered (FULL_STATE_DICT) is read by gathered_states.py
    torchtitan            step-N/, its own names of Llama and Qwen 3, or those of its transformers_modeling_backend
    Megatron-Core         iter_000000N/, `torch_dist`, with a distributed optimizer (fully_reshardable) or any other
    anything else         a directory with Hugging Face's names, plain or under `model.`

All of them are read tensor by tensor (distributed_checkpoint.py) through a map of names (weight_map.py).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import checkpoint_error, is_safe_path
from toolkit.convert.deepspeed_partitions import STATE_KINDS, Arguments, read_scanned
from toolkit.convert.distributed_checkpoint import INDEX, DistributedCheckpoint
from toolkit.convert.gathered_states import WEIGHTS as GATHERED
from toolkit.convert.gathered_states import open_gathered
from toolkit.convert.megatron_names import LAYERS, megatron_map
from toolkit.convert.torchtitan_names import EXPERT_BIASES, backend_map, torchtitan_map
from toolkit.convert.training_state import MASTER, TrainingState, count_of, one_too_many
from toolkit.convert.weight_map import Config, ShapeError, Shapes, StoredWeight, WeightMap, as_named
from toolkit.files import printable, read_json_object, read_regular

_FSDP_MODEL = "pytorch_model_fsdp_0"
_FSDP_OPTIMIZER = "optimizer_0"
_MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
_MEGATRON_FILE = "common.pt"
_MEGATRON_BACKEND = "metadata.json"
_MEGATRON_FORMAT = "torch_dist"
_STATES = "optimizer.state."
"""What stands before a parameter's key among the states of an optimizer."""
_TITAN_STEP = re.compile(r"step-([0-9]+)")
_EMBEDDINGS = {"megatron": "embedding.word_embeddings.weight", "torchtitan": "tok_embeddings.weight"}
_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""Prefixes of Megatron-Core's fp32 weights: fully reshardable, and of other optimizers."""
_BUCKETS = re.compile(r"(chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_")
_CHAINED = re.compile(r"chained_[0-9]+\.(?=optimizer\.state\.)")
"""What stands before the states of each of several optimizers: experts have one of their own.

States are of a parameter each, so that no two have one name without it; buckets of several optimizers do.
"""
_GROUP = re.compile(r"(?:.*\.)?param_groups\.(.+)\.(lr|betas|eps|weight_decay)")
_SUFFIX = ".distcp"
_RANK_FILE = re.compile(r"__([0-9]+)_[0-9]+\.distcp")


def find_state(place: Path) -> Path | None:
    """The directory of a step in `place` that is in this format; None where there is none. Raises CheckpointError."""
    if any((place / name).exists() for name in (f"{_FSDP_MODEL}/{INDEX}", INDEX, GATHERED)):
        return place
    if (latest := place / _MEGATRON_LATEST).exists():
        return _megatron_step(latest)
    if any(place.glob("mp_rank_*/model_optim_rng.pt")):
        problem = "it is in Megatron-LM's old format, a pickle of each rank"
        raise checkpoint_error(place, f"{problem}. Save it again with --ckpt-format torch_dist.")
    steps = {int(match[1]): entry for entry in place.iterdir() if (match := _TITAN_STEP.fullmatch(entry.name))}
    complete = [step for step in sorted(steps) if (steps[step] / INDEX).exists()]
    if complete:
        return steps[complete[-1]]
    _check_index([place, place / _FSDP_MODEL, *(steps[step] for step in sorted(steps))])
    return None


def _check_index(folders: Sequence[Path]) -> None:
    """Raise CheckpointError for a directory that has files of this format and no index of them."""
    for folder in folders:
        if (folder / INDEX).exists() or not any(folder.glob(f"*{_SUFFIX}")):
            continue
        problem = f"{INDEX} is missing, the index of its {_SUFFIX} files, which is written last"
        raise checkpoint_error(folder, f"{problem}. Copy all files of the step, hidden ones too, or name another step.")


def check_optimizer(step: Path) -> None:
    """Raise CheckpointError where the optimizer of FSDP has files and no index, without which it is not read."""
    _check_index([step / _FSDP_OPTIMIZER])


def _megatron_step(file: Path) -> Path:
    try:
        text = read_regular(file, max_bytes=64).decode().strip()
    except (OSError, UnicodeDecodeError):
        raise checkpoint_error(file, "cannot be read. Name the directory of a step itself.") from None
    name = f"iter_{int(text):07d}" if text.isdigit() and text.isascii() else text
    if not is_safe_path(name) or "/" in name:
        raise checkpoint_error(file, f"it names {printable(text)}, which is no step. Name the step's directory.")
    if not (file.parent / name / INDEX).exists():
        if any((file.parent / name).glob("mp_rank_*")):
            problem = f"{name} is in Megatron-LM's old format, a pickle of each rank"
            raise checkpoint_error(file.parent, f"{problem}. Save it again with --ckpt-format torch_dist.")
        problem = f"it names {printable(text)}, and {name} has no {INDEX}"
        raise checkpoint_error(file, f"{problem}. Copy all files of the step, or name another one.")
    return file.parent / name


def open_state(step: Path, config: Config, shapes: Shapes) -> TrainingState:
    """Open the state of a model with this config and these parameters. Raises CheckpointError."""
    if (step / _FSDP_MODEL / INDEX).exists():
        return _fsdp(step, shapes)
    if (step / GATHERED).exists():
        return open_gathered(step, shapes, _step(step, None))
    checkpoint = DistributedCheckpoint(step)
    if _EMBEDDINGS["megatron"] in checkpoint.tensors:
        checkpoint.drop_prefix(_CHAINED)
        return _megatron(step, checkpoint, config, shapes)
    if _EMBEDDINGS["torchtitan"] in checkpoint.tensors:
        return _named(step, checkpoint, torchtitan_map(config, shapes), shapes, notices=_expert_biases(checkpoint))
    backend = backend_map(shapes)
    if _is_of_backend(checkpoint, backend):
        return _named(step, checkpoint, backend, shapes, notices=_expert_biases(checkpoint))
    return _named(step, checkpoint, as_named(list(shapes), "PyTorch (DCP)"), shapes)


def _is_of_backend(checkpoint: DistributedCheckpoint, names: WeightMap) -> bool:
    """Whether torchtitan's `transformers_modeling_backend` wrote a checkpoint; `names` is its map of the model.

    An application that keeps its model as `model` stores weights under the same names, and their moments under others.
    """
    routed = next((weight for weight in names.weights if weight.index), None)
    if routed is not None:
        return routed.key in checkpoint.tensors or routed.alias in checkpoint.tensors
    moments = (f"{_STATES}{weight.key}.{kind}" for weight in names.weights for kind in STATE_KINDS)
    return any(key in checkpoint.tensors for key in moments)


def _expert_biases(checkpoint: DistributedCheckpoint) -> tuple[str, ...]:
    """Return a notice that the biases of torchtitan's routers are left out, where one is not zero."""
    for key in checkpoint.tensors:
        if key.rpartition(".")[2] in EXPERT_BIASES and checkpoint.read(key).any():
            problem = f"{key} is not zero: torchtitan balanced its experts by biases, which are left out"
            return (f"{printable(problem)}, so that routers choose other experts here",)
    return ()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The place of the tensors of one kind: a checkpoint, and what stands before and after a stored weight's key."""

    checkpoint: DistributedCheckpoint
    before: str = ""
    after: str = ""

    def key(self, weight: StoredWeight) -> str:
        key = f"{self.before}{weight.key}{self.after}"
        alias = f"{self.before}{weight.alias}{self.after}"
        return alias if weight.alias and key not in self.checkpoint.tensors else key

    def has(self, weight: StoredWeight) -> bool:
        return self.key(weight) in self.checkpoint.tensors

    def read(self, weight: StoredWeight) -> torch.Tensor:
        return self.checkpoint.read(self.key(weight), weight.index)

    def check(self, weight: StoredWeight, sizes: tuple[int, ...]) -> None:
        """Raise CheckpointError where it is not of floating-point numbers, or has not `sizes` first dimensions."""
        key = self.key(weight)
        tensor = self.checkpoint.tensors[key]
        if not tensor.dtype.is_floating_point:
            dtype = str(tensor.dtype).removeprefix("torch.")
            problem = f"{key} has the dtype {dtype}, not one of floating-point numbers"
            raise checkpoint_error(self.checkpoint.directory, f"{problem}. Copy it again.")
        if tensor.shape[: len(sizes)] != sizes:
            stored = " x ".join(str(size) for size in tensor.shape[: len(sizes)])
            wanted = " x ".join(str(size) for size in sizes)
            problem = f"{key} has {stored} layers or experts, and the model {wanted}"
            raise checkpoint_error(self.checkpoint.directory, f"{problem}. {_OTHER}")


def _fsdp(step: Path, shapes: Shapes) -> TrainingState:
    weights = DistributedCheckpoint(step / _FSDP_MODEL)
    has_optimizer = (step / _FSDP_OPTIMIZER / INDEX).exists()
    optimizer = DistributedCheckpoint(step / _FSDP_OPTIMIZER) if has_optimizer else None
    names = as_named(list(shapes), "FSDP (Trainer or accelerate)")
    before = _prefix(weights, shapes)
    _check_layers(weights, names, before)
    return _with_adam(step, names, shapes, _Source(checkpoint=weights, before=before), optimizer)


def _named(
    step: Path, checkpoint: DistributedCheckpoint, names: WeightMap, shapes: Shapes, notices: tuple[str, ...] = ()
) -> TrainingState:
    before = _prefix(checkpoint, [names.stored(name)[0].key for name in names.parameters])
    _check_layers(checkpoint, names, before)
    source = _Source(checkpoint=checkpoint, before=before)
    return _with_adam(step, names, shapes, source, checkpoint, notices=notices)


def _check_layers(checkpoint: DistributedCheckpoint, names: WeightMap, before: str) -> None:
    """Raise CheckpointError where the checkpoint has a layer or an expert more than the model."""
    known = {f"{before}{key}" for weight in names.weights for key in (weight.key, weight.alias) if key}
    extra = one_too_many(known, checkpoint.tensors)
    if extra is not None:
        raise checkpoint_error(checkpoint.directory, f"it has {printable(extra)}, and the model has not. {_OTHER}")


def _prefix(checkpoint: DistributedCheckpoint, keys: Any) -> str:
    """What stands before the names of weights: nothing, `model.`, or that of an application's own object."""
    first = next(iter(keys))
    prefixes = [key.removesuffix(first) for key in checkpoint.tensors if key.endswith(first)]
    return min((prefix for prefix in prefixes if not prefix or prefix.endswith(".")), key=len, default="")


def _with_adam(
    step: Path,
    names: WeightMap,
    shapes: Shapes,
    weights: _Source,
    optimizer: DistributedCheckpoint | None,
    *,
    notices: tuple[str, ...] = (),
) -> TrainingState:
    """A state whose optimizer is as torch.distributed.checkpoint.state_dict names it: `optimizer.state.NAME.KIND`."""
    sources = {MASTER: weights}
    if optimizer is not None:
        for kind in STATE_KINDS:
            sources[kind] = _Source(checkpoint=optimizer, before=_STATES, after=f".{kind}")
    updates = _updates(optimizer, names, shapes)
    return _described(
        step,
        names,
        shapes,
        sources,
        optimizer,
        step_number=_step(step, optimizer),
        updates=updates,
        notices=notices,
    )


def _updates(optimizer: DistributedCheckpoint | None, names: WeightMap, shapes: Shapes) -> int | None:
    if optimizer is None:
        return None
    for name in shapes:
        source = _Source(checkpoint=optimizer, before=_STATES, after=".step")
        weight = names.stored(name)[0]
        if source.has(weight):
            key = source.key(weight)
            return count_of(optimizer.read(key), optimizer.directory, key)
    return None


def _step(step: Path, optimizer: DistributedCheckpoint | None) -> int | None:
    """The number of the step: as trainer_state.json says, torchtitan's train_state, or the directory's name."""
    if (file := step / "trainer_state.json").exists():
        try:
            number = read_json_object(file).get("global_step")
        except (OSError, ValueError) as error:
            raise checkpoint_error(file, f"cannot be read ({printable(str(error))}). Copy it again.") from None
        if number is not None:
            return count_of(number, file, "global_step")
    if optimizer is not None and "train_state.step" in optimizer.tensors:
        return count_of(optimizer.read("train_state.step"), optimizer.directory, "train_state.step")
    match = _TITAN_STEP.fullmatch(step.name) or re.fullmatch(r"checkpoint-([0-9]+)", step.name)
    return int(match[1]) if match else None


def _megatron(step: Path, checkpoint: DistributedCheckpoint, config: Config, shapes: Shapes) -> TrainingState:
    is_stacked = not any(re.match(rf"{re.escape(LAYERS)}[0-9]+\.", key) for key in checkpoint.tensors)
    rows = checkpoint.tensors[_EMBEDDINGS["megatron"]].shape[0]
    names = megatron_map(config, shapes, is_stacked=is_stacked)
    _check_layers(checkpoint, names, "")
    _check_backend(step / _MEGATRON_BACKEND)
    common = _common(step / _MEGATRON_FILE)
    sources = {MASTER: _Source(checkpoint=checkpoint)}
    prefixes = _optimizer_prefixes(checkpoint)
    for kind in STATE_KINDS:
        sources[kind] = _Source(checkpoint=checkpoint, before=f"optimizer.state.{kind}.")
    weights = sources[MASTER]
    if prefixes:
        sources[MASTER] = _Source(checkpoint=checkpoint, before=prefixes[0])
    notices = []
    if rows > config.vocab_size:
        notices.append(
            f"its vocabulary was padded from {config.vocab_size} to {rows} rows, which took part in its loss; here "
            "they are left out, so that the loss becomes slightly smaller"
        )
    is_by_bucket = any(_BUCKETS.match(key) for key in (*checkpoint.tensors, *checkpoint.objects))
    if not prefixes and is_by_bucket:
        notices.append(
            "its optimizer is stored by buckets of a layout (dp_reshardable), which is not read; save with "
            "--dist-ckpt-optim-fully-reshardable to import it"
        )
    groups = _megatron_groups(common)
    number = common.get("iteration")
    if number is not None:
        number = count_of(number, step / _MEGATRON_FILE, "iteration")
    values = _MegatronReader(step, names, shapes, sources, weights=weights)
    counts = [
        count_of(group["step"], step / _MEGATRON_FILE, "step") for group in groups if group.get("step") is not None
    ]
    updates = counts[0] if counts else None
    return _described(
        step,
        names,
        shapes,
        sources,
        None,
        values=values,
        step_number=number,
        updates=updates,
        optimizer={
            name: group[name]
            for group in reversed(groups)
            if group.get("wd_mult", 1.0)
            for name in ("lr", "betas", "eps", "weight_decay")
            if name in group
        },
        notices=tuple(notices),
        seed=arguments.seed if isinstance(arguments := common.get("args"), Arguments) else None,
    )


def _optimizer_prefixes(checkpoint: DistributedCheckpoint) -> list[str]:
    return [prefix for prefix in _MASTERS if any(key.startswith(prefix) for key in checkpoint.tensors)]


def _check_backend(file: Path) -> None:
    """Raise CheckpointError where Megatron-Core did not finish the checkpoint, or wrote another format."""
    if not os.path.lexists(file):
        raise checkpoint_error(file, "it is missing, which is written last. Copy all files, or name another step.")
    try:
        backend = read_json_object(file).get("sharded_backend")
    except (OSError, ValueError) as error:
        raise checkpoint_error(file, f"cannot be read ({printable(str(error))}). Copy it again.") from None
    if backend != _MEGATRON_FORMAT:
        problem = f"sharded_backend is {printable(backend)}, not {_MEGATRON_FORMAT}"
        raise checkpoint_error(file, f"{problem}. Save it again with --ckpt-format {_MEGATRON_FORMAT}.")


def _common(file: Path) -> Mapping[str, Any]:
    """What Megatron-Core stores beside the tensors. Objects of its own classes are read as empty ones."""
    if not os.path.lexists(file):
        raise checkpoint_error(file, "it is missing, which says the step. Copy all files of the step.")
    common = read_scanned(file, own_classes=("megatron.", "argparse.Namespace"))
    if not isinstance(common, Mapping):
        raise checkpoint_error(file, "not a file of Megatron-Core. Choose a complete checkpoint.")
    return common


def _megatron_groups(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameter groups of the optimizer, or of all that are chained."""
    found: list[Mapping[str, Any]] = []

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, Mapping) and depth < 4:
            groups = value.get("param_groups")
            if isinstance(groups, list):
                found.extend(group for group in groups if isinstance(group, Mapping))
            for inner in value.values():
                visit(inner, depth + 1)

    visit(common.get("optimizer"), 0)
    return found


def _described(
    step: Path,
    names: WeightMap,
    shapes: Shapes,
    sources: Mapping[str, _Source],
    settings: DistributedCheckpoint | None,
    *,
    step_number: int | None,
    updates: int | None,
    values: "_Reader | None" = None,
    optimizer: Mapping[str, Any] | None = None,
    notices: tuple[str, ...] = (),
    seed: int | None = None,
) -> TrainingState:
    unknown = next((name for name in shapes if name not in names.parameters), None)
    if unknown is not None:
        raise checkpoint_error(step, f"where {names.program} stores {unknown} is not known here. {_OTHER}")
    present = {name: shape for name, shape in shapes.items() if all(map(sources[MASTER].has, names.stored(name)))}
    missing = next((name for name in shapes if name not in present), None)
    if missing is not None:
        key = sources[MASTER].key(names.stored(missing)[0])
        raise checkpoint_error(step, f"it has no {key}, which holds {missing}. {_OTHER}")
    sizes = names.leading_sizes()
    states = {
        kind: [name for name in shapes if all(map(source.has, names.stored(name)))]
        for kind, source in sources.items()
        if kind != MASTER
    }
    kinds = tuple(kind for kind, having in states.items() if having)
    trained = set(states[kinds[0]]) if kinds else set(shapes)
    partly = next((f"{kind} of {name}" for kind in kinds for name in sorted(trained ^ set(states[kind]))), None)
    if partly is not None:
        raise checkpoint_error(step, f"it has no {partly}, which other parameters have. Copy all files of the step.")
    for kind, source in sources.items():
        for name in shapes if kind == MASTER else states[kind]:
            for weight in names.stored(name):
                source.check(weight, sizes[weight.key])
    if values is None:
        values = _Reader(step, names, shapes, sources)
    number = step_number if step_number is not None else updates
    if number is None:
        problem = "it does not say which step it is of"
        notices = (*notices, f"{problem}: 0 is taken")
    return TrainingState(
        tag=step,
        program=names.program,
        ranks=_ranks(sources[MASTER].checkpoint),
        step=number or 0,
        updates=updates if updates is not None else number or 0,
        shapes=dict(shapes),
        kinds=kinds,
        read=values.read,
        frozen=tuple(name for name in shapes if name not in trained),
        optimizer=optimizer if optimizer is not None else _settings(settings),
        seed=seed,
        notices=notices,
    )


_OTHER = "Use the config that it was trained with, and all files of the step."


class _Reader:
    """Reads parameters. Where a stored tensor holds several, it is read again for each, and kept for none."""

    def __init__(self, step: Path, names: WeightMap, shapes: Shapes, sources: Mapping[str, _Source]) -> None:
        self._step = step
        self._names = names
        self._shapes = shapes
        self._sources = sources

    def read(self, kind: str, name: str) -> torch.Tensor:
        try:
            return self._names.read(name, self._shapes[name], self._sources[kind].read)
        except ShapeError as error:
            raise checkpoint_error(self._step, f"{error}. {_OTHER}") from None


class _MegatronReader(_Reader):
    """Reads parameters, and holds the fp32 weights of the optimizer against `weights`, those of the model.

    Where the tied embeddings of a pipeline have a bucket of their own, and rows times hidden size of a rank are no
    multiple of 128, megatron-core 0.16.1 leaves out the padding between buckets as it writes fully reshardable states:
    all states behind it are shifted, and those of the last parameter end in zeros.
    """

    def __init__(
        self, step: Path, names: WeightMap, shapes: Shapes, sources: Mapping[str, _Source], *, weights: _Source
    ) -> None:
        super().__init__(step, names, shapes, sources)
        self._weights = weights

    def read(self, kind: str, name: str) -> torch.Tensor:
        if kind == MASTER and self._weights != self._sources[MASTER]:
            for stored in self._names.stored(name):
                self._check_master(stored)
        return super().read(kind, name)

    def _check_master(self, stored: StoredWeight) -> None:
        if not self._weights.has(stored):
            return
        weight = self._weights.read(stored)
        master = self._sources[MASTER].read(stored)
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight.shape != master.shape:
            return
        if torch.allclose(weight.float(), master.float(), rtol=torch.finfo(weight.dtype).eps, atol=1e-30):
            return
        key = self._sources[MASTER].key(stored)
        raise checkpoint_error(
            self._step,
            f"{key} is not {self._weights.key(stored)} in fp32: Megatron-Core wrote its optimizer shifted, as it does "
            "with tied embeddings whose rows x hidden on a rank are no multiple of 128. Load it with --no-load-optim, "
            "save it with --no-save-optim, and import the weights.",
        )


def _ranks(checkpoint: DistributedCheckpoint) -> int:
    """How many ranks wrote it, by the names of its files."""
    files = {box.file for tensor in checkpoint.tensors.values() for box in tensor.boxes}
    return len({match[1] for file in files if (match := _RANK_FILE.fullmatch(file))}) or 1


def _settings(checkpoint: DistributedCheckpoint | None) -> dict[str, Any]:
    """Settings of the optimizer: of its parameter groups the first, with the largest weight decay of all."""
    if checkpoint is None:
        return {}
    found: dict[str, Any] = {}
    for key in checkpoint.objects:
        if (match := _GROUP.fullmatch(key)) is None:
            continue
        value = checkpoint.object(key)
        if match[2] == "weight_decay" and isinstance(value, int | float):
            found[match[2]] = max(value, found.get(match[2], 0.0))
        else:
            found.setdefault(match[2], value)
    return found
