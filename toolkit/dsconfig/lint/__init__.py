"""Lint of DeepSpeed configs: what is wrong with a file, what DeepSpeed would do with it, and how to mend it."""

from toolkit.dsconfig.lint.finding import Finding, Rule, Severity
from toolkit.dsconfig.lint.run import Linted, Linter
from toolkit.dsconfig.lint.view import Facts, Runner

__all__ = ["Facts", "Finding", "Linted", "Linter", "Rule", "Runner", "Severity"]
