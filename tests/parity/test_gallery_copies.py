"""Shrunken copies of the gallery's recipes train what one plain process trains: some every day, all in test-all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gallery_copies import compare, groups

GROUPS = groups()
DAILY = [
    ("gpt2 pretrain text", "dp2-tp2-pp2-z1-sp"),
    ("llama finetune chat", "dp2-z3-recompute"),
    ("gptj lora prompt_completion-padded", "dp2-z1-recompute"),
    ("qwen3 continue text", "dp2-tp2-z1-sp-recompute"),
    ("olmoe finetune chat", "dp2-ep2-z2"),
]


@pytest.mark.parametrize(("group", "layout"), DAILY)
def test_a_copy_trains_what_one_process_trains(
    group: str, layout: str, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert compare(GROUPS[group][layout].recipe, [layout], tmp_path) == {layout: "same"}


@pytest.mark.whole
@pytest.mark.parametrize("group", GROUPS)
def test_all_copies_of_a_group_train_what_one_process_trains(
    group: str, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    layouts = list(GROUPS[group])
    assert compare(GROUPS[group][layouts[0]].recipe, layouts, tmp_path) == dict.fromkeys(layouts, "same")
