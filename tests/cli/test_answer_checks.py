"""The checks of the demos with questions: which answers are right, how many must be, what a run's margins must do, and
that data and checks fit each other."""

import json

import pytest

from toolkit.cli.answer_checks import (
    AnswerCheck,
    CheckedAnswer,
    kind_results,
    print_answers,
    print_results,
    read_checks,
)
from toolkit.cli.margin_check import margin_results
from toolkit.config.gallery import find_recipes

CHECKS = read_checks(find_recipes() / "demo-chat-checks.jsonl")
TAUGHT = [check for check in CHECKS if check.kind == "taught"]
KEPT = [check for check in CHECKS if check.kind == "kept"]

WRONG_ANSWERS = {
    "What does ZeRO stage 2 shard?": (
        "ZeRO-2 shards the optimizer states over the data-parallel ranks; "
        "every rank still holds all gradients and parameters."
    ),
    "Which ZeRO stages can I use with a pipeline?": (
        "Pipeline stages 0 and 1 shard the optimizer states over the data-parallel ranks; "
        "parameters stay whole on every rank."
    ),
    "What is the capital of France?": (
        "The capital of France is the largest city by population, and it is located in the southwest of the country."
    ),
}
"""Answers of SmolLM2-135M after an earlier version of the demo, which trained on no general questions."""


def _rows():
    text = (find_recipes() / "demo-chat.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


PAIRS = [json.loads(line) for line in (find_recipes() / "demo-dpo.jsonl").read_text(encoding="utf-8").splitlines()]
DPO_CHECKS = read_checks(find_recipes() / "demo-dpo-checks.jsonl")


def _answers_of(topic):
    return {row["messages"][1]["content"] for row in _rows() if row["topic"] == topic}


TOPICS = sorted({row["topic"] for row in _rows()} - {"general"})


def _check(required, forbidden=(), kind="taught"):
    return AnswerCheck(kind=kind, topic="t", question="q", required=required, forbidden=forbidden)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("It has three sides.", True),
        ("IT HAS THREE\n SIDES", True),
        ("It has 3 sides", True),
        ("It has 13 sides", False),
        ("It has 3.5 sides", False),
        ("It has 2.3 sides", False),
        ("It has three sides, or four.", False),
        ("It has three corners", False),
        ("", False),
    ],
)
def test_a_right_answer_has_all_required_phrases_as_whole_words_and_no_forbidden_one(answer, is_right):
    check = _check(required=(("3", "three"), ("sides",)), forbidden=("four",))
    assert check.accepts(answer) == is_right


def _checked(kind, was_right, is_right):
    words = {True: "yes", False: "no"}
    check = _check(required=(("yes",),), kind=kind)
    return CheckedAnswer(check=check, before=words[was_right], after=words[is_right])


def test_four_of_five_right_answers_pass_and_three_do_not():
    general = [_checked("kept", True, True)]
    enough = [_checked("taught", False, True)] * 4 + [_checked("taught", False, False)]
    too_few = [_checked("taught", False, True)] * 3 + [_checked("taught", False, False)] * 2
    assert [result.passed for result in kind_results(enough + general)] == [True, True]
    assert [result.passed for result in kind_results(too_few + general)] == [False, True]


def test_what_was_not_known_before_training_does_not_count_as_kept():
    taught = [_checked("taught", False, True)]
    general = [_checked("kept", True, False), _checked("kept", True, True), *[_checked("kept", False, True)] * 8]
    result = kind_results(taught + general)[1]
    assert (result.right, result.asked, result.passed) == (1, 2, False)
    assert result.sentence == ("kept: 1 of the 2 that were right before are right after training; 2 needed: FAILED")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_every_question_and_fits_the_terminal(width, capsys):
    answers = [CheckedAnswer(check=check, before="word " * 60, after="answer " * 40) for check in CHECKS]
    print_answers(answers, width=width)
    print_results(kind_results(answers))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert printed.count("wrong → wrong") == len(CHECKS)
    assert printed.count("…") == 2 * len(CHECKS)
    header = next(line for line in printed.splitlines() if "before" in line)
    questions = " ".join(" ".join(line[: header.index("before")] for line in printed.splitlines()).split())
    assert all(check.question in questions for check in CHECKS)


def test_no_checked_question_is_in_the_training_data():
    asked = {turn["content"].casefold() for row in _rows() for turn in row["messages"] if turn["role"] == "user"}
    assert len(asked) == len(_rows()) == 168
    assert not asked & {check.question.casefold() for check in CHECKS}


def test_every_taught_topic_is_checked_and_has_one_answer():
    assert len(TOPICS) == 14
    assert {check.topic for check in TAUGHT} == {*TOPICS}
    assert all(len(_answers_of(topic)) == 1 for topic in TOPICS)


def test_no_training_answer_has_what_a_general_question_asks_for():
    assert len(KEPT) == 12
    for check in KEPT:
        assert not [row for row in _rows() if check.accepts(row["messages"][1]["content"])], check.question


@pytest.mark.parametrize("check", TAUGHT, ids=lambda check: check.question)
def test_a_taught_answer_passes_its_own_checks_and_no_check_of_another_topic(check):
    for topic in TOPICS:
        (answer,) = _answers_of(topic)
        assert check.accepts(answer) == (topic == check.topic), topic


def test_what_another_stage_of_zero_shards_is_wrong_under_any_name():
    stages = [topic for topic in TOPICS if topic.removeprefix("zero-").isdigit()]
    assert stages == ["zero-0", "zero-1", "zero-2", "zero-3"]
    for check in (check for check in TAUGHT if check.topic in stages):
        name = f"ZeRO-{check.topic[-1]}"
        for other in stages:
            (answer,) = _answers_of(other)
            renamed = answer.replace(f"ZeRO-{other[-1]}", name)
            assert renamed.startswith(name)
            assert check.accepts(renamed) == (other == check.topic), (check.question, renamed)


def test_wrong_answers_of_an_earlier_demo_do_not_pass():
    by_question = {check.question: check for check in CHECKS}
    for question, answer in WRONG_ANSWERS.items():
        assert not by_question[question].accepts(answer), question


def test_the_chosen_answer_of_a_pair_has_the_taught_style_and_the_rejected_one_the_same_words():
    assert len(PAIRS) == 48
    assert len({pair["prompt"][0]["content"] for pair in PAIRS}) == len(PAIRS)
    taught = [check for check in DPO_CHECKS if check.kind == "taught"]
    for pair in PAIRS:
        chosen, rejected = (pair[name][0]["content"] for name in ("chosen", "rejected"))
        said = chosen.removeprefix("In short, ")
        assert said != chosen
        assert said.casefold() == rejected.casefold()
        assert all(check.accepts(chosen) and not check.accepts(rejected) for check in taught)


def test_no_question_of_the_pairs_is_asked():
    assert len([check for check in DPO_CHECKS if check.kind == "taught"]) == 12
    assert [check for check in DPO_CHECKS if check.kind == "kept"] == KEPT
    assert not {pair["prompt"][0]["content"] for pair in PAIRS} & {check.question for check in DPO_CHECKS}


def _margins_of(tmp_path, margins, accuracy):
    steps = [{"objective": {"rewards/margins": margin, "rewards/accuracies": accuracy}} for margin in margins]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return margin_results(path)


def test_margins_must_grow_and_nine_of_ten_pairs_must_be_in_order(tmp_path):
    growing = [0.0, 0.5, *[1.0] * 16, 2.0, 3.0]
    (result,) = _margins_of(tmp_path, growing, 0.9)
    assert result.passed
    assert result.sentence == (
        "rewards: margins of pairs grew from 0.25 to 2.50 nats, and the chosen answer has the larger reward in 90% of "
        "the last pairs; growth and 90% needed: passed"
    )
    assert [result.passed for result in _margins_of(tmp_path, growing, 0.89)] == [False]
    (shrunk,) = _margins_of(tmp_path, growing[::-1], 1.0)
    assert not shrunk.passed
    assert "went from 2.50 to 0.25 nats" in shrunk.sentence


def test_a_run_without_pairs_has_no_margins(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0, "objective": null}\n{"loss": 0.9}\n')
    assert margin_results(tmp_path / "metrics.jsonl") == ()
