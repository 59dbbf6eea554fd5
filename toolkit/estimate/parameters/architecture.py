"""Architecture: every parameter of a model, read from its config.json without torch or transformers.

The tables follow the modules of transformers 5.23 and are held against them, name by name, in the tests. Experts are
refused by name: `ModelShape` reads dense decoders.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from toolkit.estimate.layer_fields import interleaved_features, layer_types, window_pattern
from toolkit.estimate.parameters.facts import Facts
from toolkit.estimate.parameters.holdings import Group, Holdings
from toolkit.estimate.parameters.layers import LAYERS
from toolkit.estimate.parameters.linear import norm
from toolkit.estimate.parameters.tensor import Place, Tensor
from toolkit.shape import ModelShape, text_config

_GPT_LIKE = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen")
_HEAD_BIAS = ("gptj", "codegen", "phi")
_NORM_BIAS = (
    *(*_GPT_LIKE, "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "stablelm"),
    *("nemotron", "jais2", "persimmon", "biogpt", "xglm"),
)
_FINAL_NORM = {
    **dict.fromkeys((*_GPT_LIKE, "bloom", "falcon"), "ln_f"),
    "gpt_neox": "final_layer_norm",
    "opt": "final_layer_norm",
    **dict.fromkeys(("phi", "persimmon"), "final_layernorm"),
    **dict.fromkeys(("biogpt", "xglm"), "layer_norm"),
    "mpt": "norm_f",
}
_NO_FINAL_NORM_WEIGHT = ("olmo", "nanochat")
_ROTARY_SHARE = {
    "phi": 0.5,
    "stablelm": 0.25,
    "gpt_neox": 0.25,
    **dict.fromkeys(("glm", "glm4", "nemotron", "persimmon"), 0.5),
}
_FULL_EVERY = {"gemma3_text": 6, "olmo3": 4}
"""Families with rotary frequencies for each kind of attention: by default every so many layers see everything."""
_SCALES_EMBEDDING = ("gemma", "gemma2", "gemma3_text", "vaultgemma")
_XIELU_BUFFERS = 2
_INT64 = 8
_NO_ROTARY = (*_GPT_LIKE, "opt", "bloom", "mpt", "biogpt", "xglm", "openai-gpt")
_POSITIONS_OFFSET = {"opt": 2, "biogpt": 2, "xglm": 2}


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """The parameters of one model: a front, the decoder layers, and a back, in the order of Hugging Face's modules.

    Compared by identity: one object stands for one model.
    """

    shape: ModelShape
    front: tuple[Tensor, ...]
    layer: tuple[Tensor, ...]
    back: tuple[Tensor, ...]
    buffer_bytes: int
    """Buffers outside the layers: every pipeline stage has them."""
    layer_buffer_bytes: int
    rotary_flops: int
    """Of one token's rotary angles, which are computed in front of the layers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The parameters of the model that Hugging Face would build. Raises ModelError for what it cannot read."""
        shape = ModelShape.from_config(config)
        facts = Facts(shape, text_config(config))
        return cls(
            shape=shape,
            front=tuple(_front(facts)),
            layer=tuple(LAYERS[facts.family](facts)),
            back=tuple(_back(facts)),
            buffer_bytes=_buffer_bytes(facts),
            layer_buffer_bytes=_layer_buffer_bytes(facts),
            rotary_flops=_rotary_flops(facts),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter of the whole model once, with its layer's index in its name."""
        yield from self.front
        for index in range(self.shape.layers):
            for tensor in self.layer:
                yield Tensor(**{**vars(tensor), "name": f"{index}.{tensor.name}"})
        yield from self.back

    @property
    def numel(self) -> int:
        """Parameters of the whole model, tied ones once."""
        outside = sum(tensor.numel for tensor in (*self.front, *self.back))
        return outside + self.shape.layers * sum(tensor.numel for tensor in self.layer)

    def holdings(
        self, *, layers: int, first: bool = True, last: bool = True, tp: int = 1, by_decay: bool = True
    ) -> Holdings:
        """What a rank holds of a stage with `layers` decoder layers, which is the `first` and the `last` one or not.

        `by_decay`: whether the optimizer has a group with and one without weight decay, or one for all.
        """
        return _holdings(self, layers, first, last, tp, by_decay)

    def outside(self, *, first: bool, last: bool, tp: int = 1) -> int:
        """Elements outside the layers of such a stage."""
        return self.holdings(layers=0, first=first, last=last, tp=tp, by_decay=False).numel


@lru_cache(maxsize=4096)
def _holdings(architecture: Architecture, layers: int, first: bool, last: bool, tp: int, by_decay: bool) -> Holdings:
    here: dict[Place, bool] = {"first": first, "last": last, "layer": True}

    def numels(tensors: tuple[Tensor, ...], decays: bool | None) -> tuple[int, ...]:
        return tuple(
            numel
            for tensor in tensors
            if (here[tensor.place] or (last and _is_shared(architecture, tensor)))
            and (decays is None or tensor.decays == decays)
            for numel in tensor.local_numels(tp)
        )

    groups = (
        Group(
            front=numels(architecture.front, decays),
            layer=numels(architecture.layer, decays),
            layers=layers,
            back=numels(architecture.back, decays),
        )
        for decays in ((True, False) if by_decay else (None,))
    )
    return Holdings(
        groups=tuple(group for group in groups if group.count),
        layers=layers,
        layer_numel=sum(numels(architecture.layer, None)),
        buffer_bytes=architecture.buffer_bytes + layers * architecture.layer_buffer_bytes,
        matrices=sum(numels(architecture.layer, True)) * layers
        + sum(numels(_head(architecture), True) if last else ()),
        placeholders=_placeholders(architecture, first=first, last=last),
    )


def _head(architecture: Architecture) -> tuple[Tensor, ...]:
    """What the head multiplies by."""
    if architecture.shape.tied:
        return tuple(tensor for tensor in architecture.front if tensor.is_vocabulary)
    return tuple(tensor for tensor in architecture.back if tensor.is_vocabulary)


def _placeholders(architecture: Architecture, *, first: bool, last: bool) -> int:
    """Modules outside the layers of which this stage lacks a parameter."""
    outside = (*architecture.front, *architecture.back)
    here: dict[Place, bool] = {"first": first, "last": last, "layer": True}
    lacking = {
        tensor.name.rpartition(".")[0]
        for tensor in outside
        if not here[tensor.place] and not (last and _is_shared(architecture, tensor))
    }
    if architecture.shape.tied and not (first or last):
        lacking.add("lm_head")
    return len(lacking)


def _is_shared(architecture: Architecture, tensor: Tensor) -> bool:
    """Whether the last stage holds the first stage's tensor too: the embedding that is its head."""
    return architecture.shape.tied and tensor.is_vocabulary


def _front(f: Facts) -> Iterator[Tensor]:
    s, family = f.shape, f.family
    yield Tensor(name="embedding.weight", shape=(s.vocab, s.embed_dim), dim=0, is_vocabulary=True, place="first")
    if s.learned_positions:
        assert s.positions is not None
        rows = s.positions + _POSITIONS_OFFSET.get(family, 0)
        yield Tensor(name="positions.weight", shape=(rows, s.hidden), place="first")
    if s.embed_dim != s.hidden:
        yield Tensor(name="project_out.weight", shape=(s.embed_dim, s.hidden), place="last")
        yield Tensor(name="project_in.weight", shape=(s.hidden, s.embed_dim), place="first")
    if family == "bloom":
        for tensor in norm("word_embeddings_layernorm", s.hidden, bias=True):
            yield Tensor(name=tensor.name, shape=tensor.shape, place="first")
    if family == "opt" and f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm"):
        yield from _final_norm(f, affine=f.flag("layer_norm_elementwise_affine", True))


def _back(f: Facts) -> Iterator[Tensor]:
    s, family = f.shape, f.family
    if family not in ("opt", "openai-gpt"):
        yield from _final_norm(f, affine=family not in _NO_FINAL_NORM_WEIGHT)
    if not s.tied:
        yield Tensor(name="lm_head.weight", shape=(s.vocab, s.embed_dim), dim=0, is_vocabulary=True, place="last")
    if family in _HEAD_BIAS:
        yield Tensor(name="lm_head.bias", shape=(s.vocab,), dim=0, is_vocabulary=True, place="last")


def _final_norm(f: Facts, *, affine: bool) -> Iterator[Tensor]:
    bias = f.family in _NORM_BIAS
    name = _FINAL_NORM.get(f.family, "norm")
    for tensor in norm(name, f.shape.hidden, weight=affine, bias=affine and bias):
        yield Tensor(name=tensor.name, shape=tensor.shape, place="last")


def _buffer_bytes(f: Facts) -> int:
    """Rotary frequencies, as used and as first computed, in fp32; masks in one byte; Gemma's embedding scale."""
    s, family = f.shape, f.family
    if family == "gpt_bigcode":
        assert s.positions is not None
        return s.positions**2
    if family == "xglm":
        assert s.positions is not None
        return 4 * (s.positions + _POSITIONS_OFFSET[family]) * s.hidden
    if family == "openai-gpt":
        assert s.positions is not None
        return _INT64 * s.positions
    if family in _NO_ROTARY:
        return 0
    scale = 4 if family in _SCALES_EMBEDDING else 0
    if family == "minicpm3":
        scale = 4 if isinstance(f.config.get("scale_emb"), float) else _INT64
    return _rotary_tables(f) * 2 * 4 * _rotary_frequencies(f) + scale


def _rotary_flops(f: Facts) -> int:
    """A product of positions and frequencies, for half of the features that turn: two FLOPs each."""
    return 0 if f.family in _NO_ROTARY else _rotary_tables(f) * 2 * _rotary_frequencies(f)


def _rotary_frequencies(f: Facts) -> int:
    return -(-f.rotary_features(_ROTARY_SHARE.get(f.family, 1.0)) // 2)


def _rotary_tables(f: Facts) -> int:
    """Sets of rotary frequencies: one for each kind of attention, where they differ."""
    if f.family not in _FULL_EVERY:
        return 1
    listed = layer_types(f.config, f.shape.layers)
    if listed is not None:
        return len(set(listed))
    every = _FULL_EVERY[f.family]
    if f.family == "gemma3_text":
        every = window_pattern(f.config, every)
    return len({(index + 1) % every == 0 for index in range(f.shape.layers)})


def _layer_buffer_bytes(f: Facts) -> int:
    """Buffers of each decoder layer: numbers of xIELU, GPT-Neo's causal mask, GPT-J's table of sines and cosines."""
    s = f.shape
    if f.family == "apertus" and f.config.get("hidden_act", "xielu") == "xielu":
        return 4 * _XIELU_BUFFERS
    if s.family == "openai-gpt":
        assert s.positions is not None
        return 4 * s.positions**2
    if s.family == "gpt_neo":
        assert s.positions is not None
        return s.positions**2
    if s.family in ("gptj", "codegen"):
        assert s.positions is not None
        return 4 * s.positions * interleaved_features(f.config, s.head_dim)
    return 0
