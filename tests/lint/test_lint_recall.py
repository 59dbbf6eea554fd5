"""Mistakes that people made and reported, each with the link of the issue: all are found, at the key that is wrong."""

import re
from pathlib import Path

from lint_cases import reported

FILE = Path(__file__).with_name("reported_mistakes.json")


def test_the_mistakes_of_issues_are_found() -> None:
    cases = reported(FILE)
    assert len(cases) >= 120
    assert [(case.at, case.link) for case in cases if case.finding() is None] == []


def test_mistakes_that_were_written_unseen_are_found() -> None:
    cases = reported(FILE, "written_unseen")
    assert len(cases) >= 40
    assert [case.at for case in cases if case.finding() is None] == []


def test_each_reported_mistake_has_its_link() -> None:
    pattern = r"https://github\.com/[^/]+/[^/]+/(issues|pull)/\d+"
    assert [case.link for case in reported(FILE) if not re.fullmatch(pattern, case.link)] == []


def test_90_mistakes_are_from_issues_of_the_programs_that_read_the_configs() -> None:
    programs = r"https://github\.com/(deepspeedai/DeepSpeed|huggingface/(accelerate|transformers))/.*"
    assert sum(bool(re.fullmatch(programs, case.link)) for case in reported(FILE)) >= 90


def test_without_its_mistake_a_reported_config_is_clean() -> None:
    """Else a finding that a config has anyway would pass for the mistake's."""
    cases = [*reported(FILE, mistaken=False), *reported(FILE, "written_unseen", mistaken=False)]
    found = [(case.at, case.link) for case in cases if case.finding() is not None]
    assert found == []
