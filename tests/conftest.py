"""What all tests share: one warmed-up process that forks ranks, a small corpus, and a recipe to vary."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# First: it sets the environment in which torch and DeepSpeed are imported.
from rank_parent import become_rank_parent
from small_text import write_corpus

from toolkit.recipe import Recipe


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 documents of 2 to 90 words: a padded sample holds anything between a few targets and a full row."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="session")
def make_recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRecipe:
    """A small recipe; keyword arguments such as `train__steps=3` change a field, as an override would."""
    cache = tmp_path_factory.mktemp("cache")

    def make(**changes: Any) -> Recipe:
        sections: dict[str, Any] = {
            "model": {
                "name_or_path": "gpt2-tiny",
                "overrides": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320},
            },
            "data": {
                "source": str(corpus),
                "tokenizer": "bpe-300",
                "seq_len": 32,
                "eval_fraction": 0.1,
                "workers": 1,
                "cache_dir": str(cache),
            },
            "batch": {"global_size": 16, "micro_size": 4},
            "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
            "schedule": {"name": "cosine", "warmup_steps": 3},
            "train": {"steps": 30, "seed": 1, "grad_clip": 0.5},
            "parallel": {},
        }
        for key, value in changes.items():
            section, _, field = key.partition("__")
            if not field:
                sections[section] = value
            elif section == "overrides":
                sections["model"]["overrides"][field] = value
            else:
                sections[section][field] = value
        return Recipe.model_validate_json(json.dumps(sections))

    return make


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    """`run_ranks`, from a process that has imported all that ranks need: forking it takes milliseconds."""
    become_rank_parent()

    from toolkit.train.local_ranks import run_ranks

    return run_ranks
