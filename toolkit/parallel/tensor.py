"""The tensor cut: a Hugging Face model in, the same model with this rank's heads, columns and vocabulary rows out.

Works in place, layer by layer, on real weights and on the meta device alike, so that a rank never needs to hold more
than one whole layer. The forward pass stays the family's own; its TensorPlan says which linear layers split how.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import LayoutError, ModelError
from toolkit.families import tensor_plan as tp
from toolkit.families.anatomy import Anatomy
from toolkit.parallel import collectives as c
from toolkit.parallel.linear import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    RowParallelLinear,
    sum_over_ranks,
)
from toolkit.parallel.region import Region, drops_activations
from toolkit.parallel.shard import Block, Shard, is_marked, mark, shard_of
from toolkit.parallel.stage import LayerElsewhere
from toolkit.parallel.vocabulary import split_embedding, split_head

_LINEAR = ("Linear", "Conv1D", "FalconLinear")
_SPLIT_HEADS = {"q_proj": tp.heads, "k_proj": tp.kv_heads, "v_proj": tp.kv_heads}


class TensorCut:
    """Splits one model over the ranks of `group`. Raises ModelError or LayoutError before anything is changed."""

    def __init__(
        self, model: PreTrainedModel, anatomy: Anatomy, group: dist.ProcessGroup, *, sequence_parallel: bool = False
    ) -> None:
        self.model, self.anatomy, self.group = model, anatomy, group
        self.config = model.config.get_text_config(decoder=True)
        self.plan = tp.find_plan(model.config.model_type, self.config)
        self.sequence_parallel = sequence_parallel
        self.dropout = drops_activations(model.config)
        self._check()

    def _check(self) -> None:
        size, family = self.group.size(), self.model.config.model_type
        reason = self.plan.needs(self.config, size)
        if reason is None and tp.heads(self.config) % size:
            reason = f"{tp.heads(self.config)} heads do not split"
        if reason is not None:
            raise LayoutError(f"tp={size} with {family}: {reason}. Choose another parallel.tp.")

    def layer(self, index: int, fill: Callable[[nn.Module], None] = lambda layer: None) -> None:
        """Split decoder layer `index` of the model; `fill` then gives what stays whole its values, if they are sources.

        Gradient hooks belong to a parameter object, so that must happen before they are set.
        """
        prefix = f"{self.anatomy.layers}.{index}"
        layer = self.anatomy.layer_list(self.model)[index]
        if isinstance(layer, LayerElsewhere):
            return
        regions: dict[str, Region] = {}
        for path, style in self.plan.styles.items():
            if style in tp.STYLES[:5] and _has(layer, path):
                parent = path.rpartition(".")[0]
                region = regions.setdefault(parent, self._region(gathers=style in (tp.GATHERED_COLUMN, tp.SPLIT_ROW)))
                self._replace(layer, path, f"{prefix}.{path}", style, region)
        fill(layer)
        for parent, region in regions.items():
            if parent:
                self._adapt_block(layer.get_submodule(parent), parent, region, self._behind(layer))
        if self.sequence_parallel:
            for parameter in self._outside(layer, regions):
                sum_over_ranks(parameter, self.group)
            self._split_sequence(index, layer)
        # Now, for the shapes are gone once ZeRO-3 has sharded the layer.
        mark_whole(layer, self.anatomy.tied, prefix=f"{prefix}.")

    def vocabulary(self, *, embeds: bool = True, done: Callable[[nn.Module], None] = lambda module: None) -> None:
        """Split embedding and head, where this model still has them, and mark what every rank holds whole.

        `embeds`: whether this pipeline stage looks tokens up, or has the embedding only for a tied head. `done` is
        called with each of the two once it is split.
        """
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        names = {id(module): name for name, module in self.model.named_modules()}
        tied = head is not None and getattr(embedding, "weight", None) is head.weight
        if isinstance(embedding, nn.Embedding) and "weight" in embedding._parameters:
            split_embedding(embedding, names[id(embedding)], self.group, is_idle=not embeds)
            done(embedding)
        if isinstance(head, nn.Linear) and "weight" in head._parameters:
            split_head(head, names[id(head)], self.group, tied_to=embedding.weight if tied else None)
            done(head)
        mark_whole(self.model, self.anatomy.tied)

    def whole(self) -> None:
        """Split everything."""
        for index in range(self.anatomy.count):
            self.layer(index)
        self.vocabulary()

    def _region(self, *, gathers: bool) -> Region:
        return Region(self.group, sequence_parallel=self.sequence_parallel, dropout=self.dropout, gathers=gathers)

    def _replace(self, layer: nn.Module, path: str, name: str, style: str, region: Region) -> None:
        parent_path, _, leaf = path.rpartition(".")
        parent = layer.get_submodule(parent_path)
        whole = getattr(parent, leaf)
        if type(whole).__name__ not in _LINEAR:
            raise ModelError(
                f"{self.model.config.model_type}: {name} is a {type(whole).__name__}, which tensor parallelism cannot "
                "split. Set parallel.tp=1."
            )
        features = whole.weight.shape[_dim(whole, outputs=style in (tp.COLUMN, tp.GATHERED_COLUMN, tp.PACKED_COLUMN))]
        blocks = self._blocks(path, leaf, style, features)
        setattr(parent, leaf, self._parallel(whole, blocks, name, style, region, enters=not parent_path))

    def _parallel(
        self, whole: nn.Module, blocks: list[Block], name: str, style: str, region: Region, *, enters: bool
    ) -> nn.Module:
        if style in (tp.ROW, tp.SPLIT_ROW):
            return RowParallelLinear(whole, blocks, name=name, region=region, split_input=style == tp.SPLIT_ROW)
        if len({block.is_shared(self.group.size()) for block in blocks}) > 1:
            return FusedColumnParallelLinear(whole, blocks, name=name, region=region, enters=enters)
        gather = style == tp.GATHERED_COLUMN
        return ColumnParallelLinear(whole, blocks, name=name, region=region, gather_output=gather, enters=enters)

    def _blocks(self, path: str, leaf: str, style: str, features: int) -> list[Block]:
        if path in self.plan.fused:
            return [Block(units=units, width=width) for units, width in self.plan.fused[path](self.config)]
        if style == tp.PACKED_COLUMN:
            return [Block(units=features // 2)] * 2
        units = _SPLIT_HEADS[leaf](self.config) if leaf in _SPLIT_HEADS and style == tp.COLUMN else features
        return [Block(units=units, width=features // units)]

    def _outside(self, layer: nn.Module, regions: Mapping[str, Region]) -> Iterator[nn.Parameter]:
        """Norms around the regions and biases behind them: with a split sequence, each rank sees only its part."""
        inside = {id(p) for parent in regions if parent for p in layer.get_submodule(parent).parameters()}
        behind = self._behind(layer)
        for parameter in layer.parameters():
            if is_marked(parameter):
                if not shard_of(parameter).is_split:
                    yield parameter
            elif id(parameter) not in inside or id(parameter) in behind:
                yield parameter

    def _behind(self, layer: nn.Module) -> set[int]:
        """The parameters of `layer` that the plan says to act behind a region."""
        return {id(parameter) for name, parameter in layer.named_parameters() if name in self.plan.behind}

    def _adapt_block(self, block: nn.Module, path: str, region: Region, behind: set[int]) -> None:
        """Let a block enter its region, and count its local heads. `behind`: parameters that act outside it."""
        block.register_forward_pre_hook(_enter(region, self.config, self.plan.per_head), with_kwargs=True)
        if region.gathers:
            return
        size = self.group.size()
        for attribute in self.plan.divided.get(path, ()):
            setattr(block, attribute, max(1, getattr(block, attribute) // size))
        if "num_key_value_groups" not in self.plan.divided.get(path, ()) and hasattr(block, "num_key_value_groups"):
            local_kv = max(1, tp.kv_heads(self.config) // size)
            block.__dict__["num_key_value_groups"] = tp.heads(self.config) // size // local_kv
        for parameter in block.parameters():
            if not is_marked(parameter) and id(parameter) not in behind:
                # Norms of single heads: each rank sees its own heads only.
                sum_over_ranks(parameter, self.group)

    def _split_sequence(self, index: int, layer: nn.Module) -> None:
        if index == 0:
            layer.register_forward_pre_hook(_scatter(self.group), with_kwargs=True)
        if index == self.anatomy.count - 1:
            layer.register_forward_hook(_gather(self.group))


def mark_whole(module: nn.Module, tied: Mapping[str, str], *, prefix: str = "") -> None:
    """Mark every parameter that has no shard yet as one that this rank holds whole. `prefix`: of the module's names."""
    for local_name, parameter in module.named_parameters():
        name = prefix + local_name
        if not is_marked(parameter):
            mark(parameter, Shard(name=tied.get(name, name), shape=tuple(parameter.shape)))


def _enter(region: Region, config: Any, per_head: tuple[str, ...]) -> Any:
    def hook(block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        for name in per_head:
            if isinstance(keywords.get(name), torch.Tensor):
                keywords[name] = _own_heads(keywords[name], tp.heads(config), region.group)
        return _with_hidden(arguments, keywords, lambda hidden: region.enter(hidden, block))

    return hook


def _scatter(group: dist.ProcessGroup) -> Any:
    def hook(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return _with_hidden(arguments, keywords, lambda hidden: c.scatter_to_tensor_ranks(hidden, group, dim=1))

    return hook


def _gather(group: dist.ProcessGroup) -> Any:
    def hook(layer: nn.Module, arguments: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, tuple | list):
            return (c.gather_from_tensor_ranks(result[0], group, dim=1), *result[1:])
        return c.gather_from_tensor_ranks(result, group, dim=1)

    return hook


def _with_hidden(arguments: tuple[Any, ...], keywords: dict[str, Any], change: Any) -> Any:
    if arguments:
        return (change(arguments[0]), *arguments[1:]), keywords
    return arguments, keywords | {"hidden_states": change(keywords["hidden_states"])}


def _own_heads(x: torch.Tensor, heads: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, heads, .., ..] or [b * heads, .., ..] -> this rank's heads. A mask that all heads share stays as it is."""
    each = heads // group.size()
    start = group.rank() * each
    if x.dim() == 4:
        return x[:, start : start + each] if x.shape[1] == heads else x
    own: torch.Tensor = x.unflatten(0, (-1, heads))[:, start : start + each].flatten(0, 1)
    return own


def _dim(linear: nn.Module, *, outputs: bool) -> int:
    """Which dimension of the weight holds the outputs (or inputs): Linear is [o, i], Conv1D [i, o]."""
    return int(outputs == (type(linear).__name__ == "Conv1D"))


def _has(layer: nn.Module, path: str) -> bool:
    """Whether this layer has the module: plans name what some layers or configs leave out."""
    try:
        return isinstance(layer.get_submodule(path), nn.Module)
    except AttributeError:
        return False
