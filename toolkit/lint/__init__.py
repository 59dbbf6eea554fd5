"""Lint DeepSpeed configs: what is wrong with a file, what DeepSpeed would do with it, and how to fix it."""

from toolkit.lint.finding import Finding, Rule, Severity
from toolkit.lint.linter import Linter, LintResult
from toolkit.lint.view import LintContext, Runner

__all__ = ["LintContext", "Finding", "LintResult", "Linter", "Rule", "Runner", "Severity"]
