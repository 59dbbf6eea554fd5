"""ModelShape: the numbers that define a GPT, read from a Hugging Face config without torch or transformers.

`find_config` turns a catalogue name or a local directory into a config, `with_overrides` changes fields of it, and
`ModelShape.from_config` reads it the way the Hugging Face class would: the family's own spelling and its defaults.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from toolkit import config_fields, config_file
from toolkit.config_fields import LARGEST, checked_count, flag, mapping, wrong
from toolkit.errors import ModelError, nearest
from toolkit.latent_attention import LatentAttention
from toolkit.model_types import FACT_OF, MAPPED_BY_ALL, MODEL_TYPES, NOT_DENSE, REFUSED, SPELLINGS, ModelType

_MOST = {"layers": 10_000, "heads": 10_000}
"""Beyond any model, and few enough that going through all of them takes no time."""

_TYPING_ERROR = 0.8
"""How close a name is to the one that was meant. Other models' names are closer to each other than other words are."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a dense GPT looks like. Build it with `from_config`, which knows each family's spelling and defaults."""

    family: str
    """Hugging Face's model_type."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values: fewer than `heads` with grouped queries, 1 with multi-query attention."""
    head_dim: int
    ffn: int
    """Width inside the MLP."""
    gated: bool
    """The MLP has a gate beside its up-projection (SwiGLU and kin): three matrices, not two."""
    vocab: int
    positions: int | None
    """Longest sequence the config names; None where it names none. A hard limit only with `learned_positions`."""
    tied: bool
    """The LM head is the token embedding."""
    learned_positions: bool
    """Positions are a table of `positions` rows."""
    embed_dim: int
    """Width of the token embedding and of the LM head's input: `hidden`, except in OPT-350M."""
    latent: LatentAttention | None = None
    """Where the family has it; `head_dim` is that of queries and keys then."""

    @property
    def attention_dim(self) -> int:
        """Width of all query heads together; not always `hidden`. Of latent attention the mean of keys and values."""
        if self.latent is not None:
            return self.heads * (self.head_dim + self.latent.value_dim) // 2
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The shape that Hugging Face would build from this config.json. Raises ModelError for what it cannot read."""
        config = text_config(config)
        model_type = config.get("model_type")
        family = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
        if model_type is None:
            raise ModelError("The config has no model_type. Add it; " + _families_known())
        refusal = REFUSED.get(str(model_type))
        if refusal is not None:
            raise ModelError(f"model_type={model_type} is not counted: {refusal}. {_families_known()}")
        if family is None:
            raise _not_read(model_type)
        if flag(config, "add_cross_attention", False):
            raise ModelError(f"{model_type} with add_cross_attention=true attends to an encoder. Set it to false.")
        hidden = _count(config, family, "hidden")
        heads = _count(config, family, "heads")
        kv_heads = _count(config, family, "kv_heads", heads)
        # Falcon's new architecture reads num_kv_heads and ignores multi_query.
        if (
            family.multi_query
            and flag(config, "multi_query", True)
            and not flag(config, "new_decoder_architecture", False)
        ):
            kv_heads = 1
        if heads % kv_heads:
            raise ModelError(f"{kv_heads} key-value heads do not divide {heads} query heads. Choose a divisor.")
        latent = None
        if family.latent is not None:
            latent = LatentAttention.read(config, family.latent, default_dim=hidden // heads)
        head_dim = _optional_count(config, family, "head_dim") if latent is None else latent.head_dim
        if head_dim is None:
            if hidden % heads:
                raise ModelError(f"{heads} heads do not divide a hidden size of {hidden}. Choose a divisor.")
            head_dim = hidden // heads
        if family.heads_fill_hidden and heads * head_dim != hidden:
            raise ModelError(
                f"{model_type} cannot compute with {heads} heads of {head_dim} beside a hidden_size of {hidden}. "
                f"Set head_dim={hidden // heads}."
            )
        return cls(
            family=str(model_type),
            hidden=hidden,
            layers=_count(config, family, "layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=_count(config, family, "ffn", 4 * hidden),
            gated=family.gated,
            vocab=_count(config, family, "vocab"),
            positions=_positions(config, family),
            tied=_tied(config, family),
            learned_positions=family.learned_positions,
            embed_dim=_count(config, family, "embed_dim", hidden),
            latent=latent,
        )


def layer_matmul_parameters(shape: ModelShape) -> int:
    """Weights of one decoder layer that multiply activations: query, key, value, output and the MLP."""
    if shape.latent is not None:
        attention = shape.latent.matmul_parameters(shape.hidden, shape.heads)
    else:
        attention = 2 * shape.hidden * shape.attention_dim + 2 * shape.hidden * shape.kv_dim
    return attention + (3 if shape.gated else 2) * shape.hidden * shape.ffn


def head_matmul_parameters(shape: ModelShape) -> int:
    """Weights outside the layers that multiply activations: the LM head (tied or not) and OPT-350M's projections."""
    projections = 2 * shape.hidden * shape.embed_dim if shape.embed_dim != shape.hidden else 0
    return shape.vocab * shape.embed_dim + projections


def matmul_parameters(shape: ModelShape) -> int:
    """Weights that multiply activations: every linear layer, the LM head once. Embeddings are only looked up."""
    return shape.layers * layer_matmul_parameters(shape) + head_matmul_parameters(shape)


def names() -> list[str]:
    """The names in the catalogue."""
    return [name for name in _catalogue() if not name.startswith("_")]


def families() -> list[str]:
    """The model_types that `ModelShape.from_config` reads."""
    return list(MODEL_TYPES)


def find_config(name_or_path: str) -> dict[str, Any] | None:
    """The config of a catalogue name (or its hub spelling) or of a local directory; None for any other hub name.

    The catalogue comes first, so that a recipe means the same wherever it runs; write `./gpt2` for a directory `gpt2`.
    """
    catalogue = _catalogue()
    name = name_or_path.lower()
    name = catalogue["_aliases"].get(name, name)
    if name in catalogue and not name.startswith("_"):
        facts = {key: value for key, value in catalogue[name].items() if not key.startswith("_")}
        return copy.deepcopy(facts)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _read_config(path)
    if name_or_path.startswith((".", "/", "~")) or path.exists():
        raise ModelError(
            f"{name_or_path} is not a directory. Name a directory with a config.json, a hub name, or one of the "
            "catalogue, for instance gpt2."
        )
    return None


def hub_spelling(name: str) -> str | None:
    """The hub name of a catalogue entry, in lower case; None where no weights were published under the entry's name."""
    return next((hub for hub, entry in _catalogue()["_aliases"].items() if entry == name.lower()), None)


_TABLES_OF_POSITIONS = ("xglm", "gptj", "codegen")
"""Families that compute a table of sines and cosines when they are built."""

DERIVED_FIELDS = {
    "head_dim": frozenset({"hidden_size", "num_attention_heads"}),
    "layer_types": frozenset({"num_hidden_layers"}),
}
"""Fields that a config derives from others unless it is given them: an override of the others makes them stale."""


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with fields replaced; any spelling of a shape's fact reaches the family's own field of that fact.

    `{"n_layer": 4}` and `{"num_hidden_layers": 4}` do the same to a GPT-2 and to a Llama. Fields that are no facts of
    the shape (dropout, norms) pass through unseen: only the Hugging Face class knows them.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": with_overrides(text, overrides)}
    family = MODEL_TYPES.get(str(config.get("model_type")))
    result = dict(config)
    for key, value in overrides.items():
        fact = FACT_OF.get(key)
        own = family.spelling.get(fact) if family and fact else None
        if fact and own:
            for spelling in SPELLINGS[fact]:
                result.pop(spelling, None)
        result[own or key] = value
    for derived, sources in DERIVED_FIELDS.items():
        if derived not in overrides and sources & overrides.keys():
            result.pop(derived, None)
    return result


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model inside a multimodal config, or the config itself."""
    if config.get("text_config") is None:
        return config
    text = mapping(config, "text_config")
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return outer | dict(text)


def _read(config: Mapping[str, Any], family: ModelType, fact: str) -> Any:
    """The value Hugging Face would use for `fact`, None where the family does not have it."""
    own = family.spelling.get(fact)
    if own is None:
        return None
    # Old BLOOM and Falcon files say n_embed, and their config classes still honour it.
    legacy = ("n_embed",) if config["model_type"] in ("bloom", "falcon") and fact == "hidden" else ()
    honoured = (*legacy, own, *(SPELLINGS[fact][:1] if fact in MAPPED_BY_ALL else ()))
    for spelling in honoured:
        if spelling in config:
            return config[spelling]
    for spelling in SPELLINGS[fact]:
        if spelling in config:  # Hugging Face would ignore it and take its default: a model nobody asked for
            raise ModelError(f"{spelling} is not a field of a {config['model_type']} config. Write {own}.")
    return family.default(fact)


def _not_read(model_type: Any) -> ModelError:
    """The error for a family that is not among the known ones; a near name only where it may be meant."""
    reason = NOT_DENSE.get(model_type) if isinstance(model_type, str) else None
    name = config_fields.name(model_type)
    why = f": {reason}." if reason else f".{nearest(name, MODEL_TYPES, cutoff=_TYPING_ERROR)}"
    return ModelError(f"model_type={name} is not a dense decoder that this toolkit reads{why} {_families_known()}")


def _tied(config: Mapping[str, Any], family: ModelType) -> bool:
    value = _read(config, family, "tied")
    if value is None or isinstance(value, bool):
        return bool(value)
    raise wrong(family.spelling["tied"], value, config, "true or false")


def _positions(config: Mapping[str, Any], family: ModelType) -> int | None:
    """None where the config names no length, which a family with a table of positions cannot leave out."""
    if family.learned_positions or config["model_type"] in _TABLES_OF_POSITIONS:
        return _count(config, family, "positions")
    return _optional_count(config, family, "positions")


def _optional_count(config: Mapping[str, Any], family: ModelType, fact: str) -> int | None:
    value = _read(config, family, fact)
    if value is None:
        return None
    return checked_count(config, family.spelling[fact], value, most=_MOST.get(fact, LARGEST))


def _count(config: Mapping[str, Any], family: ModelType, fact: str, default: int | None = None) -> int:
    value = _optional_count(config, family, fact)
    value = default if value is None else value
    if value is None:
        field = family.spelling[fact]
        raise ModelError(f"{field} is missing from the {config['model_type']} config: set it to a whole number from 1.")
    return value


def _families_known() -> str:
    return f"Known: {', '.join(MODEL_TYPES)}."


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        return config_file.read(directory / "config.json")
    except FileNotFoundError:
        raise ModelError(f"{directory} has no config.json. Name a directory in Hugging Face format.") from None


@cache
def _catalogue() -> dict[str, Any]:
    catalogue: dict[str, Any] = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
    return catalogue
