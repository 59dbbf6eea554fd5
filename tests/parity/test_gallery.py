"""Shrunken copies of the gallery's recipes train what one plain process trains: some every day, all in test-all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gallery_copies import compare, groups, shrunken

from toolkit.config.strategy import Strategy
from toolkit.parity import ParityResult
from toolkit.parity.run.train_in_memory import train_in_memory

GROUPS = groups()
DAILY = [
    ("gpt2 pretrain text", "dp2-tp2-pp2-z1-sp"),
    ("llama finetune chat", "dp2-z3-recompute"),
    ("gptj finetune prompt_completion-padded", "dp2-z2-recompute"),
    ("qwen3 continue text", "dp2-tp2-z1-sp-recompute"),
]


@pytest.mark.parametrize(("group", "layout"), DAILY)
def test_a_copy_trains_what_one_process_trains(
    group: str, layout: str, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    small = shrunken(GROUPS[group][layout].recipe, tmp_path)
    strategy = Strategy.parse(layout)
    own, plain = strategy.apply(small, 1), Strategy.parse("reference").apply(small, 1)
    (baseline,) = ranks(train_in_memory, 1, plain, joined=False)
    found = ranks(train_in_memory, strategy.world_size(1), own)[0]
    ParityResult.of(found, baseline).check(has_replicas="z3" not in layout)


@pytest.mark.whole
@pytest.mark.parametrize("group", GROUPS)
def test_all_copies_of_a_group_train_what_one_process_trains(group: str, tmp_path: Path) -> None:
    layouts = list(GROUPS[group])
    found = compare(GROUPS[group][layouts[0]].recipe, layouts, tmp_path)
    assert {result.name: result.outcome for result in found.results} == dict.fromkeys(layouts, "same")
