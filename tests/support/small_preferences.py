"""Small preference data: pairs of completions, and completions with labels, of unequal lengths; texts and chats."""

import json
import random
from pathlib import Path
from typing import Any

from small_chats import WORDS, turns, write_tokenizer

LAYOUTS: dict[str, dict[str, Any]] = {
    "z0": {"dp": 2, "zero_stage": 0},
    "z1": {"dp": 2, "zero_stage": 1},
    "z2": {"dp": 2, "zero_stage": 2},
    "z3": {"dp": 2, "zero_stage": 3},
    "tp2": {"tp": 2, "zero_stage": 1},
    "tp2-sp": {"tp": 2, "zero_stage": 1, "sequence_parallel": True},
    "pp2": {"pp": 2, "zero_stage": 1},
    "tp2-pp2-dp2": {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1},
    "u2": {"ulysses": 2, "zero_stage": 1},
}
"""Layouts in which every objective is held to one process, as `parallel` sections."""


def small_llama(layers: int, **overrides: Any) -> dict[str, Any]:
    """Return the model section of a small Llama for the tokenizer of these rows."""
    return {
        "name_or_path": "llama-tiny",
        "overrides": {
            "hidden_size": 64,
            "num_hidden_layers": layers,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "vocab_size": 321,
            "max_position_embeddings": 256,
            **overrides,
        },
    }


def words(rng: random.Random, longest: int = 12) -> str:
    """Some words, never none."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))


def make_pairs(count: int = 120, longest: int = 12) -> list[dict[str, Any]]:
    """Rows of every form: texts and chats, explicit and implicit prompts, one turn and several; some are very long."""
    rng = random.Random(5)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        prompt = words(rng, longest)
        chosen, rejected = words(rng, longest), words(rng, longest)
        if number % 40 == 7:
            chosen = words(rng, 3) + " one two three" * 40
        history = turns(words(rng, 4), words(rng, 4)) if number % 3 == 0 else []
        asked = [*history, {"role": "user", "content": prompt}]
        good = {"role": "assistant", "content": chosen}
        bad = {"role": "assistant", "content": rejected}
        match number % 4:
            case 0:
                rows.append({"prompt": asked, "chosen": [good], "rejected": [bad]})
            case 1:
                rows.append({"prompt": prompt, "chosen": [*asked, good], "rejected": [*asked, bad]})
            case 2:
                rows.append({"prompt": f"{prompt}:", "chosen": f" {chosen} yes", "rejected": f" {rejected} no"})
            case _:
                rows.append({"chosen": f"{prompt}: yes {chosen}", "rejected": f"{prompt}: no {rejected}"})
    return rows


def make_completions(count: int = 120) -> list[dict[str, Any]]:
    """Rows with labels, texts and chats, of which two of five are desirable."""
    rng = random.Random(6)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        prompt, completion = words(rng), words(rng)
        label = number % 5 < 2
        if number % 2:
            rows.append({"prompt": f"{prompt}:", "completion": f" {completion}", "label": label})
        else:
            answer = {"role": "assistant", "content": completion}
            rows.append({"prompt": [{"role": "user", "content": prompt}], "completion": [answer], "label": label})
    return rows


def preference_data(folder: Path, objective: str, cache: Path | None = None) -> dict[str, Any]:
    """The data section of a recipe with this objective: its rows and a tokenizer, which are written to `folder`."""
    is_unpaired = objective in ("kto", "bco")
    rows = make_completions() if is_unpaired else make_pairs()
    row_format = "unpaired" if is_unpaired else "preference"
    return {
        "source": str(write_rows(folder / f"{row_format}.jsonl", rows)),
        "tokenizer": str(write_tokenizer(folder / "tokenizer")),
        "format": row_format,
        "seq_len": 256,
        "workers": 1,
        "cache_dir": str(cache or folder / "cache"),
        "eval_fraction": 0.0,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
