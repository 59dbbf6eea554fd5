"""Architecture: every parameter of a model, read from its config.json without torch or transformers.

Which modules a family has stands in its FamilySpec; the tests compare the result with the modules of transformers 5.23,
name by name. `ModelShape` reads dense decoders, and refuses experts by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from toolkit.estimate.parameters.layer_parameters import layer_parameters, norm
from toolkit.estimate.parameters.model_config import ModelConfig
from toolkit.estimate.parameters.parameter import Parameter, ParameterGroup, RankParameters
from toolkit.models.shape import ModelShape

_WITHOUT_WEIGHT = ("layer_fp32", "rms_bare")
"""Norms without parameters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """The parameters of one model: a front, the decoder layers, and a back, in the order of Hugging Face's modules.

    Compared by identity: one object stands for one model.
    """

    shape: ModelShape
    front: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    back: tuple[Parameter, ...]
    buffer_bytes: int
    """Buffers outside the layers: every pipeline stage has them."""
    layer_buffer_bytes: int
    rotary_flops: int
    """Of one token's rotary angles, which are computed in front of the layers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The parameters of the model that Hugging Face would build. Raises ModelError for what it cannot read."""
        model = ModelConfig.read(config)
        return cls(
            shape=model.shape,
            front=tuple(_front(model)),
            layer=tuple(layer_parameters(model)),
            back=tuple(_back(model)),
            buffer_bytes=_model_buffer_bytes(model),
            layer_buffer_bytes=_layer_buffer_bytes(model),
            rotary_flops=_rotary_flops(model),
        )

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter of the whole model once, with its layer's index in its name."""
        yield from self.front
        for index in range(self.shape.layers):
            for parameter in self.layer:
                yield replace(parameter, name=f"{index}.{parameter.name}")
        yield from self.back

    @property
    def numel(self) -> int:
        """Parameters of the whole model, tied ones once."""
        outside = sum(parameter.numel for parameter in (*self.front, *self.back))
        return outside + self.shape.layers * sum(parameter.numel for parameter in self.layer)

    def rank_parameters(
        self, *, layers: int, first: bool = True, last: bool = True, tp: int = 1, by_decay: bool = True
    ) -> RankParameters:
        """What a rank holds of a stage with `layers` decoder layers, which is the `first` and the `last` one or not.

        `by_decay`: whether the optimizer has a group with and one without weight decay, or one for all.
        """
        return _rank_parameters(self, layers, first, last, tp, by_decay)


@lru_cache(maxsize=4096)
def _rank_parameters(
    architecture: Architecture, layers: int, first: bool, last: bool, tp: int, by_decay: bool
) -> RankParameters:
    def numels(parameters: tuple[Parameter, ...], decays: bool | None) -> tuple[int, ...]:
        return tuple(
            numel
            for parameter in parameters
            if _is_here(architecture, parameter, first=first, last=last)
            and (decays is None or parameter.decays == decays)
            for numel in parameter.local_numels(tp)
        )

    groups = (
        ParameterGroup(
            front=numels(architecture.front, decays),
            layer=numels(architecture.layer, decays),
            layers=layers,
            back=numels(architecture.back, decays),
        )
        for decays in ((True, False) if by_decay else (None,))
    )
    return RankParameters(
        groups=tuple(group for group in groups if group.count),
        layers=layers,
        layer_numel=sum(numels(architecture.layer, None)),
        buffer_bytes=architecture.buffer_bytes + layers * architecture.layer_buffer_bytes,
        matrices=sum(numels(architecture.layer, True)) * layers
        + sum(numels(_head(architecture), True) if last else ()),
        hidden_matrices=tuple((one.numel, min(one.shape)) for one in architecture.layer if one.decays),
        placeholders=_placeholders(architecture, first=first, last=last),
    )


def _head(architecture: Architecture) -> tuple[Parameter, ...]:
    """What the head multiplies by."""
    outside = architecture.front if architecture.shape.tied else architecture.back
    return tuple(parameter for parameter in outside if parameter.is_vocabulary)


def _placeholders(architecture: Architecture, *, first: bool, last: bool) -> int:
    """Modules outside the layers of which this stage lacks a parameter."""
    lacking = {
        parameter.name.rpartition(".")[0]
        for parameter in (*architecture.front, *architecture.back)
        if not _is_here(architecture, parameter, first=first, last=last)
    }
    if architecture.shape.tied and not (first or last):
        lacking.add("lm_head")
    return len(lacking)


def _is_here(architecture: Architecture, parameter: Parameter, *, first: bool, last: bool) -> bool:
    """Whether a stage holds the parameter. The last stage also holds an embedding that is its head."""
    is_head = architecture.shape.tied and parameter.is_vocabulary
    return {"layer": True, "first": first or (last and is_head), "last": last}[parameter.place]


def _front(m: ModelConfig) -> Iterator[Parameter]:
    s, rules = m.shape, m.parameter_rules
    yield Parameter(name="embedding.weight", shape=(s.vocab, s.embed_dim), dim=0, is_vocabulary=True, place="first")
    if s.learned_positions:
        assert s.positions is not None
        yield Parameter(name="positions.weight", shape=(s.positions + rules.positions_offset, s.hidden), place="first")
    if s.embed_dim != s.hidden:
        yield Parameter(name="project_out.weight", shape=(s.embed_dim, s.hidden), place="last")
        yield Parameter(name="project_in.weight", shape=(s.hidden, s.embed_dim), place="first")
    if m.rules.embedding_norm and m.rules.norm not in _WITHOUT_WEIGHT:
        for parameter in norm(m, "word_embeddings_layernorm", s.hidden):
            yield replace(parameter, place="first")
    if rules.final_norm_first and m.flag(m.rules.pre_norms_field) and not m.flag(("_remove_final_layer_norm", False)):
        yield from _final_norm(m)


def _back(m: ModelConfig) -> Iterator[Parameter]:
    s, rules = m.shape, m.parameter_rules
    if rules.final_norm and not rules.final_norm_first:
        yield from _final_norm(m)
    if not s.tied:
        yield Parameter(name="lm_head.weight", shape=(s.vocab, s.embed_dim), dim=0, is_vocabulary=True, place="last")
    if rules.head_bias:
        yield Parameter(name="lm_head.bias", shape=(s.vocab,), dim=0, is_vocabulary=True, place="last")


def _final_norm(m: ModelConfig) -> Iterator[Parameter]:
    if m.rules.norm not in _WITHOUT_WEIGHT:
        for parameter in norm(m, m.parameter_rules.final_norm, m.shape.hidden):
            yield replace(parameter, place="last")


_XIELU_BUFFERS = 2
_FP32, _INT64 = 4, 8


def _model_buffer_bytes(m: ModelConfig) -> int:
    """Bytes of the buffers outside the layers.

    Rotary frequencies, as used and as first computed, in fp32; masks of one byte; Gemma's scale of the embedding.
    """
    rules = m.parameter_rules
    match rules.buffers:
        case "none":
            return 0
        case "causal_mask":
            return _positions(m) ** 2
        case "sinusoids":
            return _FP32 * (_positions(m) + rules.positions_offset) * m.shape.hidden
        case "position_ids":
            return _INT64 * _positions(m)
    scale = {"none": 0, "buffer": _FP32, "scale_emb": _FP32 if isinstance(m.config.get("scale_emb"), float) else _INT64}
    return _rotary_tables(m) * 2 * _FP32 * _rotary_frequencies(m) + scale[rules.embedding_scale]


def _layer_buffer_bytes(m: ModelConfig) -> int:
    match m.parameter_rules.layer_buffers:
        case "xielu":
            return _FP32 * _XIELU_BUFFERS if m.config.get("hidden_act", "xielu") == "xielu" else 0
        case "causal_mask":
            return _positions(m) ** 2
        case "causal_mask_fp32":
            return _FP32 * _positions(m) ** 2
        case "rotary_table":
            return _FP32 * _positions(m) * m.interleaved_features()
        case "none":
            return 0


def _rotary_flops(m: ModelConfig) -> int:
    """FLOPs of one token's rotary angles: a product of position and frequency for half of the rotated features."""
    return _rotary_tables(m) * 2 * _rotary_frequencies(m) if m.has_rotary else 0


def _positions(m: ModelConfig) -> int:
    assert m.shape.positions is not None
    return m.shape.positions


def _rotary_frequencies(m: ModelConfig) -> int:
    return -(-m.rotary_features() // 2)


def _rotary_tables(m: ModelConfig) -> int:
    """Sets of rotary frequencies: one for each kind of attention, where they differ."""
    if not m.rules.rotary_per_kind:
        return 1
    listed = m.layer_types()
    if listed is not None:
        return len(set(listed))
    every = m.full_every()
    return len({(index + 1) % every == 0 for index in range(m.shape.layers)})
