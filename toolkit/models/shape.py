"""ModelShape: the numbers that define a GPT, read from a Hugging Face config without torch or transformers.

`find_config` turns a catalogue name or a local directory into a config, `with_overrides` changes fields of it, and
`ModelShape.from_config` reads it the way the Hugging Face class would: the family's own spelling and its defaults.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from toolkit.errors import ModelError, nearest
from toolkit.files import expanded
from toolkit.models import config_fields
from toolkit.models.config_fields import LARGEST, checked_count, flag, mapping, read_config_json, wrong
from toolkit.models.experts import ExpertShape
from toolkit.models.families.registry import CONFIG_SCHEMAS, find_spec
from toolkit.models.families.spec import FACT_OF, MAPPED_BY_ALL, SPELLINGS, ConfigSchema
from toolkit.models.latent_attention import LatentAttention

_MOST = {"layers": 10_000, "heads": 10_000}
"""More than any model has, and few enough to enumerate quickly."""

_SIMILARITY = 0.8
"""Cutoff of similarity for "Did you mean": names of models are closer to each other than other words are."""

_HUB_NAME = re.compile(r"huggingface\.co/(\S+/\S+) config\.json")
_SILENT_WORDS = frozenset({"meta", "hf", "deduped"})
"""Parts of hub names that make no other model."""
_TUNED_WORDS = frozenset({"base", "pt", "instruct", "chat", "it"})
"""Parts that name other weights of the same shape, whose config may differ in token ids and longest sequence."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a GPT. Build it with `from_config`, which knows each dense family's spelling and defaults."""

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
    """The MLP has a gate beside its up-projection (SwiGLU and the like): three matrices, not two."""
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
    """The dims of latent attention, in families that have it; then `head_dim` is that of queries and keys."""
    experts: ExpertShape | None = None
    """What a mixture has beside, or in the place of, the MLP of `ffn`."""
    windowed: float = 0.0
    """Share of the layers whose attention sees no further than `window` positions; read for mixtures of experts."""
    window: int = 0
    sinks: bool = False
    """Whether heads have sinks, which take a part of each row of scores; read for mixtures of experts."""

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
        """Return the shape of the model that Hugging Face would build. Raises ModelError for what cannot be read."""
        config = text_config(config)
        model_type = config.get("model_type")
        if model_type is None:
            raise ModelError.of("model_type", None, "the config names no family", "choose one of dstk families")
        spec = find_spec(model_type)
        family = spec.config
        if family is None:
            raise _not_read(model_type, spec.not_read_because, is_dense=spec.is_dense)
        if flag(config, "add_cross_attention", False):
            field = "add_cross_attention"
            raise ModelError.of(field, True, f"such a {model_type} attends to an encoder", (field, False))
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
            given = ((family.spelling.get("kv_heads", "kv_heads"), kv_heads), (family.spelling["heads"], heads))
            raise ModelError.between(given, "query heads share key-value heads equally", "choose a divisor")
        latent = None
        if family.latent is not None:
            latent = LatentAttention.read(config, family.latent, default_dim=hidden // heads)
        head_dim = _optional_count(config, family, "head_dim") if latent is None else latent.head_dim
        if head_dim is None:
            if hidden % heads:
                given = ((family.spelling["heads"], heads), (family.spelling["hidden"], hidden))
                raise ModelError.between(given, "heads share the hidden size equally", "choose a divisor")
            head_dim = hidden // heads
        if family.heads_fill_hidden and heads * head_dim != hidden:
            reason = f"the {heads} heads of a {model_type} fill its hidden_size of {hidden}"
            raise ModelError.of("head_dim", head_dim, reason, ("head_dim", hidden // heads))
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

    @classmethod
    def from_facts(cls, family: str, facts: Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """Return the shape of a model of any other family, from what transformers reads in its config."""
        hidden, heads, text = facts["hidden"], facts["heads"] or 1, text_config(config)
        latent = None
        if text.get("kv_lora_rank") and text.get("qk_nope_head_dim"):
            names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            latent = LatentAttention.read(text, dict.fromkeys(names), default_dim=hidden // heads)
        kinds: Sequence[str] = text.get("layer_types", ()) or _LAYER_TYPES.get(family, ())
        windowed = sum(kind == "sliding_attention" for kind in kinds) / max(1, len(kinds))
        return cls(
            family=family,
            hidden=hidden,
            layers=facts["layers"],
            heads=heads,
            kv_heads=facts["kv_heads"] or heads,
            head_dim=latent.head_dim if latent else facts["head_dim"] or hidden // heads,
            ffn=facts["ffn"] or 4 * hidden,
            gated=True,
            vocab=facts["vocab"],
            positions=facts["positions"],
            tied=facts["tied"],
            learned_positions=facts["learned_positions"],
            embed_dim=hidden,
            latent=latent,
            windowed=windowed,
            window=text.get("sliding_window") or 0,
        )


_LAYER_TYPES: Mapping[str, Sequence[str]] = {"gpt_oss": ("sliding_attention", "full_attention")}
"""Kinds of layers, in turn, where a config leaves them to the family's default."""


def names() -> list[str]:
    """Return the names in the catalogue."""
    return [name for name in _catalogue() if not name.startswith("_")]


def families() -> list[str]:
    """Return the model_types that `ModelShape.from_config` reads."""
    return list(CONFIG_SCHEMAS)


def find_name(name: str, *, tuned: bool = False) -> str | None:
    """Return the entry of the catalogue that `name` means; None where it means none.

    Case and separators do not count: `llama3.1-8b` and `meta-llama/Llama-3.1-8B` are `llama-3.1-8b`. Another
    organization's model is another one, and a directory comes before a loose spelling. With `tuned`, names of other
    weights of the same shape count too: `Qwen/Qwen2.5-7B-Instruct`.
    """
    if name.lower() in names():
        return name.lower()
    found = _spellings(tuned).get(_spelling(name, tuned))
    return None if found and "/" not in name and Path(name).is_dir() else found


def find_config(name_or_path: str, *, tuned: bool = False) -> dict[str, Any] | None:
    """Return the config of a catalogue name (see `find_name`) or of a local directory; None for other hub names.

    The catalogue comes first, so that a recipe means the same wherever it runs; write `./gpt2` for a directory `gpt2`.
    """
    entry = find_name(name_or_path, tuned=tuned)
    if entry is not None:
        facts = {key: value for key, value in _catalogue()[entry].items() if not key.startswith("_")}
        return copy.deepcopy(facts)
    path = expanded(name_or_path)
    if path.is_dir():
        return _read_config(path)
    if name_or_path.startswith((".", "/", "~")) or path.exists():
        advice = "name a directory with a config.json, a hub name, or a shape of the catalogue such as gpt2"
        raise ModelError.of("model.name_or_path", name_or_path, "it is not a directory", advice)
    return None


def local_config(name_or_path: str) -> dict[str, Any]:
    """Return the config that `find_config` finds, also of tuned weights. Raises ModelError where it finds none."""
    config = find_config(name_or_path, tuned=True)
    if config is None:
        advice = "name a directory with a config.json, or a shape of the catalogue such as gpt2"
        reason = "it is no known shape and no directory, and nothing is fetched from a hub"
        raise ModelError.of("model", name_or_path, reason, nearest_names(name_or_path).strip() or advice)
    return config


def nearest_names(name: str) -> str:
    """' Did you mean X, Y or Z?' for the entries whose names are closest, or '' when none is close."""
    spelling = _spelling(name.rpartition("/")[2], tuned=True)
    same = _spellings(True).get(spelling)
    return nearest(same or spelling, names(), most=1 if same else 3)


def hidden_size_of(config: Mapping[str, Any]) -> int:
    """Return the width of any decoder, also where its shape is not read (mixtures of experts). Raises ModelError."""
    text = text_config(config)
    if str(text.get("model_type")) in CONFIG_SCHEMAS:
        return ModelShape.from_config(text).hidden
    return checked_count(text, "hidden_size", next((text[one] for one in SPELLINGS["hidden"] if one in text), None))


def hub_spelling(entry: str) -> str | None:
    """Return a catalogue entry's name on the hub; None if no weights were published under it."""
    found = _HUB_NAME.fullmatch(_catalogue()[entry]["_source"])
    return found and found[1]


def published_parameters(name: str) -> int | None:
    """Return how many parameters a model of the catalogue has, tied ones counted once; None for any other model."""
    entry = find_name(name, tuned=True)
    return None if entry is None else int(_catalogue()[entry]["_parameters"])


@cache
def _spellings(tuned: bool) -> Mapping[str, str]:
    """Every spelling of an entry, with and without its organization -> the entry."""
    spellings: dict[str, str] = {}
    read = _HUB_NAME.match if tuned else _HUB_NAME.fullmatch  # tuned: also the text model inside another
    published = [(found[1], entry) for entry in names() if (found := read(_catalogue()[entry]["_source"]))]
    for hub, entry in (*_catalogue()["_aliases"].items(), *published, *((entry, entry) for entry in names())):
        organization, slash, name = hub.rpartition("/")
        for model in (name, entry):
            spellings |= {_spelling(full, tuned): entry for full in (model, organization + slash + model)}
    return spellings


def _spelling(name: str, tuned: bool) -> str:
    """Write a name in the form that is compared: in lower case, and separators only between digits."""
    organization, slash, model = name.lower().rpartition("/")
    silent = _SILENT_WORDS | (_TUNED_WORDS if tuned else frozenset())
    words = [word for word in re.split("[-_ ]+", model) if word not in silent]
    return organization + slash + re.sub(r"(?<!\d)-|-(?!\d)", "", "-".join(words))


DERIVED_FIELDS = {
    "head_dim": frozenset({"hidden_size", "num_attention_heads"}),
    "layer_types": frozenset({"num_hidden_layers"}),
}
"""Fields that a config class derives from others unless given: an override of the others makes them stale."""


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with fields replaced; any spelling of a fact of the shape reaches the family's own field of it.

    `{"n_layer": 4}` and `{"num_hidden_layers": 4}` do the same to a GPT-2 and to a Llama. Other fields (dropout, norms)
    pass through unchecked: only the Hugging Face class knows them.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": with_overrides(text, overrides)}
    family = CONFIG_SCHEMAS.get(str(config.get("model_type")))
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
    """Return the language model inside a multimodal config, or the config itself."""
    if config.get("text_config") is None:
        return config
    text = mapping(config, "text_config")
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return outer | dict(text)


def _read(config: Mapping[str, Any], family: ConfigSchema, fact: str) -> Any:
    """Return the value Hugging Face would use for `fact`; None if the family does not have it."""
    own = family.spelling.get(fact)
    if own is None:
        return None
    legacy = family.legacy_hidden if fact == "hidden" else ()
    for spelling in (*legacy, own, *(SPELLINGS[fact][:1] if fact in MAPPED_BY_ALL else ())):
        if spelling in config:
            return config[spelling]
    for spelling in SPELLINGS[fact]:
        if spelling in config:  # Hugging Face would ignore it and take its default: a model nobody asked for
            reason = f"it is no field of a {config['model_type']} config"
            raise ModelError.of(spelling, config[spelling], reason, f"write {own}")
    return family.fields[own]


def _not_read(model_type: Any, reason: str | None, *, is_dense: bool) -> ModelError:
    """Return the error for a family whose shape is not read; it names a similar family only where that may be meant."""
    name = config_fields.name(model_type)
    what = "it is not counted" if reason and is_dense else "it is not a dense decoder that this toolkit reads"
    if reason:
        return ModelError.of("model_type", name, f"{what}: {reason}", f"see dstk families {name}")
    hint = nearest(name, CONFIG_SCHEMAS, cutoff=_SIMILARITY).strip()
    return ModelError.of("model_type", name, what, hint or "see dstk families")


def _tied(config: Mapping[str, Any], family: ConfigSchema) -> bool:
    value = _read(config, family, "tied")
    if value is None or isinstance(value, bool):
        return bool(value)
    raise wrong(family.spelling["tied"], value, config, "true or false")


def _positions(config: Mapping[str, Any], family: ConfigSchema) -> int | None:
    """Return the longest sequence; None if the config names none, which a family with a table of positions must."""
    if family.learned_positions or family.needs_positions:
        return _count(config, family, "positions")
    return _optional_count(config, family, "positions")


def _optional_count(config: Mapping[str, Any], family: ConfigSchema, fact: str) -> int | None:
    value = _read(config, family, fact)
    if value is None:
        return None
    return checked_count(config, family.spelling[fact], value, most=_MOST.get(fact, LARGEST))


def _count(config: Mapping[str, Any], family: ConfigSchema, fact: str, default: int | None = None) -> int:
    value = _optional_count(config, family, fact)
    value = default if value is None else value
    if value is None:
        field = family.spelling[fact]
        raise wrong(field, None, config, "a whole number from 1")
    return value


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        return read_config_json(directory / "config.json")
    except FileNotFoundError:
        advice = "name a directory in Hugging Face format"
        raise ModelError.of("model.name_or_path", str(directory), "it has no config.json", advice) from None


@cache
def _catalogue() -> dict[str, Any]:
    catalogue: dict[str, Any] = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
    return catalogue
