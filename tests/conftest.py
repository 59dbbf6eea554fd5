"""Fixtures of all tests: one process that forks ranks, a small corpus, and a recipe to vary."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

# First: it sets the environment in which torch, DeepSpeed and Triton are imported.
from rank_parent import RANK_SECONDS, become_rank_parent

# isort: split
from async_io import use_build_directory
from skipped_tests import SkippedTests
from skipped_tests import add_options as add_options_of_skipped_tests
from slow_tests import Durations, leave_long_cases_to_test_all, mark_slow_tests, slowest_files_first
from small_text import write_corpus
from train_script import train_here

from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe
from toolkit.estimate.recorded import recorder_process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="write tests/slow_tests.json (make durations)")
    add_options_of_skipped_tests(parser)


def pytest_configure(config: pytest.Config) -> None:
    # Recordings of activations stay from run to run: they name the code that made them.
    build = Path(__file__).parents[1] / "build"
    os.environ.setdefault("DSTK_CACHE", str(build / "cache"))
    use_build_directory()
    if config.getoption("--write-durations"):
        config.pluginmanager.register(Durations())
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist, whose reports the main process gets
    limit = config.getoption("--max-skipped")
    if (config.getoption("--report-skipped") or limit is not None) and not is_worker:
        config.pluginmanager.register(SkippedTests(limit=limit))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_tests(items)
    leave_long_cases_to_test_all(items)
    slowest_files_first(items)


@pytest.fixture(autouse=True)
def _no_accelerate_state() -> Iterator[None]:
    """Ranks forked later would inherit what a test left in accelerate: one process without peers."""
    yield
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a recording takes long, and a line on stderr would say so in the middle of a test."""
    monkeypatch.setitem(recorder_process.PATIENCE, False, 3600)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 documents of 2 to 90 words: a padded sample holds anything between a few targets and a full row."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="session")
def make_recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRecipe:
    """Make a small recipe; keyword arguments such as `train__steps=3` change a field, as an override would."""
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
            "batch": {"global_batch_size": 16, "micro_batch_size": 4},
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
    """`run_ranks`, in a process that has imported all that ranks need: forking it takes milliseconds."""
    become_rank_parent()

    from toolkit.launch.local_ranks import run_ranks

    return partial(run_ranks, timeout_seconds=RANK_SECONDS)


Train = Callable[..., str]


@pytest.fixture
def train(make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], tmp_path: Path) -> Train:
    """Run recipes/train.py on forked ranks, with a varied small recipe in tmp_path; return what rank 0 printed."""

    def run(*argv: str, world_size: int = 1, **changes: Any) -> str:
        recipe = make_recipe(**({"train__steps": 4} | changes))
        (tmp_path / "small.yaml").write_text(dump_recipe(recipe))
        arguments = ["--config", "small.yaml", *argv]
        return ranks(train_here, world_size, str(tmp_path), arguments, joined=False)[0]

    return run
