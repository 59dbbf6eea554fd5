"""Importing weights: models and checkpoints of other programs become Hugging Face directories to train from."""

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from toolkit.checkpoint.model_directory import NamedWeights, WrittenDirectory, check_unused, write_weights
from toolkit.checkpoint.names import INDEX, MODEL, SINGLE, checkpoint_error, not_a_directory
from toolkit.checkpoint.reader import CheckpointReader, model_files
from toolkit.checkpoint.safetensors_header import TensorSpec, read_header
from toolkit.checkpoint.save_plan import MAX_FILE_BYTES, LocalShard
from toolkit.checkpoint.tensor_source import ShardedTensorGroup
from toolkit.checkpoint.verify import index_problems
from toolkit.convert.deepspeed_checkpoint import find_tag, is_deepspeed, open_deepspeed
from toolkit.convert.distributed_states import find_state, open_state
from toolkit.convert.export_model import cast_weights, copy_small_files, read_config, write_config
from toolkit.convert.loaded_model import missing_weights
from toolkit.convert.training_state import MASTER, TrainingState
from toolkit.errors import CheckpointError
from toolkit.files import open_regular, printable, reason_of
from toolkit.model_init.model_modules import parameters_on_meta
from toolkit.parallel.shard import Shard

_PICKLES = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")

GGUF_SUFFIX = ".gguf"
_GGUF_MAGIC = b"GGUF"
_SOURCES = f"Name a directory in Hugging Face format, a checkpoint of another program, or a {GGUF_SUFFIX} file."


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Weights that were imported, and their source. `notices`: what the user should know, one line each."""

    title: str
    written: WrittenDirectory
    notices: tuple[str, ...] = ()


def import_weights(
    source: Path, destination: Path, *, model: Path | None = None, max_shard_bytes: int = MAX_FILE_BYTES
) -> Imported:
    """Write the weights of `source` as a new Hugging Face directory. Raises CheckpointError.

    `model`: the directory with config and tokenizer, if they are not beside the weights.
    """
    check_unused(destination)
    check_outside(destination, source)
    notices: tuple[str, ...] = ()
    if source.suffix == GGUF_SUFFIX:
        title = "GGUF"
        weights, write_small_files = open_gguf(source)
    else:
        step = find_step(source)
        if step is None:
            title = "Hugging Face"
            weights = open_hugging_face(source)
            home = source
            dtype = None
        else:
            home = _model_directory(source, step, model)
            dtype = "float32"
            state = open_step(step, read_auto_config(home))
            title = state.title
            notices = tuple(_notices(state))
            weights = NamedWeights(
                specs=tensor_group(state, MASTER).specs,
                read=lambda name: state.buffers[name] if name in state.buffers else read_finite(state, MASTER, name),
            )
        config = read_config(home, follow=True)
        described = read_auto_config(home)
        if step is not None:
            check_fits(state, described)

        def write_small_files(directory: Path) -> None:
            write_config(directory, config, dtype)
            copy_small_files(home, directory, follow=True)

    written = write_weights(destination, weights, write_small_files=write_small_files, max_shard_bytes=max_shard_bytes)
    return Imported(title=title, written=written, notices=notices)


def check_outside(destination: Path, source: Path) -> None:
    """Raise CheckpointError where what is written would be a part of what is read."""
    # os.path.realpath returns where links lead in a circle, which Path.resolve raises for.
    if source.is_dir() and Path(os.path.realpath(destination)).is_relative_to(os.path.realpath(source)):
        problem = f"it is inside of {printable(source)}, which is only read"
        raise checkpoint_error(destination, f"{problem}. Name a directory elsewhere.")


def open_hugging_face(directory: Path) -> NamedWeights:
    """The weights of a directory, as they are stored. Raises CheckpointError where they are not safetensors."""
    if not directory.is_dir():
        raise checkpoint_error(directory, f"{not_a_directory(directory)}. {_SOURCES}")
    if not any((directory / name).exists() for name in (SINGLE, INDEX)):
        pickled = next((path.name for pattern in _PICKLES for path in sorted(directory.glob(pattern))), None)
        if pickled is not None:
            raise checkpoint_error(
                directory,
                f"its weights are pickled ({printable(pickled)}), and a pickle can run any program. If you trust it, "
                "load it with transformers and call save_pretrained; then import what that wrote.",
            )
        raise checkpoint_error(directory, f"it contains neither safetensors nor a checkpoint that is known. {_SOURCES}")
    _check_files(directory)
    return cast_weights(CheckpointReader(directory), None)


def _check_files(directory: Path) -> None:
    """Raise CheckpointError where a file cannot be read, or has other tensors than the index says."""
    try:
        names = model_files(directory)
    except (OSError, ValueError) as error:
        raise checkpoint_error(directory / INDEX, f"cannot be read ({reason_of(error)}). Copy it again.") from None
    files = {}
    for name in names:
        try:
            files[name] = read_header(directory / name, follow=True)
        except (OSError, ValueError) as error:
            raise checkpoint_error(directory / name, f"cannot be read ({reason_of(error)}). Copy it again.") from None
    problem = None if SINGLE in files else next(index_problems(directory, files, follow=True), None)
    if problem is not None:
        raise checkpoint_error(directory, f"{problem}. Copy all files of the model.")


def find_step(source: Path) -> Path | None:
    """The directory of a step of another program's training state in `source`; None where there is none.

    Raises CheckpointError where it is damaged.
    """
    if not source.is_dir():
        return None
    try:
        return find_tag(source) or find_state(source)
    except OSError as error:
        raise checkpoint_error(source, f"cannot be read ({reason_of(error)}).") from None


def open_step(step: Path, config: PretrainedConfig) -> TrainingState:
    """Open the training state in a step's directory, of a model with this config. Raises CheckpointError."""
    if is_deepspeed(step):
        return open_deepspeed(step)
    return open_state(step, config, model_shapes(config))


def model_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by name. Raises CheckpointError where transformers cannot build it."""
    return {name: tuple(parameter.shape) for name, parameter in model_on_meta(config).named_parameters()}


def model_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config, without memory. Raises CheckpointError where transformers cannot build it."""
    try:
        with parameters_on_meta():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()  # on the meta device a tie does not survive registration
    except (ValueError, ImportError, KeyError) as error:
        reason = f"transformers cannot build it ({reason_of(error)})"
        raise CheckpointError.of("model_type", config.model_type, reason) from error
    return model


def check_fits(state: TrainingState, config: PretrainedConfig) -> None:
    """Raise CheckpointError where the parameters are not those of the model that `config` describes."""
    expected = model_shapes(config)
    for name in [*expected, *state.shapes]:
        if name not in state.shapes:
            tied = f", because it is {state.tied[name]} there" if name in state.tied else ""
            problem = f"it has no {name}{tied}"
        elif name not in expected:
            problem = f"it has {name}, which a {config.model_type} does not have"
        elif expected[name] != state.shapes[name]:
            problem = f"{name} is {list(state.shapes[name])} there, and {list(expected[name])} by its config"
        else:
            continue
        raise checkpoint_error(state.tag, f"not of this model: {problem}. Use the config that it was trained with.")


def tensor_group(state: TrainingState, kind: str) -> ShardedTensorGroup:
    """All tensors of one kind in the model's order: an optimizer state, or MASTER, the weights with the buffers."""
    specs = [TensorSpec(name=name, shape=shape, dtype=torch.float32) for name, shape in state.shapes.items()]
    buffers = state.buffers if kind == MASTER else {}
    specs += [TensorSpec.of(name, value) for name, value in buffers.items()]
    shards = [Shard(name=spec.name, shape=spec.shape) for spec in specs]

    @lru_cache(maxsize=1)  # a large tensor is saved in several parts
    def values(index: int) -> torch.Tensor:
        name = specs[index].name
        return (buffers[name] if name in buffers else read_finite(state, kind, name)).reshape(-1)

    return ShardedTensorGroup(
        kind=MODEL if kind == MASTER else kind,
        specs=specs,
        local_shards=[LocalShard(shard=shard, start=0, length=math.prod(shard.shape)) for shard in shards],
        values=values,
    )


def read_finite(state: TrainingState, kind: str, name: str) -> torch.Tensor:
    """A parameter, or a state of it. Raises CheckpointError where it has NaN or infinity."""
    value = state.read(kind, name)
    if not value.isfinite().all():
        described = name if kind == MASTER else f"{kind} of {name}"
        problem = f"{described} has values that are not finite, with which nothing trains on"
        raise checkpoint_error(state.tag, f"{problem}. Choose an earlier step.")
    return value


def _notices(state: TrainingState) -> Iterator[str]:
    if state.kinds:
        yield "the optimizer states are not imported; --recipe RECIPE imports them too"
    yield from state.notices


def _model_directory(source: Path, tag: Path, model: Path | None) -> Path:
    home = model or next((place for place in (source, tag.parent) if (place / "config.json").exists()), None)
    if home is None:
        options = "Name the Hugging Face directory of the model by --model, or the recipe to resume with by --recipe."
        raise checkpoint_error(source, f"there is no config.json in it. {options}")
    return home


def read_auto_config(directory: Path) -> PretrainedConfig:
    """The config of a directory, as transformers decodes it. Raises CheckpointError."""
    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:
        message = f"transformers cannot read it ({reason_of(error)}). Choose a model that it supports."
        raise checkpoint_error(directory / "config.json", message) from error


def open_gguf(path: Path) -> tuple[NamedWeights, Callable[[Path], None]]:
    """Read a file of llama.cpp's format, of a family whose GGUF transformers reads. Quantized weights become fp32.

    Returns them, and a function that writes config and tokenizer into a directory. transformers dequantizes the
    complete model at once, so it has to fit into memory. Raises CheckpointError where it is not GGUF, or transformers
    cannot read it.
    """
    try:
        with open_regular(path, follow=True) as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise checkpoint_error(path, f"cannot be read ({reason_of(error)}).") from None
    if magic != _GGUF_MAGIC:
        raise checkpoint_error(path, "not a GGUF file: it does not begin with GGUF. Name another file.")
    if importlib.util.find_spec("gguf") is None:
        raise checkpoint_error(path, "reading GGUF needs the package gguf. Install it: pip install 'gguf>=0.19'.")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # a malformed file can make the readers raise anything
        raise checkpoint_error(path, f"transformers cannot read it ({reason_of(error)}).") from error
    missing = missing_weights(report)
    if missing is not None:
        raise checkpoint_error(path, f"missing weights: {missing}. Give a complete file.")
    # The weights are not quantized anymore, and local paths are not exported.
    hidden = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in hidden}
    config |= {"architectures": [type(model).__name__], "model_type": model.config.model_type}
    values = dict(model.named_parameters())

    def write_small_files(directory: Path) -> None:
        write_config(directory, config, "float32")
        tokenizer.save_pretrained(directory)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(directory)

    specs = [TensorSpec.of(name, value) for name, value in values.items()]
    return NamedWeights(specs=specs, read=lambda name: values[name].detach()), write_small_files
