"""WeightMap: how another program stores the parameters of a Hugging Face model, in both directions.

A stored tensor may hold a parameter as it is, transposed, or padded; several parameters fused into one (query, key and
value; gate and up); or a part of one (an expert, or its gate). Each `StoredWeight` says which parameters are in one box
of a stored tensor, and two functions that are each other's inverse: `split` on the way in, `fuse` on the way out. All
of them only move values, so that a round trip keeps every bit, of weights as of optimizer states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """A parameter, or a part of it that is stored by itself."""

    name: str
    index: tuple[int, ...] = ()
    """The place of the part in the first dimensions of the parameter: an expert. Empty for all of it."""
    rows: range | None = None
    """Consecutive rows of what is at `index`: the gate of an expert. None for all rows."""

    @property
    def place(self) -> tuple[int | slice, ...]:
        """The index of the part in the parameter."""
        return self.index if self.rows is None else (*self.index, slice(self.rows.start, self.rows.stop))

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a parameter whose shape is `parameter`."""
        if self.rows is None:
            return parameter[len(self.index) :]
        return (len(self.rows), *parameter[len(self.index) + 1 :])


def _only(values: Tensors) -> torch.Tensor:
    (value,) = values
    return value


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """The box at `index` of the first dimensions of a stored tensor, and what is in it."""

    key: str
    parts: tuple[WeightPart, ...]
    index: tuple[int, ...] = ()
    split: Callable[[torch.Tensor], Tensors] = lambda value: [value]
    fuse: Callable[[Tensors], torch.Tensor] = _only
    alias: str = ""
    """Another key under which the program may store it: an older version, or another kind of layer."""


class WeightMap:
    """Stored weights of a model, which cover each of its parameters once. `program`: who stores them so."""

    def __init__(self, program: str, weights: Sequence[StoredWeight]) -> None:
        self.program = program
        self.weights = tuple(weights)
        self._of: dict[str, list[tuple[StoredWeight, int]]] = {}
        for weight in self.weights:
            for number, part in enumerate(weight.parts):
                self._of.setdefault(part.name, []).append((weight, number))

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self._of)

    def leading_sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the first dimensions of each stored tensor, in which its boxes have an index, by key."""
        sizes: dict[str, tuple[int, ...]] = {}
        for weight in self.weights:
            before = sizes.get(weight.key, tuple(0 for _ in weight.index))
            sizes[weight.key] = tuple(max(size, place + 1) for size, place in zip(before, weight.index, strict=True))
        return sizes

    def stored(self, name: str) -> list[StoredWeight]:
        """The stored weights that hold values of a parameter."""
        return [weight for weight, _ in self._of[name]]

    def read(self, name: str, shape: tuple[int, ...], stored: Callable[[StoredWeight], torch.Tensor]) -> torch.Tensor:
        """A full parameter in fp32, out of the stored weights that `stored` reads. Raises ShapeError."""
        out: torch.Tensor | None = None
        for weight, number in self._of[name]:
            part = weight.parts[number]
            box = stored(weight)
            try:
                value = weight.split(box)[number]
            except RuntimeError:
                raise ShapeError(weight.key, tuple(box.shape), name, shape) from None
            if tuple(value.shape) != part.shape(shape):
                raise ShapeError(weight.key, tuple(box.shape), name, shape)
            if not part.place:
                return value.to(torch.float32, copy=True).contiguous()
            out = torch.empty(shape, dtype=torch.float32) if out is None else out
            out[part.place].copy_(value)
        assert out is not None
        return out


class ShapeError(ValueError):
    """A stored tensor whose shape is not that of the parameters that it should hold."""

    def __init__(self, key: str, stored: tuple[int, ...], name: str, shape: tuple[int, ...]) -> None:
        super().__init__(f"{key} {list(stored)} cannot hold {name} {list(shape)}")


def as_named(parameters: Sequence[str], program: str) -> WeightMap:
    """The map of a program that keeps Hugging Face's names and shapes."""
    return WeightMap(program, [StoredWeight(key=name, parts=(WeightPart(name=name),)) for name in parameters])


def split_gated(value: torch.Tensor) -> Tensors:
    """[2f, ...] -> gate [f, ...] and up [f, ...]."""
    return value.chunk(2)


def split_heads(value: torch.Tensor, *, groups: int, per_group: int, width: int) -> Tensors:
    """Megatron's fused [groups (per_group + 2) width, ...] -> query, key and value, each with its heads in order.

    A group has the query heads that share one key and value head: first these, then the key, then the value.
    """
    rest = value.shape[1:]
    heads = value.view(groups, per_group + 2, width, *rest)
    return [
        heads[:, :per_group].reshape(-1, *rest),
        heads[:, per_group].reshape(-1, *rest),
        heads[:, per_group + 1].reshape(-1, *rest),
    ]


def fuse_heads(values: Tensors, *, groups: int, per_group: int, width: int) -> torch.Tensor:
    """The inverse of `split_heads`."""
    query, key, value = values
    rest = query.shape[1:]
    heads = torch.cat(
        [
            query.reshape(groups, per_group, width, *rest),
            key.reshape(groups, 1, width, *rest),
            value.reshape(groups, 1, width, *rest),
        ],
        dim=1,
    )
    return heads.reshape(-1, *rest)


def halves_to_pairs(value: torch.Tensor, *, heads: int) -> torch.Tensor:
    """Rows of a head from Hugging Face's rotary order (first halves, then second halves) to pairs of neighbors."""
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def pairs_to_halves(value: torch.Tensor, *, heads: int) -> torch.Tensor:
    """The inverse of `halves_to_pairs`."""
    return value.view(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def padded(value: torch.Tensor, rows: int) -> torch.Tensor:
    """[v, h] -> [rows, h], with zeros below."""
    if value.shape[0] == rows:
        return value
    out = value.new_zeros((rows, *value.shape[1:]))
    out[: value.shape[0]].copy_(value)
    return out


Shapes = Mapping[str, tuple[int, ...]]
Config = Any
"""A PretrainedConfig of transformers."""
