"""Tiny models of any family with odd sizes: 3 to 5 layers, 6 heads with 2 key-value heads, vocabularies that are prime.

A model is a directory with a config.json, as `model.name_or_path` takes it. Its name says the family and the sizes, so
that a command which names it says what is trained. Where a family cannot take a size, it keeps that of the toolkit's
tiny model (toolkit/parallel/tiny_model.py): a plain forward pass of transformers decides.
"""

import copy
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from toolkit.models.support import all_families
from toolkit.parallel import tiny_model
from toolkit.parallel.tiny_model import LAYERS, tiny_config

MODELS = Path("build/fuzz/models")
"""Relative to the repository, as in commands."""
SEQ_LEN = 32
"""Tokens of a sample, at most."""
_NOT_DRAWN = ("no tiny", "its head does not run once")
"""Refusals of families that are not drawn. The second is ProphetNet's, which predicts several tokens."""
LEAST_LAYERS = 2
HEADS = 4
HIDDEN = 64
WIDE_HIDDEN = 96
"""A width that 6 heads divide."""
_LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
_HEAD_FIELDS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "attention_heads")
_KV_FIELDS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN_FIELDS = ("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "embedding_size")
_QUICK: dict[str, int] = {
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    # Some families count positions from their padding token on.
    **dict.fromkeys(("max_position_embeddings", "max_target_positions", "n_positions"), 48),
}
"""Sizes of which the tiny models have more than a CPU trains quickly, or fewer than SEQ_LEN tokens need."""
_VOCABULARY_FIELDS = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model. None keeps that of the tiny model of its family."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int = 321
    tied: bool | None = None

    @property
    def name(self) -> str:
        """The sizes in a word: `l5-h6-kv2-v331-tied`."""
        parts = [f"l{self.layers}" if self.layers else "", f"h{self.heads}" if self.heads else ""]
        parts += [f"kv{self.kv_heads}" if self.kv_heads else "", f"v{self.vocabulary}"]
        parts += [{True: "tied", False: "untied", None: ""}[self.tied]]
        return "-".join(filter(None, parts))

    def smaller(self) -> Iterator["Sizes"]:
        """The same with one size fewer that is not the tiny model's, and with two layers."""
        for field, off in (("kv_heads", None), ("heads", None), ("tied", None), ("vocabulary", 321)):
            if getattr(self, field) != off:
                yield replace(self, **{field: off})
        if self.layers not in (None, LEAST_LAYERS):
            yield replace(self, layers=None)
        if self.layers != LEAST_LAYERS:
            yield replace(self, layers=LEAST_LAYERS)


@cache
def families() -> tuple[str, ...]:
    """Every family of `dstk families` of which there is a tiny model that predicts a next token."""
    return tuple(
        name
        for name, support in all_families().items()
        if not any((support.refusal(kind) or "").startswith(_NOT_DRAWN) for kind in ("pipeline", "loss"))
    )


def forget_other_versions(folder: Path = MODELS) -> None:
    """Remove models that were written by other code or another version of transformers."""
    written = hashlib.sha256(transformers.__version__.encode())
    for path in (Path(__file__), Path(tiny_model.__file__), Path(tiny_model.__file__).with_suffix(".json")):
        written.update(path.read_bytes())
    mark = folder / "written_by"
    if mark.is_file() and mark.read_text() == written.hexdigest():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.write_text(written.hexdigest())


def write_model(family: str, sizes: Sizes, folder: Path = MODELS) -> Path | None:
    """Write the config of a model with these sizes, as far as the family takes them, and return its directory.

    None where transformers cannot run even the tiny model of the family by itself on input_ids.
    """
    path = folder / f"{family}-{sizes.name}"
    if (path / "config.json").is_file():
        return path
    refused = folder / f"{path.name}.refused"
    if refused.exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{path.name}.{os.getpid()}"
    for attempt in _attempts(sizes):
        config = _config(family, attempt)
        if config is None:
            continue
        config.save_pretrained(temporary)
        if _runs(temporary, sizes.vocabulary):
            with suppress(OSError):  # another process may have written it
                temporary.rename(path)
            return path
    shutil.rmtree(temporary, ignore_errors=True)
    refused.touch()
    return None


def _attempts(sizes: Sizes) -> Iterator[Sizes]:
    """The sizes, then fewer and fewer of them."""
    yield sizes
    yield replace(sizes, layers=None)
    yield replace(sizes, heads=None, kv_heads=None)
    yield replace(sizes, layers=None, heads=None, kv_heads=None)
    yield replace(sizes, layers=None, heads=None, kv_heads=None, tied=None)


def _config(family: str, sizes: Sizes) -> Any:
    """The config of a tiny model with these sizes; None where transformers refuses them."""
    config = tiny_config(family)
    values = config.to_dict()
    _resize(values, sizes)
    try:
        return type(config).from_dict(values)
    except Exception:  # whatever a validator raises
        return None


def _resize(values: dict[str, Any], sizes: Sizes) -> None:
    """Set the sizes in a config and in the configs that it contains."""
    given = copy.deepcopy(values)
    for name in _VOCABULARY_FIELDS:
        if given.get(name):
            values[name] = sizes.vocabulary
    values.update({name: size for name, size in _QUICK.items() if given.get(name)})
    if sizes.heads is not None and any(given.get(name) == HEADS for name in _HEAD_FIELDS):
        is_grouped = any(given.get(name) not in (None, HEADS) for name in _KV_FIELDS)
        kv_heads = sizes.kv_heads if is_grouped and sizes.kv_heads is not None else sizes.heads
        values.update({name: sizes.heads for name in _HEAD_FIELDS if given.get(name) == HEADS})
        values.update({name: kv_heads for name in _KV_FIELDS if given.get(name)})
        values.update({name: WIDE_HIDDEN for name in _HIDDEN_FIELDS if given.get(name) == HIDDEN})
    if sizes.layers is not None and any(given.get(name) == LAYERS for name in _LAYER_FIELDS):
        values.update({name: sizes.layers for name in _LAYER_FIELDS if given.get(name) == LAYERS})
        for name, value in given.items():
            if isinstance(value, list) and len(value) == LAYERS:
                values[name] = [value[layer % LAYERS] for layer in range(sizes.layers)]
    if sizes.tied is not None and "tie_word_embeddings" in given:
        values["tie_word_embeddings"] = sizes.tied
    for value in values.values():
        if isinstance(value, dict) and "model_type" in value:
            _resize(value, sizes)


def _runs(path: Path, vocabulary: int) -> bool:
    """Whether transformers runs the model by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
        ids = torch.linspace(0, vocabulary - 1, 2 * SEQ_LEN).long().reshape(2, SEQ_LEN)
        return bool(model(input_ids=ids, use_cache=False).logits.isfinite().all())
    except Exception:  # whatever a config or a model raises
        return False
