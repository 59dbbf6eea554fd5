"""ModelParameters: every parameter of a model, and what each rank holds of them in any layout, without torch.

`toolkit.recorder.parameters` lists them from the modules that transformers builds, and how tensor parallelism shards
them from the plan that training follows. Decoder layers that are alike are listed once.

Blocks are runs of features along the sharded dimension: heads of some width, or single columns. A rank holds an equal
share of each block; where there are fewer units than ranks (key-value heads), neighboring ranks share one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from typing import Any, Self

from toolkit.estimate.rank_parameters import HiddenMatrices, ParameterGroup, RankParameters
from toolkit.models.hidden_matrices import is_matrix
from toolkit.models.tensor_plan import Blocks


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model."""

    name: str
    """Hugging Face's name; inside a decoder layer, what follows the layer's index."""
    shape: tuple[int, ...]
    dim: int | None = None
    """The dimension that tensor parallelism shards; None if it is replicated."""
    blocks: Blocks = ()
    """Blocks of units that the sharded dimension consists of; () for columns without units."""
    is_vocabulary: bool = False
    """Whether the rows are tokens, so that they are padded to a multiple of the ranks."""
    is_head: bool = False
    """Whether the LM head multiplies by the parameter."""
    first: bool = True
    """Whether the first pipeline stage has the parameter, if it is outside the layers."""
    last: bool = True
    """Whether the last stage has the parameter, if it is outside the layers."""
    owners: tuple[str, ...] = ()
    """Modules that have the parameter, if it is outside the layers; several if it is tied."""
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @property
    def factors(self) -> int:
        """Rows and columns of all matrices in it; of a vector its elements."""
        return sum(self.numel // size for size in self.shape[-2:]) if self.decays else self.numel

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it, which puts it into another group of the optimizer: it is a matrix."""
        return len(self.shape) >= 2

    @property
    def is_experts(self) -> bool:
        """Whether it holds all experts of a layer, by its first dimension: transformers' experts interface."""
        return "experts" in self.name.split(".")[-2:-1] and len(self.shape) > 1

    @property
    def is_output_bias(self) -> bool:
        """Whether it is the bias of the output of an MLP or of experts."""
        return self.name.endswith("down_proj_bias")

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a linear layer or of the embedding, not all experts' matrices or biases."""
        return len(self.shape) == 2 and not self.is_experts

    def is_here(self, *, first: bool, last: bool) -> bool:
        """Whether a pipeline stage that is the first and the last one, or not, has it."""
        return (first and self.first) or (last and self.last)

    def local_numels(self, tp: int, ep: int = 1, *, inner: bool = False) -> tuple[int, ...]:
        """Elements on one of `tp` ranks. Several numbers if tensor parallelism makes several parameters of
        one: it does so if a fused projection has blocks that are sharded and others that are replicated.

        `ep` ranks share out whole experts, and the tensor-parallel ranks of each those that it has; or, `inner`, shard
        every expert's intermediate dimension, which the bias of its output does not have.
        """
        if self.is_experts:
            is_whole = inner and self.is_output_bias
            return (self.numel if is_whole else self.numel // (tp * ep),)
        if tp == 1 or self.dim is None:
            return (self.numel,)
        features = self.shape[self.dim]
        feature_numel = self.numel // features
        if self.is_vocabulary:
            return (-(-features // tp) * feature_numel,)
        blocks = self.blocks if self.blocks else ((features, 1),)
        numels: list[int] = []
        before_is_replicated: bool | None = None
        for units, width in blocks:
            # Where there are fewer units than ranks, neighboring ranks share one.
            is_replicated = units % tp != 0
            local_units = 1 if is_replicated else units // tp
            local_numel = local_units * width * feature_numel
            if is_replicated == before_is_replicated:
                numels[-1] += local_numel
            else:
                numels.append(local_numel)
            before_is_replicated = is_replicated
        return tuple(numels)

    def product_width(self, tp: int) -> int:
        """Return the input and output features of a linear layer with this matrix, on one of `tp` ranks."""
        return sum(size // tp if dim == self.dim else size for dim, size in enumerate(self.shape))

    def encoded(self) -> dict[str, Any]:
        """Return the fields as JSON has them, without those that have their default."""
        return {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name)}

    @classmethod
    def decoded(cls, content: Mapping[str, Any]) -> Self:
        """Read what `encoded` returns."""
        blocks = tuple((units, width) for units, width in content.get("blocks", ()))
        lists = {"shape": tuple(content["shape"]), "owners": tuple(content.get("owners", ())), "blocks": blocks}
        return cls(**{**content, **lists})


_DEFAULTS = {
    name: value for name, value in asdict(Parameter(name="", shape=())).items() if name not in ("name", "shape")
}


@dataclass(frozen=True, kw_only=True)
class PartFlops:
    """FLOPs of the forward pass of a part of a model for one token, which depend on the positions s of its sample.

    A pair (constant, slope) stands for constant + slope * s: attention's products grow with the positions.
    """

    flops: tuple[float, float]
    """All FLOPs, as (constant, slope)."""
    with_weights: tuple[float, float]
    """FLOPs in products of activations with weights, as (constant, slope)."""

    def flops_at(self, positions: int) -> float:
        """Return all FLOPs of a token in a sample of so many positions."""
        constant, slope = self.flops
        return constant + slope * positions

    def flops_with_weights_at(self, positions: int) -> float:
        """Return the FLOPs of a token in products of activations with weights, in a sample of so many positions."""
        constant, slope = self.with_weights
        return constant + slope * positions


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParameters:
    """The parameters of one model: a front, the decoder layers, and a back, in the order of Hugging Face's modules.

    Compared by identity: one object stands for one model.
    """

    front: tuple[Parameter, ...]
    kinds: tuple[tuple[Parameter, ...], ...]
    """The parameters of a decoder layer of each kind."""
    pattern: tuple[int, ...]
    """The kind of every layer."""
    back: tuple[Parameter, ...]
    buffer_bytes: int
    """Buffers outside the layers: every pipeline stage has them."""
    layer_buffer_bytes: tuple[int, ...]
    """Bytes of buffers of a layer of each kind."""
    flops: tuple[PartFlops, ...]
    """FLOPs of what runs before the layers, of a layer of each kind, and of the head."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the config as transformers reads it, under the names of ModelShape."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter of the whole model once, with its layer's index in its name."""
        yield from self.front
        for index, kind in enumerate(self.pattern):
            for parameter in self.kinds[kind]:
                yield replace(parameter, name=f"{index}.{parameter.name}")
        yield from self.back

    @property
    def layers(self) -> range:
        """All decoder layers."""
        return range(len(self.pattern))

    @cached_property
    def outside(self) -> tuple[Parameter, ...]:
        """Parameters that are in no decoder layer."""
        return (*self.front, *self.back)

    @cached_property
    def layer_numels(self) -> tuple[int, ...]:
        """Elements of a layer of each kind."""
        return tuple(sum(parameter.numel for parameter in kind) for kind in self.kinds)

    @property
    def numel(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(p.numel for p in self.outside) + sum(self.layer_numels[kind] for kind in self.pattern)

    def rank_parameters(
        self,
        *,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
        tp: int = 1,
        ep: int = 1,
        inner: bool = False,
        by_decay: bool = True,
        by_matrix: bool = False,
        by_copies: bool = False,
    ) -> RankParameters:
        """Return a rank's part of a stage with these `layers` (None: all), which is the `first` and the `last` or not.

        `ep`, `inner`: as in `local_numels`. `by_decay`: whether the optimizer has a group with and one without weight
        decay, or one for all. `by_matrix`: whether matrices of decoder layers are apart from both. `by_copies`: whether
        those of them that tensor-parallel ranks have copies of are. Experts that replicas share out have groups of
        their own.
        """
        group_kinds = _group_kinds(by_decay=by_decay, by_matrix=by_matrix, by_copies=by_copies and tp > 1)
        if ep > 1:
            group_kinds = [replace(kind, is_experts=is_experts) for kind in group_kinds for is_experts in (False, True)]
        return _rank_parameters(
            self,
            self.layers if layers is None else layers,
            first=first,
            last=last,
            sharding=_Sharding(tp=tp, ep=ep, inner=inner),
            group_kinds=tuple(group_kinds),
        )

    def largest_matrix(self, layers: Iterable[int], *, tp: int) -> int:
        """Return the elements of the largest matrix of a linear layer of these decoder layers, on one rank."""
        largest = 0
        for kind in {self.pattern[index] for index in layers}:
            for parameter in self.kinds[kind]:
                if parameter.is_linear:
                    largest = max(largest, *parameter.local_numels(tp, 1))
        return largest

    def product_widths(self, layers: Iterable[int], *, tp: int) -> int:
        """Return the features of the inputs and outputs of all linear layers of these decoder layers, on one rank."""
        widths_of_kind = [
            sum(parameter.product_width(tp) for parameter in kind if parameter.is_linear) for kind in self.kinds
        ]
        return sum(widths_of_kind[self.pattern[index]] for index in layers)

    def encoded(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return asdict(self) | {
            "front": [parameter.encoded() for parameter in self.front],
            "kinds": [[parameter.encoded() for parameter in kind] for kind in self.kinds],
            "back": [parameter.encoded() for parameter in self.back],
        }

    @classmethod
    def decoded(cls, content: Mapping[str, Any]) -> Self:
        """Read what `encoded` returns."""

        def listed(parameters: Iterable[Mapping[str, Any]]) -> tuple[Parameter, ...]:
            return tuple(map(Parameter.decoded, parameters))

        return cls(
            front=listed(content["front"]),
            kinds=tuple(map(listed, content["kinds"])),
            pattern=tuple(content["pattern"]),
            back=listed(content["back"]),
            buffer_bytes=content["buffer_bytes"],
            layer_buffer_bytes=tuple(content["layer_buffer_bytes"]),
            flops=tuple(PartFlops(**{name: tuple(pair) for name, pair in part.items()}) for part in content["flops"]),
            facts=content["facts"],
        )


@dataclass(frozen=True, kw_only=True)
class _GroupKind:
    """What the parameters of one group of the optimizer have in common; None: it makes no difference."""

    trains: bool = True
    decays: bool | None = None
    is_hidden: bool | None = None
    """Whether they are matrices of decoder layers, of an optimizer that has those apart (Muon)."""
    is_copied: bool | None = None
    """Whether tensor-parallel ranks have copies of them."""
    is_experts: bool | None = None

    def has_inside(self, parameter: Parameter) -> bool:
        """Whether a parameter of a decoder layer is in the group."""
        return self._has(parameter) and self.is_hidden in (None, is_matrix(parameter.name, parameter.shape))

    def has_outside(self, parameter: Parameter) -> bool:
        """Whether a parameter outside the decoder layers is in the group."""
        return self._has(parameter) and self.is_hidden is not True

    def _has(self, parameter: Parameter) -> bool:
        """Whether a parameter has what does not depend on its place."""
        is_copied = parameter.dim is None and not parameter.is_experts
        return (
            parameter.trainable == self.trains
            and self.decays in (None, parameter.decays)
            and self.is_copied in (None, is_copied)
            and self.is_experts in (None, parameter.is_experts)
        )


def _group_kinds(*, by_decay: bool, by_matrix: bool, by_copies: bool) -> list[_GroupKind]:
    """Return the kinds of an optimizer's groups, in its order. The arguments are those of `rank_parameters`."""
    if by_matrix:
        matrices = _GroupKind(decays=True, is_hidden=True)
        if by_copies:
            apart = [replace(matrices, is_copied=False), replace(matrices, is_copied=True)]
        else:
            apart = [matrices]
        return [*apart, _GroupKind(decays=True, is_hidden=False), _GroupKind(decays=False, is_hidden=False)]
    if by_decay:
        return [_GroupKind(decays=True), _GroupKind(decays=False)]
    return [_GroupKind()]


@dataclass(frozen=True, kw_only=True)
class _Sharding:
    """How layers are split: over tensor-parallel ranks, and experts over those that share them out."""

    tp: int
    ep: int
    inner: bool
    """Whether tensor parallelism shards the intermediate dimension of every expert."""

    def numels(self, parameters: Iterable[Parameter]) -> tuple[int, ...]:
        """Return the elements of a rank's part of each of these parameters."""
        sizes: list[int] = []
        for parameter in parameters:
            sizes += parameter.local_numels(self.tp, self.ep, inner=self.inner)
        return tuple(sizes)


class _StageParameters:
    """The parameters of one pipeline stage of a model, and a rank's part of them."""

    def __init__(
        self, model: ModelParameters, layers: Sequence[int], *, first: bool, last: bool, sharding: _Sharding
    ) -> None:
        self.model = model
        self.sharding = sharding
        self.layer_kinds = [model.pattern[index] for index in layers]
        """The kind of each decoder layer of the stage."""
        self.front = [parameter for parameter in model.front if parameter.is_here(first=first, last=last)]
        self.back = [parameter for parameter in model.back if parameter.is_here(first=first, last=last)]
        self.is_first = first
        self.is_last = last

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters of the stage: those outside the layers first."""
        layers = [parameter for kind in self.layer_kinds for parameter in self.model.kinds[kind]]
        return [*self.front, *self.back, *layers]

    def group(self, kind: "_GroupKind") -> ParameterGroup:
        """Return the optimizer group of one kind, in the order of the model. Layers that are alike are one run."""
        runs = [(self._outside(self.front, kind), 1)]
        for layer_kind, alike in groupby(self.layer_kinds):
            inside = filter(kind.has_inside, self.model.kinds[layer_kind])
            runs.append((self.sharding.numels(inside), len(list(alike))))
        runs.append((self._outside(self.back, kind), 1))
        return ParameterGroup(
            runs=tuple(runs),
            ep=self.sharding.ep if kind.is_experts else 1,
            is_hidden=kind.is_hidden is True,
        )

    def outside_numel(self, kind: "_GroupKind") -> int:
        """Return the elements outside the layers that are in the group of one kind."""
        return sum(self._outside(self.front, kind)) + sum(self._outside(self.back, kind))

    def _outside(self, parameters: Iterable[Parameter], kind: "_GroupKind") -> tuple[int, ...]:
        return self.sharding.numels(filter(kind.has_outside, parameters))

    def layer_numels(self, is_counted: Callable[[Parameter], bool]) -> tuple[int, ...]:
        """Return the elements of each decoder layer in the parameters that are counted."""
        numel_of_kind = {
            kind: sum(self.sharding.numels(filter(is_counted, self.model.kinds[kind])))
            for kind in dict.fromkeys(self.layer_kinds)
        }
        return tuple(numel_of_kind[kind] for kind in self.layer_kinds)

    def cast_numels(self, trained_layers: Sequence[int]) -> tuple[int, ...]:
        """Return, for each decoder layer, the elements of linear layers' matrices that autocast casts.

        Layers in front of all that trains have none, because no gradient reaches them.
        """
        linear = self.layer_numels(lambda parameter: parameter.is_linear)
        if any(parameter.trainable for parameter in self.front):
            return linear
        cast = []
        reached = False
        for linear_numel, trained_numel in zip(linear, trained_layers, strict=True):
            if trained_numel > 0:
                reached = True
            cast.append(linear_numel if reached else 0)
        return tuple(cast)

    def head_numel(self) -> int:
        """Return the elements of the LM head's matrix, on the last stage."""
        if not self.is_last:
            return 0
        head = (parameter for parameter in self.model.outside if parameter.is_head and parameter.is_linear)
        return sum(self.sharding.numels(head))

    def hidden_matrices(self) -> tuple[HiddenMatrices, ...]:
        """Return the matrices of decoder layers that train, before tensor parallelism."""
        matrices = []
        for kind in self.layer_kinds:
            for parameter in self.model.kinds[kind]:
                if parameter.trainable and is_matrix(parameter.name, parameter.shape):
                    rows, columns = parameter.shape[-2:]
                    count = prod(parameter.shape[:-2])
                    matrices.append(HiddenMatrices(numel=rows * columns, side=min(rows, columns), count=count))
        return tuple(matrices)

    def largest_early(self) -> int:
        """Return the elements of the largest parameter whose gradient is complete before the backward pass ends."""
        late = self.model.front if self.is_first else ()
        early = [parameter for parameter in self.parameters if parameter.trainable and parameter not in late]
        return max(self.sharding.numels(early), default=0)

    def zero_bias_numel(self) -> int:
        """Return the elements of buffers in the place of experts' biases, where ranks' outputs are partial sums."""
        if not self.sharding.inner:
            return 0
        return sum(self.layer_numels(lambda parameter: parameter.is_experts and parameter.is_output_bias))

    def placeholders(self) -> int:
        """Count the modules outside the layers whose parameters are on another stage."""
        here = {*self.front, *self.back}
        elsewhere = [parameter for parameter in self.model.outside if parameter not in here]
        return len({owner for parameter in elsewhere for owner in parameter.owners})


@lru_cache(maxsize=4096)
def _rank_parameters(
    model: ModelParameters,
    layers: Sequence[int],
    *,
    first: bool,
    last: bool,
    sharding: _Sharding,
    group_kinds: tuple[_GroupKind, ...],
) -> RankParameters:
    """Return a rank's part of a model, whose optimizer has groups of these kinds."""
    stage = _StageParameters(model, layers, first=first, last=last, sharding=sharding)
    frozen = _GroupKind(trains=False)
    groups = [stage.group(kind) for kind in group_kinds]
    trained_layers = stage.layer_numels(lambda parameter: parameter.trainable)
    layer_matrices = stage.cast_numels(trained_layers)
    return RankParameters(
        groups=tuple(group for group in groups if group.count),
        frozen=stage.group(frozen),
        layer_numels=stage.layer_numels(lambda parameter: True),
        outside=max(stage.outside_numel(kind) for kind in (*group_kinds, frozen)),
        buffer_bytes=model.buffer_bytes + sum(model.layer_buffer_bytes[kind] for kind in stage.layer_kinds),
        matrices=sum(layer_matrices) + stage.head_numel(),
        layer_matrices=layer_matrices,
        trained_layers=trained_layers,
        trained_matrices=stage.layer_numels(lambda parameter: parameter.is_linear and parameter.trainable),
        hidden_matrices=stage.hidden_matrices(),
        factors=sum(parameter.factors for parameter in stage.parameters if parameter.trainable),
        largest_early=stage.largest_early(),
        zero_biases=stage.zero_bias_numel(),
        placeholders=stage.placeholders(),
    )
