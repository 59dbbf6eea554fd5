"""List a model's parameters from its modules on the meta device, and how training shards each of them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from toolkit.errors import ModelError
from toolkit.estimate.parameters import ModelParameters, Parameter, PartFlops
from toolkit.estimate.trainable import Trainable
from toolkit.models.families.spec import SPELLINGS
from toolkit.parallel.adapter_names import PREFIX, saved_name
from toolkit.parallel.model_structure import ModelStructure
from toolkit.parallel.pipeline.balance import count_flops
from toolkit.parallel.tensor.parallelize import TensorParallelizer, is_column, sharded_dim
from toolkit.recorder.fake_model import has_position_table, skip_similar, structure_of, text_config
from toolkit.recorder.frozen import freeze
from toolkit.recorder.record import in_fake_group

_UNIT = 64
"""Positions of the shortest of three forward passes: two give FLOPs as a line, and the third must be on it."""


def record_parameters(config: str, trainable: str = "") -> ModelParameters:
    """List the parameters of the model that transformers builds from a config. Raises ModelError.

    `trainable`: which of them train, as in Computation.
    """
    with in_fake_group(config):
        facts = json.loads(config)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(facts.pop("model_type"), **facts)
            )
        model.tie_weights()
        structure = structure_of(config, model)
        freeze(model, Trainable.parse(trainable or "all"))
        return _listed(model, structure)


def _listed(model: PreTrainedModel, structure: ModelStructure) -> ModelParameters:
    layers = structure.layer_list(model)
    parallelizer = _parallelizer(model, structure)
    kinds: dict[tuple[Any, ...], int] = {}
    pattern = []
    for layer in layers:
        listed = (tuple(_layer_parameters(layer, parallelizer)), _bytes(layer.buffers()))
        pattern.append(kinds.setdefault(listed, len(kinds)))
    inner = {id(p) for p in layers.parameters()}
    front: list[Parameter] = []
    back: list[Parameter] = []
    seen_layers = False
    for name, parameter in model.named_parameters():
        if id(parameter) in inner:
            seen_layers = True
        else:
            (back if seen_layers else front).append(_outer_parameter(model, structure, name, parameter))
    layer_buffers = [size for _, size in kinds]
    return ModelParameters(
        front=tuple(front),
        kinds=tuple(parameters for parameters, _ in kinds),
        pattern=tuple(pattern),
        back=tuple(back),
        buffer_bytes=_bytes(model.buffers()) - sum(layer_buffers[kind] for kind in pattern),
        layer_buffer_bytes=tuple(layer_buffers),
        flops=tuple(_part_flops(model, structure, pattern)),
        facts=_facts(model, len(layers)),
    )


def _bytes(buffers: Iterable[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _parallelizer(model: PreTrainedModel, structure: ModelStructure) -> TensorParallelizer | None:
    """Return the parallelizer; None for a family without tensor parallelism, of which nothing is sharded."""
    group = dist.group.WORLD
    assert group is not None
    try:
        return TensorParallelizer(model, structure, group)
    except ModelError:
        return None


def _layer_parameters(layer: nn.Module, parallelizer: TensorParallelizer | None) -> Iterator[Parameter]:
    sharded: dict[str, dict[str, Any]] = {}
    for path, module, style, blocks in parallelizer.planned(layer) if parallelizer else ():
        units = tuple((block.units, block.width) for block in blocks)
        where = {"blocks": units if any(width > 1 for _, width in units) else ()}
        sharded[f"{path}.weight"] = {"dim": sharded_dim(module, style), **where}
        if is_column(style):
            sharded[f"{path}.bias"] = {"dim": 0, **where}
        adapter = {"dim": 0} if is_column(style) else {"dim": 1}
        sharded[f"{PREFIX}{path}.lora_{'B' if is_column(style) else 'A'}.weight"] = {**adapter, **where}
    for path, _ in parallelizer.planned_vectors(layer) if parallelizer else ():
        sharded[path] = {"dim": 0}
    for name, parameter in layer.named_parameters():
        split = sharded.get(saved_name(name), {})
        yield Parameter(name=name, shape=tuple(parameter.shape), trainable=parameter.requires_grad, **split)


def _outer_parameter(
    model: PreTrainedModel, structure: ModelStructure, name: str, parameter: nn.Parameter
) -> Parameter:
    owners = [
        owner
        for owner, module in model.named_modules()
        if any(held is parameter for held in module.parameters(recurse=False))
    ]
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    vocabulary = isinstance(embedding, nn.Embedding) and parameter is embedding.weight
    is_head = isinstance(head, nn.Linear) and any(parameter is held for held in head.parameters(recurse=False))
    return Parameter(
        name=name,
        shape=tuple(parameter.shape),
        dim=0 if vocabulary or is_head else None,
        is_vocabulary=vocabulary or is_head,
        is_head=is_head,
        first=bool(structure.before & {*owners}),
        last=bool(structure.after & {*owners}),
        owners=tuple(owners),
        trainable=parameter.requires_grad,
    )


def _part_flops(model: PreTrainedModel, structure: ModelStructure, pattern: list[int]) -> Iterator[PartFlops]:
    """FLOPs for a token: before the layers, a layer of each kind, the head. Layers that are alike are skipped."""
    layers = structure.layer_list(model)
    running = skip_similar(layers, tuple(pattern), structure, splits_sequence=False)
    run = [layers[index] for index in running]
    unit = max(1, min(_UNIT, (_facts(model, 0)["positions"] or 3 * _UNIT) // 3))
    lengths = (unit, 2 * unit, 3 * unit)
    first, second, third = (count_flops(model, run, s)[0] for s in lengths)
    kinds = [pattern[index] for index in running]
    for at in (0, *(1 + kinds.index(kind) for kind in range(len({*pattern}))), len(first) - 1):
        lines = zip(first[at], second[at], third[at], strict=True)
        flops, with_weights = (_line_through(lengths, counts) for counts in lines)
        yield PartFlops(flops=flops, with_weights=with_weights)


def _line_through(lengths: tuple[int, ...], counts: tuple[int, ...]) -> tuple[float, float]:
    """FLOPs of a token as constant and slope, from those of whole samples."""
    a, b, c = (count / s for count, s in zip(counts, lengths, strict=True))
    if abs(2 * b - a - c) > 1e-6 * c:
        raise ModelError("its FLOPs are not linear in positions")
    return 2 * a - b, (b - a) / lengths[0]


def _facts(model: PreTrainedModel, layers: int) -> Mapping[str, Any]:
    """Return the facts that ModelShape has, of the config as transformers reads it."""
    config = text_config(model)

    def read(fact: str) -> Any:
        values = (getattr(config, name, None) for name in SPELLINGS[fact])
        return next((value for value in values if isinstance(value, int)), None)

    facts = {fact: read(fact) for fact in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "positions")}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    learned = facts["positions"] is not None and has_position_table(facts["positions"], model)
    return facts | {"layers": layers, "tied": tied, "learned_positions": learned}
