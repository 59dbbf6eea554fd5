import json
import os
from pathlib import Path

import hjson
import pytest
from lint_cases import document, ids, lint

from toolkit.lint.document import MAX_BYTES, NotAConfigError, read_json
from toolkit.lint.linter import Linter, parse, read_config_text


def place(text: str, rule: str) -> tuple[int, int]:
    (finding,) = [one for one in lint(text) if one.rule.id == rule]
    return finding.mark


def test_a_value_is_found_at_its_line_and_column() -> None:
    assert place('{\n  "train_batch_size": 8,\n  "gradient_clipping":  "1.0"\n}', "DS202") == (3, 25)


def test_an_unknown_key_is_found_at_the_key() -> None:
    assert place('{"train_batch_size": 8,\n   "gradient_cliping": 1.0}', "DS101") == (2, 4)


def test_columns_count_characters_and_not_bytes() -> None:
    assert place('{"train_batch_size": 8, "_comment": "für", "gradient_cliping": 1.0}', "DS101") == (1, 44)


def test_a_key_of_a_yaml_file_is_found_at_its_line() -> None:
    text = "distributed_type: DEEPSPEED\n# ours\ndeepspeed_config:\n  zero_stage: 2\n  zero3_save: true\n"
    assert place(text, "AC102") == (5, 3)


def test_a_value_that_accelerate_passes_on_is_found_at_its_key() -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  offload_param_device: cpu\n"
    assert place(text, "DS501") == (4, 25)


def test_every_value_of_a_json_text_keeps_its_span() -> None:
    text = '{"a": [1, {"b": "c"}], "d": {}}'
    read = read_json(text, "x.json")
    shown = {path: text[span.start : span.end] for path, span in read.spans.items()}
    assert shown == {
        (): text,
        ("a",): '[1, {"b": "c"}]',
        ("a", 0): "1",
        ("a", 1): '{"b": "c"}',
        ("a", 1, "b"): '"c"',
        ("d",): "{}",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5e8", 5e8),
        ("-0", 0),
        ("1.50", 1.5),
        ('"\\u00e9\\n"', "é\n"),
        ("[[], {}]", [[], {}]),
        ("null", None),
    ],
)
def test_json_is_read_as_python_reads_it(text: str, value: object) -> None:
    assert read_json(f'{{"x": {text}}}', "x.json").value == {"x": value}


def test_the_last_of_two_equal_keys_wins_as_in_python() -> None:
    assert read_json('{"a": 1, "a": {"b": 2}}', "x.json").value == {"a": {"b": 2}}


def test_a_key_given_twice_stops_deepspeed_and_not_the_trainer() -> None:
    text = '{"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_clipping": 0.5}'
    assert "DS005" in ids(lint(text, runner="deepspeed"), "error")
    assert "DS005" in ids(lint(text, runner="trainer"), "warning")


@pytest.mark.parametrize(
    "text",
    [
        "{a: 1\n b: true\n}",
        "{'a': 'x'}",
        '{"a": fp16\n}',
        "{a: [1\n2]}",
        "{a: {b: 1\nc: 2}\nd: 1e-4 // x\n}",
        "{a: 1,\n}",
    ],
)
def test_hjson_is_read_as_deepspeed_reads_it_and_the_trainer_stops_on_it(text: str) -> None:
    assert read_json(text, "x.json").value == json.loads(json.dumps(hjson.loads(text)))
    text = text.replace("{", '{"train_batch_size": 8, "zero_optimization": {"stage": 1}, ', 1)
    stops = {"DS001", "DS002", "DS008"}
    assert stops & {*ids(lint(text, runner="trainer"), "error")}
    assert not stops & {*ids(lint(text, runner="deepspeed"))}
    assert not stops & {*ids(lint(text), "error", "warning")}


def test_comments_of_each_kind_are_skipped() -> None:
    text = '{ // one\n "a": 1, # two\n /* three\n */ "b": 2 }'
    assert read_json(text, "x.json").value == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1', "1:8"),
        ('{"a" 1}', "1:6"),
        ('{"a": 1 "b": 2}', "1:9"),
        ("{a: x}", "1:5"),
        ('{"a": 1} {}', "1:10"),
        ('{"a": x}', "1:7"),
        ('{"a": "x\ty"}', "1:7"),
        ('{"a": 01}', "1:7"),
        ('{"a": "\\q"}', "1:7"),
        ("", "1:1"),
        ('{"a": [1 2]}', "1:10"),
    ],
)
def test_invalid_json_is_one_line_with_its_position(text: str, place: str) -> None:
    with pytest.raises(NotAConfigError) as caught:
        read_json(text, "x.json")
    assert str(caught.value).startswith(f"x.json:{place}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "3", '"zero"', "null"])
def test_json_that_is_not_an_object_is_not_a_config(text: str) -> None:
    with pytest.raises(NotAConfigError, match="a config is an object"):
        lint_text(text)


def lint_text(text: str) -> None:
    from toolkit.lint import LintContext
    from toolkit.lint.linter import check_document

    check_document(read_json(text, "x.json"), LintContext())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, "{" * 60])
def test_deep_nesting_is_a_one_line_error(text: str) -> None:
    with pytest.raises(NotAConfigError):
        read_json(text, "x.json")


@pytest.mark.parametrize(
    "text",
    [
        "a: [" * 3_000,
        "a: &x [*x]\n",
        "a: *b\n",
        "---\na: 1\n---\nb: 2\n",
        "a: !!python/object:os.system x\n",
        "\ta: 1\n",
        "a: b: c",
    ],
)
def test_hostile_yaml_is_a_one_line_error_or_a_plain_value(text: str) -> None:
    said = ""
    try:
        document(text)
    except NotAConfigError as error:
        said = str(error)
    assert "\n" not in said


def test_nothing_in_yaml_is_executed(tmp_path: Path) -> None:
    file = tmp_path / "made"
    read = document(f"a: !!python/object/apply:os.mkdir ['{file}']\n")
    assert read.value == {"a": [str(file)]}
    assert not file.exists()


def test_yaml_is_read_as_accelerate_reads_it() -> None:
    read = document("a: no\nb: 1e-4\nc: 0x10\nd: 'no'\ne: ~\nf: 1.0\n")
    assert read.value == {"a": False, "b": "1e-4", "c": 16, "d": "no", "e": None, "f": 1.0}


def test_a_file_that_is_not_a_small_regular_text_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"{\0}")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    (tmp_path / "huge.json").write_bytes(b" " * (MAX_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("binary.json", "latin.json", "huge.json", "pipe.json", "missing.json", "/dev/zero", "x\0y"):
        with pytest.raises(NotAConfigError) as caught:
            read_config_text(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_control_characters_of_a_name_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\nb.json"
    path.write_text('{"gradient_cliping\\u001b": 1, "train_batch_size": 8}')
    result = Linter().run([str(path)])
    shown = "".join(finding.file + finding.message for finding in result.findings)
    assert shown
    assert "\x1b" not in shown
    assert "\n" not in shown


def test_a_file_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text('{"train_batch_size": 8}')
    result = Linter().run([str(tmp_path / "missing.json"), str(tmp_path / "good.json")])
    assert (result.files, len(result.problems)) == (1, 1)


def test_a_directory_is_searched_for_configs_and_other_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "zero.json").write_text('{"zero_optimization": {"stage": 1}}')
    (tmp_path / "accelerate.yaml").write_text("distributed_type: DEEPSPEED\n")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "trainer_state.json").write_text(
        '{"train_batch_size": 8, "epoch": 1.0, "max_steps": 3, "log_history": []}'
    )
    result = Linter().run([str(tmp_path)])
    assert (result.files, result.skipped_files, result.problems) == (2, 3, [])


def test_the_json_that_a_config_of_accelerate_names_is_result_for_accelerate(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto"}')
    result = Linter().run([str(tmp_path / "a.yaml")])
    assert result.files == 2
    assert "AC109" in [finding.rule.id for finding in result.findings]


def test_a_file_is_parsed_by_its_suffix(tmp_path: Path) -> None:
    assert parse(tmp_path / "x.yml", "a: 1").syntax == "yaml"
    assert parse(tmp_path / "x.json", '{"a": 1}').syntax == "json"
