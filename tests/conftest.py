"""What all tests share: one warmed-up process that forks ranks, a small corpus, and a recipe to vary."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.recipe import Recipe


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-parity-page", action="store_true", help="write docs/parity.md from this run")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 documents of 2 to 90 words: a padded sample holds anything between a few targets and a full row."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(7)
    words = [f"{a}{b}" for a in ("la", "to", "mi", "ru", "ne") for b in ("ba", "di", "ko", "su", "ve")]
    lines = (" ".join(chance.choices(words, k=chance.choice((2, 5, 20, 90)))) for _ in range(400))
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


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
    import torch

    torch.set_num_threads(1)
    import accelerate  # noqa: F401
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    # What engines import when they start, some of it seconds long: here once, and not in every rank.
    for late in (
        "deepspeed.moe.ep_count",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        *(f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "llama", "qwen3")),
    ):
        importlib.import_module(late)

    from toolkit.train.launch import quiet
    from toolkit.train.local_ranks import run_ranks

    quiet(debug=False)
    return run_ranks


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if config.getoption("--write-parity-page") and exitstatus == 0:
        import sys

        sys.path.insert(0, str(Path(__file__).parent / "parity"))
        from page import write_pages

        write_pages(terminalreporter.stats.get("passed", []))
