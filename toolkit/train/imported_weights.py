"""Importing weights: what others trained becomes a Hugging Face directory that training can begin with."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from toolkit.checkpoint.exchange.companions import copy_companions, read_config, with_dtype, write_config
from toolkit.checkpoint.exchange.deepspeed import DeepSpeedCheckpoint, find_tag, open_deepspeed
from toolkit.checkpoint.exchange.gguf import SUFFIX, open_gguf
from toolkit.checkpoint.exchange.hugging_face import open_hugging_face
from toolkit.checkpoint.exchange.new_directory import Weights, Written, check_unused, write_weights
from toolkit.checkpoint.exchange.partitions import MASTER
from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.names import MODEL, shown
from toolkit.checkpoint.plan import MAX_FILE_BYTES
from toolkit.checkpoint.source import TensorGroup
from toolkit.errors import CheckpointError
from toolkit.train.weights import parameters_on_meta


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was written, and of what. `notices`: what the user should know, one line each."""

    title: str
    written: Written
    notices: tuple[str, ...] = ()


def import_weights(
    source: Path, destination: Path, *, model: Path | None = None, max_shard_bytes: int = MAX_FILE_BYTES
) -> Imported:
    """Write the weights of `source` as a new Hugging Face directory. Raises CheckpointError.

    `model`: where config and tokenizer lie, if not beside the weights.
    """
    check_unused(destination)
    if source.suffix == SUFFIX:
        read = open_gguf(source)

        def beside(folder: Path) -> None:
            write_config(folder, with_dtype(read.config, "float32"))
            read.write_tokenizer(folder)

        written = write_weights(destination, read.weights, beside=beside, max_shard_bytes=max_shard_bytes)
        return Imported(title="GGUF", written=written)
    tag = find_tag(source)
    if tag is None:
        return _hugging_face(source, destination, max_shard_bytes)
    found = open_deepspeed(tag)
    home = model or next((place for place in (source, tag.parent) if (place / "config.json").exists()), None)
    if home is None:
        raise CheckpointError(
            f"{shown(str(source))}: DeepSpeed saves no config.json. Name the Hugging Face directory of the model by "
            "--model, or the recipe to go on with by --recipe."
        )
    config = read_config(home, follow=True)
    check_fits(found, _auto_config(home))

    def with_config(folder: Path) -> None:
        write_config(folder, with_dtype(config, "float32"))
        copy_companions(home, folder, follow=True)

    written = write_weights(destination, _weights(found), beside=with_config, max_shard_bytes=max_shard_bytes)
    return Imported(title=f"DeepSpeed {found.title}", written=written, notices=tuple(_notices(found)))


def _hugging_face(source: Path, destination: Path, max_shard_bytes: int) -> Imported:
    if not source.is_dir():
        raise CheckpointError(
            f"{shown(str(source))}: no such directory. Name a Hugging Face directory, a checkpoint of DeepSpeed, or a "
            f"{SUFFIX} file."
        )
    weights = open_hugging_face(source)
    config = read_config(source, follow=True)
    _auto_config(source)

    def beside(folder: Path) -> None:
        write_config(folder, config)
        copy_companions(source, folder, follow=True)

    written = write_weights(destination, weights, beside=beside, max_shard_bytes=max_shard_bytes)
    return Imported(title="Hugging Face", written=written)


def check_fits(found: DeepSpeedCheckpoint, config: PretrainedConfig) -> None:
    """Raise CheckpointError where the parameters are not those of the model that `config` describes."""
    try:
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()  # on the meta device a tie does not survive registration
    except (ValueError, ImportError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"model_type {config.model_type}: transformers cannot build it ({first}).") from error
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    where = f"{shown(str(found.tag))}: not of this model:"
    advice = "Take the config that it was trained with."
    for name in [*wanted, *found.shapes]:
        if name not in found.shapes:
            tied = f", for it is {found.tied[name]} there" if name in found.tied else ""
            raise CheckpointError(f"{where} it has no {name}{tied}. {advice}")
        if name not in wanted:
            raise CheckpointError(f"{where} it has {name}, which a {config.model_type} has not. {advice}")
        if wanted[name] != found.shapes[name]:
            raise CheckpointError(
                f"{where} {name} is {list(found.shapes[name])} there, and {list(wanted[name])} by its config. {advice}"
            )


def tensor_group(found: DeepSpeedCheckpoint, kind: str) -> TensorGroup:
    """All tensors of MASTER, with the buffers of the model, or of an optimizer state, in the model's order."""
    specs = [TensorSpec(name=name, shape=shape, dtype=torch.float32) for name, shape in found.shapes.items()]
    buffers = found.buffers if kind == MASTER else {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in found.shapes:
            yield name, found.read(kind, name)
        yield from buffers.items()

    specs += [TensorSpec.of(name, value) for name, value in buffers.items()]
    return TensorGroup(kind=MODEL if kind == MASTER else kind, specs=specs, tensors=tensors())


def _weights(found: DeepSpeedCheckpoint) -> Weights:
    def read(name: str) -> torch.Tensor:
        return found.buffers[name] if name in found.buffers else found.read(MASTER, name)

    return Weights(specs=tensor_group(found, MASTER).specs, read=read)


def _notices(found: DeepSpeedCheckpoint) -> Iterator[str]:
    if found.kinds:
        yield "the optimizer's states stay behind; --recipe RECIPE takes them along"
    if found.stage == 0 and not found.is_universal:
        yield "ZeRO-0 keeps no names for what its optimizer holds: these are the weights that the forward pass used"


def _auto_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{shown(str(folder))}/config.json: transformers cannot read it ({shown(first)}). Take a model that it "
            "knows."
        ) from error
