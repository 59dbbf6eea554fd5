"""The checks of `dstk demo --chat` and `--dpo`: questions before and after training, and whether answers are right.

An answer is right if it has all required phrases and no forbidden one; nothing judges its other words.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from toolkit.cli.margin_check import MarginResult

Kind = Literal["taught", "kept"]

_NEEDED_SHARE = {"taught": 0.8, "kept": 0.8}
"""Shares of right answers that a demo needs. Another CPU rounds differently, so a small model may lose an answer."""
_BEFORE_CHARACTERS = 60
_AFTER_CHARACTERS = 180


@dataclass(frozen=True, kw_only=True)
class AnswerCheck:
    """A question, and what its right answers say.

    `kind`: `taught` asks for what the training data teaches, in other words or of other things, `kept` for general
    knowledge that the training data does not have. `topic` is that of the rows of the training data that teach it.
    """

    kind: Kind
    topic: str
    question: str
    required: tuple[tuple[str, ...], ...]
    """One phrase of each tuple must be in the answer, as whole words in any case."""
    forbidden: tuple[str, ...]
    """No answer with one of these phrases is right."""

    def accepts(self, answer: str) -> bool:
        """Say whether the answer is right."""
        has_required = all(any(_has(answer, phrase) for phrase in phrases) for phrases in self.required)
        return has_required and not any(_has(answer, phrase) for phrase in self.forbidden)


@dataclass(frozen=True, kw_only=True)
class CheckedAnswer:
    """Answers to the question of a check, before and after training."""

    check: AnswerCheck
    before: str
    after: str

    @property
    def was_right(self) -> bool:
        """Say whether the answer before training is right."""
        return self.check.accepts(self.before)

    @property
    def is_right(self) -> bool:
        """Say whether the answer after training is right."""
        return self.check.accepts(self.after)


@dataclass(frozen=True, kw_only=True)
class KindResult:
    """Numbers of right answers to all questions of a kind, and whether they are enough."""

    kind: Kind
    asked: int
    """The questions that count: of `kept`, those that were answered right before."""
    right: int
    right_before: int
    all_asked: int

    @property
    def needed(self) -> int:
        """The number of right answers that a pass takes."""
        return math.ceil(self.asked * _NEEDED_SHARE[self.kind])

    @property
    def passed(self) -> bool:
        """Say whether enough answers are right after training."""
        return self.right >= self.needed

    @property
    def sentence(self) -> str:
        """The result on one line."""
        if self.kind == "taught":
            counted = f"{self.right} of {self.asked} are right after training ({self.right_before} before)"
        elif self.asked == 0:
            return f"{self.kind}: none of {self.all_asked} answers was right before training, so none could be lost"
        else:
            counted = f"{self.right} of the {self.asked} that were right before are right after training"
        return f"{self.kind}: {counted}; {self.needed} needed: {'passed' if self.passed else 'FAILED'}"


def read_checks(path: Path) -> tuple[AnswerCheck, ...]:
    """Read a check from each line of a JSONL file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(
        AnswerCheck(
            kind=row["kind"],
            topic=row["topic"],
            question=row["question"],
            required=tuple(tuple(phrases) for phrases in row["required"]),
            forbidden=tuple(row["forbidden"]),
        )
        for row in rows
    )


def kind_results(answers: Sequence[CheckedAnswer]) -> tuple[KindResult, ...]:
    """Count right answers. What the model did not know before training, it cannot keep: such questions do not count."""
    taught = [answer for answer in answers if answer.check.kind == "taught"]
    general = [answer for answer in answers if answer.check.kind == "kept"]
    known = [answer for answer in general if answer.was_right]
    return (
        KindResult(
            kind="taught",
            asked=len(taught),
            right=sum(answer.is_right for answer in taught),
            right_before=sum(answer.was_right for answer in taught),
            all_asked=len(taught),
        ),
        KindResult(
            kind="kept",
            asked=len(known),
            right=sum(answer.is_right for answer in known),
            right_before=len(known),
            all_asked=len(general),
        ),
    )


def write_answers(answers: Sequence[CheckedAnswer], path: Path) -> None:
    """Write the whole answers, as a line of JSON for each question."""
    rows = [
        {
            "kind": answer.check.kind,
            "question": answer.check.question,
            "before": answer.before,
            "after": answer.after,
            "right_before": answer.was_right,
            "right_after": answer.is_right,
        }
        for answer in answers
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def print_answers(answers: Sequence[CheckedAnswer], *, width: int) -> None:
    """Print a table of the questions with both answers, long ones shortened, and whether they are right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), leading=1, expand=True)
    table.add_column("question", ratio=4, style="bold")
    table.add_column("before", ratio=4, style="yellow")
    table.add_column("after", ratio=7, style="green")
    table.add_column("checked", no_wrap=True)
    for index, answer in enumerate(answers):
        is_last_of_kind = answer.check.kind != answers[min(index + 1, len(answers) - 1)].check.kind
        verdict = Text(f"{answer.check.kind}\n")
        verdict.append(_word(answer.was_right), style=_style(answer.was_right))
        verdict.append(" → ")
        verdict.append(_word(answer.is_right), style=_style(answer.is_right))
        table.add_row(
            Text(answer.check.question),
            Text(_shortened(answer.before, _BEFORE_CHARACTERS)),
            Text(_shortened(answer.after, _AFTER_CHARACTERS)),
            verdict,
            end_section=is_last_of_kind,
        )
    Console(width=width, highlight=False).print(table)


def print_results(results: Sequence[KindResult | MarginResult]) -> None:
    """Print a line for each kind of question, and for what the run wrote."""
    for result in results:
        click.echo(click.style(result.sentence, fg="green" if result.passed else "red", bold=True))


def _has(answer: str, phrase: str) -> bool:
    """Find whole words: 3 is neither in 13 nor in 3.5 or 2.3."""
    pattern = rf"(?<!\w)(?<!\d\.){re.escape(_normalized(phrase))}(?!\w)(?!\.\d)"
    return re.search(pattern, _normalized(answer)) is not None


def _normalized(text: str) -> str:
    return " ".join(text.replace("’", "'").casefold().split())


def _shortened(answer: str, characters: int) -> str:
    words = " ".join(answer.split())
    return words if len(words) <= characters else words[:characters].rpartition(" ")[0] + " …"


def _word(is_right: bool) -> str:
    return "right" if is_right else "wrong"


def _style(is_right: bool) -> str:
    return "green" if is_right else "red"
