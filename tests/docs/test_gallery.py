"""The gallery: every recipe in every layout is valid, fits the GPUs that it names, and says so in its head."""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.gallery import TASKS, find_recipe, gallery, task_of
from toolkit.config.job import Job
from toolkit.dsconfig import build
from toolkit.estimate.recorded import recordings
from toolkit.hardware import variants
from toolkit.lint import Linter
from toolkit.models.shape import find_name, hidden_size_of
from toolkit.planner.run_memory import model_config

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import generate_gallery  # noqa: E402
from generate_gallery import COLUMNS, GalleryRun, runs, with_head  # noqa: E402

NAMES = [name for name in gallery() if "/" in name]
ISSUE = (
    *("gpt2-pretrain", "gpt2-medium-pretrain", "gpt2-large-pretrain", "gpt2-xl-pretrain", "gpt-j-6b", "gpt-neox-20b"),
    *("opt-30b", "bloom-176b", "gpt3-175b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-3.2-1b"),
    *("qwen3-0.6b", "qwen3-32b", "mistral-7b", "gemma-2", "gemma-3", "phi-4", "olmo-2", "smollm2", "smollm3"),
    *("mixtral-8x7b-pretrain", "mixtral-8x7b-finetune", "qwen3-30b-a3b-pretrain", "qwen3-30b-a3b-finetune"),
    *("olmoe-1b-7b-pretrain", "olmoe-1b-7b-finetune", "gpt-oss-20b-pretrain", "gpt-oss-20b-finetune"),
    *("deepseek-v2-lite-pretrain", "deepseek-v2-lite-finetune"),
)


class NotShippedError(Exception):
    """A recording that would have to be made."""


def test_there_are_recipes_for_the_models_and_tasks_of_the_issue() -> None:
    assert len(NAMES) >= 40
    assert [model for model in ISSUE if not any(f"/{model}" in name for name in NAMES)] == []
    assert {task_of(name) for name in NAMES} >= TASKS.keys()
    assert {1, 1024} <= {run.listed.ranks for name in NAMES for run in runs(name)}


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_is_of_the_version_of_the_model(name: str) -> None:
    """Later versions of a model may have a larger vocabulary, whose ids the weights of an earlier one do not have."""
    (recipe, *_) = (run.recipe for run in runs(name))
    tokenizer = recipe.data.tokenizer
    if "/" in recipe.model.name_or_path and tokenizer is not None and "/" in tokenizer:
        assert version_of(tokenizer) == version_of(recipe.model.name_or_path)


def version_of(repository: str) -> str:
    """The name of a repository of the hub, without what tells a tuned model from its base."""
    return re.sub(r"-(Base|Instruct|Chat|it|pt)(?=-|$)", "", repository)


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_is_valid_and_its_config_is_clean(name: str, tmp_path: Path) -> None:
    assert find_recipe(name.rpartition("/")[2]) == gallery()[name]
    for number, run in enumerate(runs(name)):
        recipe = run.recipe
        assert variants(run.listed.gpu), "a GPU of the catalogue"
        assert find_name(recipe.model.name_or_path, tuned=True), "its shape must be known without a network"
        if recipe.train.engine == "deepspeed":
            job = Job.of(recipe, run.listed.ranks)
            config = build(job, hidden_size=hidden_size_of(model_config(recipe)), device="cuda")
            (tmp_path / f"{number}.json").write_text(json.dumps(config))
    linted = Linter().run([str(tmp_path)])
    assert [finding for finding in linted.findings if finding.severity.name != "INFO"] == []


def _head_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Check the head as far as the model is recorded; return how many layouts that is."""
    text = gallery()[name].read_text()
    rows = [line for line in text.splitlines() if line.startswith("#   ")]
    written = dict(zip(map(_key, runs(name)), rows[1:], strict=True))
    known = set()

    def or_as_written(head: str, cell: Callable[[GalleryRun], str]) -> Callable[[GalleryRun], str]:
        def read(run: GalleryRun) -> str:
            try:
                value = cell(run)
                known.add(_key(run))
                return value
            except NotShippedError:
                start = rows[0].find(head)
                return written[_key(run)][start:].split("  ")[0].strip() if start > 0 else ""

        return cell if head in ("--layout", "is") else read

    monkeypatch.setattr(
        generate_gallery, "COLUMNS", {head: or_as_written(head, cell) for head, cell in COLUMNS.items()}
    )
    assert with_head(name, text) == text, "run: make generate"
    for row in rows[1:]:
        needed, available = row[rows[0].index("GiB of each GPU") :].split()[0:3:2]
        assert float(needed) <= 0.95 * float(available)
    return len(known)


def _key(run: GalleryRun) -> tuple[str, str]:
    return run.listed.name, run.listed.text


def test_heads_say_what_is_estimated_from_shipped_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotShippedError

    monkeypatch.setattr(recordings, "_ask_recorder", refuse)
    monkeypatch.setattr(recordings, "_read", lambda path: {})
    assert sum(_head_is_current(name, monkeypatch) for name in NAMES) > 70


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_heads_say_what_is_estimated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _head_is_current(name, monkeypatch) == len(runs(name))


def test_the_page_is_up_to_date_and_every_layout_trained_the_same() -> None:
    current = generate_gallery.PAGE.read_text()
    assert generate_gallery.page(current) == current, "run: make generate"
    rows = [line for line in current.splitlines() if re.search(r"\d of \d", line)]
    assert len(rows) == sum(len(runs(name)) for name in NAMES)
    assert [row for row in rows if not row.endswith(", same |")] == []


def test_every_folder_of_the_gallery_is_in_the_wheel() -> None:
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    shipped = {path for patterns in files.values() for pattern in patterns for path in ROOT.glob(pattern)}
    assert {
        path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".yaml", ".json", ".jsonl", ".py")
    } == shipped
    for folder, patterns in files.items():
        assert {str(Path(pattern).parent) for pattern in patterns} == {folder.partition("toolkit/")[2]}
