"""lint against the readers on composed configs: where lint says error a reader fails, and the other way round."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lint_cases import Config, document, lint
from lint_composed import composed, composed_yaml
from lint_readers import NO_COMPILER, completed, outcomes

from toolkit.lint import Finding
from toolkit.lint.linter import guess_runner
from toolkit.lint.view import LintContext

ARGUMENTS: Config = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 2}
ARGUMENTS |= {"learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
ARGUMENTS |= {"max_grad_norm": 1.0, "fp16": False, "bf16": False, "warmup_steps": 0}
"""TrainingArguments, all of which lint knows."""

Ranks = Callable[..., list[Any]]


def errors(config: Config | str, runner: str) -> list[Finding]:
    if isinstance(config, str):
        return [one for one in lint(config) if one.severity == "error"]
    context = {"trainer": ARGUMENTS, "gpus": 1} if runner == "trainer" else {"gpus": 1}
    found = lint(config, runner=runner, **context)  # type: ignore[arg-type]
    return [one for one in found if one.severity == "error"]


def without(config: Config | str, finding: Finding) -> Config | str:
    config_without = copy.deepcopy(document(config).value)
    inner = config_without
    for part in finding.path[:-1]:
        inner = inner[part]
    inner.pop(finding.path[-1], None)
    return yaml.safe_dump(config_without) if isinstance(config, str) else config_without


def check_that_lint_and_the_readers_agree(ranks: Ranks, count: int, seed: int) -> None:
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}')
    cases: list[tuple[Config | str, str, Config]] = [
        (text, "accelerate", {}) for text in composed_yaml(count // 3, seed)
    ]
    for config in composed(count, seed):
        runner = guess_runner(config, LintContext())
        cases.append((completed(config, runner), runner, {"trainer": ARGUMENTS} if runner == "trainer" else {}))
    (read,) = ranks(outcomes, 1, cases, timeout_seconds=3600)
    known = [(case, one) for case, one in zip(cases, read, strict=True) if NO_COMPILER not in (one.error or "")]
    failed = [(case, one.error) for case, one in known if one.error]
    assert len(known) > 0.8 * len(cases)
    assert len(failed) > count / 4
    assert [(case[0], why) for case, why in failed if not errors(*case[:2])] == []
    # Else the reader ignores what lint calls an error: without the key it trains the same.
    doubtful = [(case, one, found) for case, one in known if not one.error and (found := errors(*case[:2]))]
    (ignored,) = ranks(outcomes, 1, [(without(case[0], found[0]), *case[1:]) for case, _, found in doubtful])
    wrong = [
        (case[0], [one.message for one in found])
        for (case, one, found), other in zip(doubtful, ignored, strict=True)
        if one.weights != other.weights
    ]
    assert wrong == []


def test_lint_and_the_readers_agree(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_that_lint_and_the_readers_agree(ranks, 120, seed=1)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 8))
def test_lint_and_the_readers_agree_on_thousands_of_configs(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    check_that_lint_and_the_readers_agree(ranks, 600, seed)
