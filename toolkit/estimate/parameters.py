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
            is_whole = inner and self.name.endswith("down_proj_bias")
            return (self.numel if is_whole else self.numel // (tp * ep),)
        if tp == 1 or self.dim is None:
            return (self.numel,)
        features = self.shape[self.dim]
        other = self.numel // features
        if self.is_vocabulary:
            return (-(-features // tp) * other,)
        blocks = self.blocks or ((features, 1),)
        parts: list[int] = []
        kind = None
        for units, width in blocks:
            shared = units % tp != 0
            local = (width if shared else units // tp * width) * other
            if shared == kind:
                parts[-1] += local
            else:
                parts.append(local)
            kind = shared
        return tuple(parts)

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

        `ep`, `inner`: as of `local_numels`. `by_decay`: whether the optimizer has a group with and one without weight
        decay, or one for all. `by_matrix`: whether matrices of decoder layers are apart from both. `by_copies`: whether
        those of them that tensor-parallel ranks have copies of are. Experts that replicas share out have groups of
        their own.
        """
        shards = (tp, ep, inner)
        kinds: tuple[_GroupKind, ...]
        if by_matrix:
            copies = (False, True) if by_copies and tp > 1 else (None,)
            kinds = (
                *(_GroupKind(decays=True, is_hidden=True, is_copied=is_copied) for is_copied in copies),
                _GroupKind(decays=True, is_hidden=False),
                _GroupKind(decays=False, is_hidden=False),
            )
        elif by_decay:
            kinds = (_GroupKind(decays=True), _GroupKind(decays=False))
        else:
            kinds = (_GroupKind(),)
        if ep > 1:
            kinds = tuple(replace(kind, is_experts=is_experts) for kind in kinds for is_experts in (False, True))
        return _rank_parameters(self, self.layers if layers is None else layers, first, last, shards, kinds)

    def largest_matrix(self, layers: Iterable[int], *, tp: int) -> int:
        """Return the elements of the largest matrix of a linear layer of these decoder layers, on one rank."""
        kinds = {self.pattern[index] for index in layers}
        matrices = (parameter for kind in kinds for parameter in self.kinds[kind] if parameter.is_linear)
        return max((numel for matrix in matrices for numel in matrix.local_numels(tp, 1)), default=0)

    def product_widths(self, layers: Iterable[int], *, tp: int) -> int:
        """Return the features of the inputs and outputs of all linear layers of these decoder layers, on one rank."""
        widths = [
            sum(
                size // tp if dim == parameter.dim else size
                for parameter in kind
                if parameter.is_linear
                for dim, size in enumerate(parameter.shape)
            )
            for kind in self.kinds
        ]
        return sum(widths[self.pattern[index]] for index in layers)

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
        """Whether a parameter outside the decoder layers is."""
        return self._has(parameter) and self.is_hidden is not True

    def _has(self, parameter: Parameter) -> bool:
        is_copied = parameter.dim is None and not parameter.is_experts
        return (
            parameter.trainable == self.trains
            and self.decays in (None, parameter.decays)
            and self.is_copied in (None, is_copied)
            and self.is_experts in (None, parameter.is_experts)
        )


@lru_cache(maxsize=4096)
def _rank_parameters(
    model: ModelParameters,
    layers: Sequence[int],
    first: bool,
    last: bool,
    shards: tuple[int, int, bool],
    group_kinds: tuple[_GroupKind, ...],
) -> RankParameters:
    """Return a rank's part of a model, whose optimizer has groups of these kinds."""
    tp, ep, inner = shards

    def numels(parameters: Iterable[Parameter], wanted: Callable[[Parameter], bool]) -> tuple[int, ...]:
        return tuple(
            n for parameter in parameters if wanted(parameter) for n in parameter.local_numels(tp, ep, inner=inner)
        )

    def is_here(parameter: Parameter) -> bool:
        return parameter.is_here(first=first, last=last)

    kinds = [model.pattern[index] for index in layers]
    runs = [(kind, len(list(same))) for kind, same in groupby(kinds)]
    ends = (
        tuple(parameter for parameter in model.front if is_here(parameter)),
        tuple(parameter for parameter in model.back if is_here(parameter)),
    )

    def group_of(kind: _GroupKind) -> ParameterGroup:
        first_end, last_end = (numels(end, kind.has_outside) for end in ends)
        inside = [(numels(model.kinds[of_layer], kind.has_inside), times) for of_layer, times in runs]
        return ParameterGroup(
            runs=((first_end, 1), *inside, (last_end, 1)),
            ep=ep if kind.is_experts else 1,
            is_hidden=kind.is_hidden is True,
        )

    frozen = _GroupKind(trains=False)
    groups = [group_of(kind) for kind in group_kinds]
    outside = max(sum(sum(numels(end, kind.has_outside)) for end in ends) for kind in (*group_kinds, frozen))

    def of_kinds(wanted: Callable[[Parameter], bool]) -> tuple[int, ...]:
        sums = {kind: sum(numels(model.kinds[kind], wanted)) for kind in {*kinds}}
        return tuple(sums[kind] for kind in kinds)

    trained = of_kinds(lambda parameter: parameter.trainable)
    first_trained = next((at for at, size in enumerate(trained) if size), len(layers))
    reached = 0 if any(parameter.trainable for parameter in model.front if is_here(parameter)) else first_trained
    linear = of_kinds(lambda parameter: parameter.is_linear)
    matrices = tuple(size if at >= reached else 0 for at, size in enumerate(linear))
    head = numels(model.outside, lambda parameter: parameter.is_head and parameter.is_linear) if last else ()
    owners = {owner for parameter in model.outside if not is_here(parameter) for owner in parameter.owners}
    held = [parameter for parameter in model.outside if is_here(parameter)]
    held += [parameter for kind in kinds for parameter in model.kinds[kind]]
    late = model.front if first else ()
    early = [parameter for parameter in held if parameter.trainable and parameter not in late]
    zero_biases = 0
    if inner:
        zero_biases = sum(
            of_kinds(lambda parameter: parameter.is_experts and parameter.name.endswith("down_proj_bias"))
        )
    return RankParameters(
        groups=tuple(group for group in groups if group.count),
        frozen=group_of(frozen),
        layer_numels=of_kinds(lambda parameter: True),
        outside=outside,
        buffer_bytes=model.buffer_bytes + sum(model.layer_buffer_bytes[kind] for kind in kinds),
        matrices=sum(matrices) + sum(head),
        layer_matrices=matrices,
        trained_layers=trained,
        trained_matrices=of_kinds(lambda parameter: parameter.is_linear and parameter.trainable),
        hidden_matrices=tuple(
            HiddenMatrices(
                numel=prod(parameter.shape[-2:]),
                side=min(parameter.shape[-2:]),
                count=prod(parameter.shape[:-2]),
            )
            for kind in kinds
            for parameter in model.kinds[kind]
            if parameter.trainable and is_matrix(parameter.name, parameter.shape)
        ),
        factors=sum(parameter.factors for parameter in held if parameter.trainable),
        largest_early=max(numels(early, lambda parameter: True), default=0),
        zero_biases=zero_biases,
        placeholders=len(owners),
    )
