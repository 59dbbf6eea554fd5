"""TensorParallelizer: replaces a Hugging Face model's linear layers, embedding and LM head by this rank's shards.

It works in place, layer by layer, on real weights and on the meta device, so that a rank never holds more than one full
layer. The forward pass stays the family's own; its TensorPlan says how each linear layer is sharded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from toolkit.errors import LayoutError, ModelError
from toolkit.models import tensor_plan as tp
from toolkit.models.families.registry import find_plan
from toolkit.parallel.adapter_names import saved_name
from toolkit.parallel.experts.sharding import ExpertSharder
from toolkit.parallel.model_structure import ModelStructure
from toolkit.parallel.pipeline.stage import NonLocalLayer
from toolkit.parallel.shard import Block, Shard, is_marked, mark, pieces_of, shard_of, source_of
from toolkit.parallel.tensor import collectives as c
from toolkit.parallel.tensor.linear import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    RowParallelLinear,
    sum_over_ranks,
)
from toolkit.parallel.tensor.region import Region, drops_activations
from toolkit.parallel.tensor.vocabulary import shard_embedding, shard_head
from toolkit.units import with_article

_LINEAR = ("Linear", "Conv1D", "FalconLinear")


def check_plan(config: PretrainedConfig, size: int, *, sequence_parallel: bool) -> None:
    """Raise ModelError or LayoutError where a model of this config cannot be sharded over `size` ranks."""
    text = config.get_text_config(decoder=True)
    family = config.model_type
    plan = find_plan(family, text)
    reason = plan.needs(text, size)
    indivisible = [heads for heads in tp.heads_of_layers(text) or (tp.heads(text),) if heads % size]
    if reason is None and indivisible:
        reason = f"{indivisible[0]} heads are not divisible by it"
    if reason is not None:
        raise LayoutError.between((("parallel.tp", size), ("model_type", family)), reason, "choose another one")
    if sequence_parallel and not plan.mixes_positions:
        reason = "its plan does not shard attention, which needs the whole sequence"
        raise ModelError.of("model_type", family, reason, ("parallel.sequence_parallel", False))


class TensorParallelizer:
    """Shards one model over the ranks of `group`. Raises ModelError or LayoutError before anything is changed."""

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool = False,
        experts: ExpertSharder | None = None,
    ) -> None:
        self.experts = experts
        self.model = model
        self.structure = structure
        self.group = group
        self.config = model.config.get_text_config(decoder=True)
        self.plan = find_plan(model.config.model_type, self.config)
        self.sequence_parallel = sequence_parallel
        self.dropout = drops_activations(model.config)
        self._check()

    def _check(self) -> None:
        family = self.model.config.model_type
        check_plan(self.model.config, self.group.size(), sequence_parallel=self.sequence_parallel)
        for name, module in self.model.named_modules():
            if name.endswith(".experts") and not hasattr(module, "_is_expert_parallel"):
                reason = "its experts do not use transformers' experts interface"
                raise ModelError.of("model_type", family, reason, ("parallel.tp", 1))

    def parallelize_layer(self, index: int, fill: Callable[[nn.Module], None] = lambda layer: None) -> None:
        """Shard decoder layer `index`; `fill` then sets the values of replicated meta parameters.

        Gradient hooks belong to a parameter object, so the parameters must be real before hooks are set.
        """
        prefix = f"{self.structure.layers}.{index}"
        layer = self.structure.layer_list(self.model)[index]
        if isinstance(layer, NonLocalLayer):
            return
        if self.experts is not None:
            self.experts.shard_layer(layer, prefix)
        regions: dict[str, Region] = {}
        planned = list(self.planned(layer))
        vectors = list(self.planned_vectors(layer))
        for path, whole, style, blocks in planned:
            parent, _, leaf = path.rpartition(".")
            if parent not in regions:
                gathers = style in (tp.GATHERED_COLUMN, tp.SPLIT_ROW)
                regions[parent] = self._region(gathers=gathers, place=len(regions))
            region = regions[parent]
            sharded = self._parallel(whole, blocks, f"{prefix}.{path}", style, region, enters=not parent)
            setattr(layer.get_submodule(parent), leaf, sharded)
        for path, vector in vectors:
            parent, _, leaf = path.rpartition(".")
            pieces = pieces_of([Block(units=vector.shape[0])], self.group.rank(), self.group.size())
            shard = Shard(name=f"{prefix}.{path}", shape=tuple(vector.shape), dim=0, pieces=pieces)
            local = nn.Parameter(shard.take(source_of(vector)), requires_grad=vector.requires_grad)
            setattr(layer.get_submodule(parent), leaf, mark(local, shard))
        fill(layer)
        for parent, region in regions.items():
            if parent:
                self._adapt_block(layer.get_submodule(parent), parent, region, self._behind(layer))
        if self.sequence_parallel:
            whole_blocks = [path for path in self.plan.whole if _has(layer, path) and path not in regions]
            for place, path in enumerate(whole_blocks, start=len(regions)):
                self._gather_sequence(layer.get_submodule(path), place=place)
            for parameter in self._outside(layer, [*regions, *whole_blocks]):
                sum_over_ranks(parameter, self.group)
            self._split_sequence(index, layer)
        # Now, because ZeRO-3 discards the shapes when it shards the layer.
        mark_replicated(layer, self.structure.tied, prefix=f"{prefix}.")

    def parallelize_vocabulary(
        self, *, embeds: bool = True, done: Callable[[nn.Module], None] = lambda module: None
    ) -> None:
        """Shard embedding and LM head, where this stage has them, and mark all other parameters as replicated.

        `embeds`: whether this pipeline stage looks tokens up, or has the embedding only for a tied head. `done` is
        called with each of the two once it is sharded.
        """
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        names = {id(module): name for name, module in self.model.named_modules()}
        tied = head is not None and getattr(embedding, "weight", None) is head.weight
        if isinstance(embedding, nn.Embedding) and "weight" in embedding._parameters:
            shard_embedding(embedding, names[id(embedding)], self.group, is_idle=not embeds)
            done(embedding)
            for parameter in (p for child in embedding.children() for p in child.parameters()):
                # A norm inside the embedding: each rank sees only the tokens that it looked up.
                sum_over_ranks(parameter, self.group)
        if isinstance(head, nn.Linear) and "weight" in head._parameters:
            shard_head(head, names[id(head)], self.group, tied_to=embedding.weight if tied else None)
            done(head)
        mark_replicated(self.model, self.structure.tied)

    def _region(self, *, gathers: bool, place: int) -> Region:
        return Region(
            self.group,
            sequence_parallel=self.sequence_parallel,
            dropout=self.dropout,
            gathers=gathers,
            place=place,
        )

    def planned(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module, str, list[Block]]]:
        """Yield (path, linear layer, style, blocks of its sharded features) of what the plan shards in a decoder layer.

        Raises ModelError for a module that is no linear layer.
        """
        for path, style in self.plan.styles.items():
            if style not in tp.SHARDING or not _has(layer, path):
                continue
            whole = layer.get_submodule(path)
            whole = getattr(whole, "base_layer", whole)
            if type(whole).__name__ not in _LINEAR:
                kind = with_article(type(whole).__name__)
                reason = f"{path} of its layers is {kind}, which tensor parallelism cannot shard"
                raise ModelError.of("model_type", self.model.config.model_type, reason, ("parallel.tp", 1))
            assert isinstance(whole.weight, torch.Tensor)
            features = whole.weight.shape[sharded_dim(whole, style)]
            yield path, whole, style, self._blocks(layer, path, style, features)

    def planned_vectors(self, layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (path, parameter) of what the plan shards besides linear layers: one entry per head or column."""
        for name, parameter in layer.named_parameters():
            if self.plan.styles.get(name) == tp.COLUMN:
                yield name, parameter

    def _parallel(
        self, whole: nn.Module, blocks: list[Block], name: str, style: str, region: Region, *, enters: bool
    ) -> nn.Module:
        if style in (tp.ROW, tp.SPLIT_ROW):
            return RowParallelLinear(whole, blocks, name=name, region=region, split_input=style == tp.SPLIT_ROW)
        if len({block.is_shared(self.group.size()) for block in blocks}) > 1:
            return FusedColumnParallelLinear(whole, blocks, name=name, region=region, enters=enters)
        gather = style == tp.GATHERED_COLUMN
        return ColumnParallelLinear(whole, blocks, name=name, region=region, gather_output=gather, enters=enters)

    def _blocks(self, layer: nn.Module, path: str, style: str, features: int) -> list[Block]:
        if path in self.plan.fused:
            return [Block(units=units, width=width) for units, width in self.plan.fused[path](self.config)]
        if style == tp.PACKED_COLUMN:
            return [Block(units=features // 2)] * 2
        parent, _, leaf = path.rpartition(".")
        if style != tp.COLUMN or leaf not in ("q_proj", "k_proj", "v_proj"):
            return [Block(units=features)]
        block = layer.get_submodule(parent)
        units = self._heads(block) if leaf == "q_proj" else self._kv_heads(block)
        return [Block(units=units, width=features // units)]

    def _heads(self, block: nn.Module) -> int:
        """Query heads of one layer's attention: some families have more of them in some layers."""
        if not tp.heads_of_layers(self.config):
            return tp.heads(self.config)
        assert isinstance(block.num_heads, int)
        return block.num_heads

    def _kv_heads(self, block: nn.Module) -> int:
        """Key-value heads of one layer's attention: some families have more of them in some layers."""
        weight = getattr(getattr(block, "k_proj", None), "weight", None)
        width = getattr(block, "head_dim", None)
        if weight is None or not width:
            return tp.kv_heads(self.config)
        shape = shard_of(weight).shape if is_marked(weight) else weight.shape
        return int(shape[0] // width)

    def _outside(self, layer: nn.Module, blocks: Iterable[str]) -> Iterator[nn.Parameter]:
        """Norms around `blocks` and biases after them: with a sharded sequence, each rank sees only its part."""
        inside = {id(p) for path in blocks if path for p in layer.get_submodule(path).parameters()}
        behind = self._behind(layer)
        for parameter in layer.parameters():
            if is_marked(parameter):
                if not shard_of(parameter).is_split:
                    yield parameter
            elif id(parameter) not in inside or id(parameter) in behind:
                yield parameter

    def _behind(self, layer: nn.Module) -> set[int]:
        """The parameters of `layer` that act after a region, by the plan."""
        return {id(parameter) for name, parameter in layer.named_parameters() if name in self.plan.behind}

    def _adapt_block(self, block: nn.Module, path: str, region: Region, behind: set[int]) -> None:
        """Let a block enter its region, and set its number of local heads. `behind`: parameters that act outside it."""
        block.register_forward_pre_hook(_enter(region, self.config, self.plan.per_head), with_kwargs=True)
        if region.gathers:
            return
        size = self.group.size()
        for attribute in self.plan.divided.get(path, ()):
            setattr(block, attribute, max(1, getattr(block, attribute) // size))
        if "num_key_value_groups" not in self.plan.divided.get(path, ()) and hasattr(block, "num_key_value_groups"):
            kv_heads = self._kv_heads(block)
            groups = block.num_key_value_groups
            assert isinstance(groups, int)
            block.__dict__["num_key_value_groups"] = groups * kv_heads // size // max(1, kv_heads // size)
        for parameter in block.parameters():
            if not is_marked(parameter) and id(parameter) not in behind:
                # Norms of single heads: each rank sees only its own heads.
                sum_over_ranks(parameter, self.group)

    def _gather_sequence(self, block: nn.Module, *, place: int) -> None:
        """Let every rank compute a block on the whole sequence, and keep its own part of the result.

        All ranks drop the same there, as in a region that gathers its columns.
        """
        region = self._region(gathers=True, place=place)

        def gather(block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            def gather_hidden(hidden: torch.Tensor) -> torch.Tensor:
                hidden = region.change_stream(hidden, block)
                return c.gather_from_tensor_ranks(hidden, self.group, dim=1)

            return _with_hidden(arguments, keywords, gather_hidden)

        def scatter(block: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
            def scatter_hidden(hidden: torch.Tensor) -> torch.Tensor:
                hidden = region.restore_stream(hidden, block)
                return c.scatter_to_tensor_ranks(hidden, self.group, dim=1)

            return _with_first(result, scatter_hidden)

        block.register_forward_pre_hook(gather, with_kwargs=True)
        block.register_forward_hook(scatter)

    def _split_sequence(self, index: int, layer: nn.Module) -> None:
        def scatter(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            return _with_hidden(
                arguments, keywords, lambda hidden: c.scatter_to_tensor_ranks(hidden, self.group, dim=1)
            )

        def gather(layer: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
            return _with_first(result, lambda hidden: c.gather_from_tensor_ranks(hidden, self.group, dim=1))

        if index == 0:
            layer.register_forward_pre_hook(scatter, with_kwargs=True)
        if index == self.structure.count - 1:
            layer.register_forward_hook(gather)


def mark_replicated(module: nn.Module, tied: Mapping[str, str], *, prefix: str = "") -> None:
    """Mark every parameter without a shard as replicated. `prefix`: of the module's parameter names."""
    for local_name, parameter in module.named_parameters():
        name = saved_name(prefix + local_name)
        if not is_marked(parameter):
            # ZeRO-3 has sharded adapters before they are marked, and keeps their shape here.
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            mark(parameter, Shard(name=tied.get(name, name), shape=shape))


def _enter(region: Region, config: Any, per_head: tuple[str, ...]) -> Any:
    def hook(block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        for name in per_head:
            if isinstance(keywords.get(name), torch.Tensor):
                keywords[name] = _own_heads(keywords[name], tp.heads(config), region.group)
        return _with_hidden(arguments, keywords, lambda hidden: region.enter(hidden, block))

    return hook


def _with_hidden(arguments: tuple[Any, ...], keywords: dict[str, Any], change: Any) -> Any:
    if arguments:
        return (change(arguments[0]), *arguments[1:]), keywords
    return arguments, keywords | {"hidden_states": change(keywords["hidden_states"])}


def _with_first(result: Any, change: Any) -> Any:
    return (change(result[0]), *result[1:]) if isinstance(result, tuple | list) else change(result)


def _own_heads(x: torch.Tensor, heads: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, heads, .., ..] or [b * heads, .., ..] -> this rank's heads. A mask shared by all heads is unchanged."""
    each = heads // group.size()
    start = group.rank() * each
    if x.dim() == 4:
        return x[:, start : start + each] if x.shape[1] == heads else x
    local: torch.Tensor = x.unflatten(0, (-1, heads))[:, start : start + each].flatten(0, 1)
    return local


def is_column(style: str) -> bool:
    """Whether a style shards a linear layer's outputs, with its bias; others shard its inputs."""
    return style in (tp.COLUMN, tp.GATHERED_COLUMN, tp.PACKED_COLUMN)


def sharded_dim(linear: nn.Module, style: str) -> int:
    """The dimension of the weight that a style shards: Linear is [o, i], Conv1D [i, o]."""
    return int(is_column(style) == (type(linear).__name__ == "Conv1D"))


def _has(layer: nn.Module, path: str) -> bool:
    """Whether this layer has the module: some layers and configs omit modules of the plan."""
    try:
        return isinstance(layer.get_submodule(path), nn.Module)
    except AttributeError:
        return False
