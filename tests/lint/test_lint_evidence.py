"""Every rule against the program that it is about: its example and a config close to it are run, and show its claim."""

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from lint_cases import Config, document, ids, lint_example
from lint_readers import Outcome, outcomes

from toolkit.lint import Rule
from toolkit.lint.finding import RULES
from toolkit.lint.linter import guess_runner, is_accelerate
from toolkit.lint.view import LintContext

RUN = ("raises", "ignored", "same", "changes")
NAMED = '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}'
"""ds.json, which configs of accelerate name."""


@pytest.fixture(autouse=True)
def _named_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(NAMED)


def near_of(rule: Rule) -> tuple[Config | str, Mapping[str, Any]]:
    near = rule.near if isinstance(rule.near, str) else dict(rule.near)
    return near, rule.facts if rule.near_facts is None else rule.near_facts


def reader_of(example: Config | str, given: Mapping[str, Any]) -> str:
    value = document(example).value
    if is_accelerate(value):
        return "accelerate"
    runner: str = given.get("runner") or guess_runner(value, LintContext(trainer=given.get("trainer", {})))
    return runner


def without_the_key(rule: Rule) -> Config | str:
    """Return the example without the key that the rule reports."""
    finding = next(one for one in lint_example(rule) if one.rule is rule)
    config = copy.deepcopy(document(dict(rule.example) if isinstance(rule.example, Mapping) else rule.example).value)
    inner = config
    for part in finding.path[:-1]:
        inner = inner[part]
    del inner[finding.path[-1]]
    return yaml.safe_dump(config) if is_accelerate(config) else config


def shows(rule: Rule, example: Outcome, near: Outcome, without: Outcome | None) -> bool:
    """Return whether the outcomes are what the rule claims."""

    def result(one: Outcome) -> Any:
        return (one.weights, one.read.get("saved"), one.read.get("init")) if one.weights else one.read

    if rule.claim == "raises":
        return example.error is not None and near.error is None
    if example.error or near.error:
        return False
    if rule.claim == "ignored":
        return without is not None and without.error is None and result(example) == result(without)
    return (result(example) == result(near)) is (rule.claim == "same")


def test_what_a_rule_claims_happens_and_not_to_what_is_close_to_it(ranks: Callable[..., list[Any]]) -> None:
    cases: dict[int, list[Any]] = defaultdict(list)
    keys: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for rule in RULES.values():
        example = rule.example if isinstance(rule.example, str) else dict(rule.example)
        configs = {"example": (example, rule.facts), "near": near_of(rule)}
        if rule.claim == "ignored":
            configs["without"] = (without_the_key(rule), rule.facts)
        for name, (config, given) in configs.items() if rule.claim in RUN else ():
            world_size = given["gpus"] if given.get("gpus", 9) < 4 else 1
            cases[world_size].append((config, reader_of(config, given), dict(given)))
            keys[world_size].append((rule.id, name))
    found: dict[str, dict[str, Outcome]] = defaultdict(dict)
    for world_size, configs in cases.items():
        for (rule_id, name), outcome in zip(keys[world_size], ranks(outcomes, world_size, configs)[0], strict=True):
            found[rule_id][name] = outcome
    assert len(found) > 80
    wrong = [
        f"{name} {RULES[name].claim}: {said['example'].error}; near: {said['near'].error}"
        for name, said in found.items()
        if not shows(RULES[name], said["example"], said["near"], said.get("without"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_rule_does_not_report_what_is_close_to_its_example(rule: Rule) -> None:
    near, given = near_of(rule)
    assert rule.id in ids(lint_example(rule))
    assert rule.id not in ids(lint_example(rule, near, given))


def test_an_error_is_a_claim_that_was_run() -> None:
    assert [rule.id for rule in RULES.values() if rule.severity == "error" and rule.claim not in RUN] == []
    assert [rule.id for rule in RULES.values() if rule.claim == "raises" and rule.severity == "info"] == []


def test_the_examples_differ_from_what_is_close_to_them() -> None:
    assert [rule.id for rule in RULES.values() if json.dumps(rule.example) == json.dumps(rule.near)] == [
        rule.id for rule in RULES.values() if rule.near_facts is not None and rule.example == rule.near
    ]
