"""ModelShape: the numbers that define a GPT, read from a Hugging Face config without torch or transformers.

`find_config` turns a catalogue name or a local directory into a config, `with_overrides` changes fields of it, and
`ModelShape.from_config` reads it: what its fields mean stands in shape_fields.py.
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
from toolkit.models.config_fields import checked_count, read_config_json, text_config
from toolkit.models.experts import ExpertShape
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.families.spec import FACT_OF, SPELLINGS
from toolkit.models.latent_attention import LatentAttention
from toolkit.models.shape_fields import shape_fields

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
    """The experts of a mixture, beside or in the place of the MLP of `ffn`; None for a dense model."""
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
        return cls(**shape_fields(config))

    @classmethod
    def from_facts(cls, family: str, facts: Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """Return the shape of a model of any other family, from what transformers reads in its config."""
        hidden = facts["hidden"]
        heads = facts["heads"] or 1
        text = text_config(config)
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
    entry = _spellings(tuned).get(_spelling(name, tuned))
    if entry and "/" not in name and Path(name).is_dir():
        return None
    return entry


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
        reason = "it is neither a known shape nor a directory, and nothing is fetched from a hub"
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
    return checked_count(text, "hidden_size", next((text[name] for name in SPELLINGS["hidden"] if name in text), None))


def hub_spelling(entry: str) -> str | None:
    """Return a catalogue entry's name on the hub; None if no weights were published under it."""
    named = _HUB_NAME.fullmatch(_catalogue()[entry]["_source"])
    return named and named[1]


def published_parameters(name: str) -> int | None:
    """Return how many parameters a model of the catalogue has, tied ones counted once; None for any other model."""
    entry = find_name(name, tuned=True)
    return None if entry is None else int(_catalogue()[entry]["_parameters"])


@cache
def _spellings(tuned: bool) -> Mapping[str, str]:
    """Every spelling of an entry, with and without its organization -> the entry."""
    spellings: dict[str, str] = {}
    read = _HUB_NAME.match if tuned else _HUB_NAME.fullmatch  # tuned: also the text model inside another
    sources = ((read(_catalogue()[entry]["_source"]), entry) for entry in names())
    published = [(named[1], entry) for named, entry in sources if named]
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
        field = family.spelling.get(fact) if family and fact else None
        if fact and field:
            for spelling in SPELLINGS[fact]:
                result.pop(spelling, None)
        result[field or key] = value
    for derived, sources in DERIVED_FIELDS.items():
        if derived not in overrides and sources & overrides.keys():
            result.pop(derived, None)
    return result


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
