import json
from pathlib import Path

import pytest
from lint_cases import document, ids, lint_example, planted

from toolkit.lint import Finding, LintContext, Linter, Rule
from toolkit.lint.document import ConfigDocument, read_json
from toolkit.lint.finding import RULES
from toolkit.lint.fix import Fixed, fix, write
from toolkit.lint.linter import check_document

fixable = pytest.mark.parametrize(
    "rule", [rule for rule in RULES.values() if rule.fixable], ids=[rule.id for rule in RULES.values() if rule.fixable]
)


def fix_text(text: str, **context: object) -> Fixed:
    def again(new: str) -> tuple[ConfigDocument, list[Finding]]:
        read = document(new)
        return read, check_document(read, LintContext(**context))  # type: ignore[arg-type]

    return fix(document(text), again)


@fixable
def test_fix_corrects_the_example_of_a_rule(rule: Rule) -> None:
    text = rule.example if isinstance(rule.example, str) else json.dumps(rule.example, indent=2)

    def again(new: str) -> tuple[ConfigDocument, list[Finding]]:
        # A recipe's conflicts follow from the config: an empty one has none.
        findings = lint_example(rule, new)
        gone = [one for one in findings if not (one.rule.id.startswith("RC") and one.path not in document(new).spans)]
        return document(new), gone

    fixed = fix(document(text), again)
    assert any(change.startswith(rule.id) for change in fixed.changes), fixed
    assert rule.id not in ids(again(fixed.text)[1])


def test_fix_adds_no_error_to_planted_mistakes() -> None:
    cases = planted(60, seed=5)
    assert len(cases) == 60
    for case in cases:
        text = json.dumps(case.config, indent=2)
        context = {"gpus": 8} | {key: value for key, value in case.context.items() if key != "runner"}
        before = ids(check_document(document(text), LintContext(**context)), "error")
        fixed = fix_text(text, **context)
        after = check_document(read_json(fixed.text, "x.json"), LintContext(**context))
        assert len(ids(after, "error")) <= len(before)
        assert fix_text(fixed.text, **context).changes == []


def test_json_keeps_order_indentation_and_everything_else() -> None:
    text = (
        '{\n    "zero_optimization": {\n        "stage": "2",\n        "overlap_com": true\n    },\n\n'
        '    "train_batch_size":   "64",\n    "gradient_clipping": 1.0, "bf16": {"enabled": true}\n}\n'
    )
    assert fix_text(text).text == text.replace('"2"', "2").replace("overlap_com", "overlap_comm").replace('"64"', "64")


def test_a_removed_member_loses_its_line_and_its_comma() -> None:
    first = '{\n  "amp": {"enabled": false},\n  "train_batch_size": 8,\n  "gradient_clipping": 1.0\n}\n'
    last = '{\n  "train_batch_size": 8,\n  "gradient_clipping": 1.0,\n  "amp": {"enabled": false}\n}\n'
    inline = '{"amp": {}, "train_batch_size": 8, "gradient_clipping": 1.0}'
    assert fix_text(first).text == '{\n  "train_batch_size": 8,\n  "gradient_clipping": 1.0\n}\n'
    assert fix_text(last).text == '{\n  "train_batch_size": 8,\n  "gradient_clipping": 1.0\n}\n'
    assert fix_text(inline).text == '{"train_batch_size": 8, "gradient_clipping": 1.0}'


def test_a_new_member_gets_its_own_line() -> None:
    assert (
        fix_text('{\n  "train_batch_size": 8\n}\n').text
        == '{\n  "train_batch_size": 8,\n  "gradient_clipping": 1.0\n}\n'
    )


def test_comments_in_json_are_kept() -> None:
    text = '{\n  // ours\n  "train_batch_size": "8", # eight\n  "gradient_clipping": 1.0\n}\n'
    assert fix_text(text).text == text.replace('"8"', "8")


ACCELERATE = """# eight GPUs
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED   # not FSDP
deepspeed_config:
  # ZeRO
  zero_stage: 2
  offload_param_device: cpu  # more room
  zero3_init_flag: true
  gradient_clippin: 1.0

num_processes: 8
mixed_precision: no
"""


def test_yaml_keeps_order_and_comments() -> None:
    fixed = fix_text(ACCELERATE)
    assert fixed.text == (
        ACCELERATE.replace("  offload_param_device: cpu  # more room\n", "")
        .replace("  zero3_init_flag: true\n", "")
        .replace("gradient_clippin:", "gradient_clipping:")
        .replace("mixed_precision: no", "mixed_precision: 'no'")
    )
    assert not [one for one in check_document(document(fixed.text), LintContext()) if one.edits]


def test_fixing_twice_changes_nothing() -> None:
    once = fix_text(ACCELERATE).text
    assert fix_text(once) == Fixed(once, [])


def test_files_are_fixed_in_place_and_keep_their_mode(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "8", "gradient_clipping": 1.0}')
    path.chmod(0o640)
    linted = Linter(fixes=True).run([str(path)])
    assert json.loads(path.read_text())["train_batch_size"] == 8
    assert linted.changes == {str(path): ["DS202 train_batch_size set to 8"]}
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["ds.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text('{"train_batch_size": "8", "gradient_clipping": 1.0}')
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    Linter(fixes=True).run([str(tmp_path / "link.json")])
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["train_batch_size"] == 8


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="no room"):
        write(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["ds.json"]


def test_windows_line_endings_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'{\r\n  "train_batch_size": "8",\r\n  "gradient_clipping": 1.0\r\n}\r\n')
    Linter(fixes=True).run([str(path)])
    assert path.read_bytes() == b'{\r\n  "train_batch_size": 8,\r\n  "gradient_clipping": 1.0\r\n}\r\n'
