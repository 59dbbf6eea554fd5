"""The strict YAML reader."""

import math
from typing import Any

import pytest
import yaml

from toolkit.config import strict_yaml
from toolkit.config.source_text import Mark, dotted, quote
from toolkit.config.strict_yaml import YamlReader, parse


@pytest.fixture(params=["CSafeLoader", "SafeLoader"], autouse=True)
def _both_parsers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(yaml, request.param):
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(strict_yaml, "_LOADER", getattr(yaml, request.param))


def typed(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E6", 1e6),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("+7", 7),
        ("0", 0),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("1e400", math.inf),
        ("-.inf", -math.inf),
    ],
)
def test_an_unquoted_scalar_has_the_value_it_shows(text: str, value: Any) -> None:
    assert typed(parse(f"a: {text}").value["a"]) == typed(value)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "yes",
        "on",
        "off",
        "y",
        "n",
        "12:30",
        "1:20:30",
        "2024-01-01",
        "0x10",
        "0o7",
        "010",
        "_1",
        "1__0",
        "1_",
        "e5",
        ".",
        "nan",
        "inf",
        "1.2.3",
        "1e",
        "=",
        "NaN",
        "١",
    ],
)
def test_what_only_yaml_1_1_takes_for_something_else_stays_a_string(text: str) -> None:
    assert parse(f"a: x\nb: {text}\n").value["b"] == text


def test_a_quoted_number_is_a_string() -> None:
    assert parse("""{a: "4", b: '1e-4', c: "null"}""").value == {"a": "4", "b": "1e-4", "c": "null"}


def test_nan_is_not_a_number() -> None:
    assert math.isnan(parse(".nan").value)


def test_every_value_keeps_its_line_and_column() -> None:
    written = parse("a:\n  b: [1,\n      2]\n  c:\n    d: x\n").written
    places = {dotted(path): (place.key, place.value) for path, place in written.items()}
    assert places["a.b[1]"] == (Mark(3, 7), Mark(3, 7))
    assert places["a.c"] == (Mark(4, 3), Mark(5, 5))
    assert places["a.c.d"] == (Mark(5, 5), Mark(5, 8))


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, 1, "a is given twice, on lines 1 and 3. Keep one of them."),
        ("a: {b: 1, b: [2, {c: 3}]}\nd: 1\n", 1, 11, "a.b is given twice, on lines 1 and 1. Keep one of them."),
        ("a: !!python/name:os.system x\n", 1, 4, 'tag "!!python/name:os.system" is not allowed.'),
        ("a: !foo {b: 1}\n", 1, 4, 'tag "!foo" is not allowed.'),
        ("a: !!int '4'\n", 1, 4, 'tag "!!int" is not allowed.'),
        ("a: &x 1\nb: *x\n", 1, 4, "anchors (&name) and aliases (*name) are not allowed."),
        ("a: *x\n", 1, 4, "anchors (&name) and aliases (*name) are not allowed."),
        ("a: 1\n<<: {b: 2}\n", 2, 1, "merge keys (<<) are not allowed."),
        ("[a, b]: 1\n", 1, 1, "a key must be a plain name."),
        ("!!str a: 1\n", 1, 1, "a key must be a plain name."),
        ("a: 1\n---\nb: 2\n", 2, 1, "a second document begins here."),
        ("a: {b: 1\n", 2, 1, "this is not YAML: while parsing a flow mapping"),
        ("a: 1\n  b: 2\n", 2, 4, "this is not YAML: mapping values are not allowed"),
        ("a:\n\tb: 1\n", 2, 1, "this is not YAML: while scanning for the next token, found character"),
        ("a: 1\nb: \x07\n", 2, 4, "character U+0007 is not allowed in YAML."),
        ('a: "\\0"\n', 1, 4, 'a: "\\x00" contains an invalid character.'),
        ("a: 9223372036854775808\n", 1, 4, "a: 9223372036854775808 does not fit into 64 bits."),
        (f"a: {'9' * 5000}\n", 1, 4, "a: 9999999999999999999999999…9999999999 does not fit into 64 bits."),
        ("[" * 5000, 1, YamlReader.max_depth + 2, "nested deeper than 32 levels."),
    ],
)
def test_what_hides_or_breaks_meaning_is_a_problem(text: str, line: int, column: int, message: str) -> None:
    (problem,) = parse(text).problems
    assert problem.mark == (line, column)
    assert problem.message.startswith(message)


def test_a_tab_gets_a_hint() -> None:
    assert parse("a:\n\tb: 1\n").problems[0].message.endswith("Indent with spaces, not tabs.")


def test_the_first_of_two_values_counts() -> None:
    assert parse("a: 1\na: {b: [2]}\nc: 3\n").value == {"a": 1, "c": 3}


def test_a_python_tag_executes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    parse('a: !!python/object/apply:os.system ["echo executed"]\n')
    assert capfd.readouterr().out == ""


def test_a_bomb_of_aliases_is_one_problem_and_holds_no_memory() -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 30))
    document = parse("l0: &l0 [lol]\n" + levels)
    assert len(document.problems) == 1
    assert document.value is None


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "---\n...\n"])
def test_a_text_without_a_value_is_empty(text: str) -> None:
    assert parse(text).empty


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("a", '"a"'),
        ('say "x"', '"say \\"x\\""'),
        ("a\nb\x1b[31m", '"a\\nb\\x1b[31m"'),
        ("é…", '"é…"'),
        ("x" * 50, '"' + "x" * 25 + "…" + "x" * 10 + '"'),
    ],
)
def test_what_is_quoted_stays_on_one_line_and_cannot_steer_a_terminal(text: str, quoted: str) -> None:
    assert quote(text) == quoted
