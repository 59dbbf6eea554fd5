"""Bad recipes: each gives exactly its problems, at their lines, with exit code 2, and writes nothing."""
# ruff: noqa: E501 - a table reads in rows

import re
from pathlib import Path

import pytest

from toolkit.cli.main import main

GOOD = """\
model:
  name_or_path: gpt2
data:
  seq_len: 128
parallel:
  zero_stage: 1
batch:
  global_batch_size: 8
  micro_batch_size: 2
precision: fp32
optimizer:
  lr: 1e-4
  betas: [0.9, 0.95]
train:
  steps: 10
"""

# (a line of GOOD, what stands there instead, the problems in order: LINE:COL: and a part of the message)
# fmt: off
WRONG_VALUES = [
    ("  micro_batch_size: 2", "  micro_batch_size: 2\n  micro_size: 2", ["10:3: batch.micro_size is not a field. Did you mean micro_batch_size?"]),
    ("  micro_batch_size: 2", "  micro_size: 2", ["9:3: batch.micro_size is not a field. Did you mean micro_batch_size?"]),
    ("  lr: 1e-4", "  lrr: 1e-4", ["12:3: optimizer.lrr is not a field. Did you mean lr?"]),
    ("  micro_batch_size: 2", "  micro_batch_size: 2\n  global_size: 8", ["10:3: batch.global_size is not a field. Did you mean global_batch_size?"]),
    ("  seq_len: 128", "  seq_len: 128\n  packing: isolated", ["5:12: data.packing=isolated was replaced by data.packing=packed with data.document_masking=true."]),
    ("  micro_batch_size: 2", '  micro_batch_size: "4"', ['9:21: batch.micro_batch_size: "4" is a string; a whole number ≥ 1 is allowed. Write 4.']),
    ("  micro_batch_size: 2", "  micro_batch_size: 4.0", ["9:21: batch.micro_batch_size: 4.0 is a number; a whole number ≥ 1 is allowed. Write 4."]),
    ("  micro_batch_size: 2", "  micro_batch_size: 1e1", ["9:21: batch.micro_batch_size: 1e1 is a number; a whole number ≥ 1 is allowed. Write 10."]),
    ("  micro_batch_size: 2", "  micro_batch_size: 1.5", ["9:21: batch.micro_batch_size: 1.5 is a number; a whole number ≥ 1 is allowed."]),
    ("  micro_batch_size: 2", "  micro_batch_size: 0", ["9:21: batch.micro_batch_size: 0 is out of range; a whole number ≥ 1 is allowed."]),
    ("  micro_batch_size: 2", "  micro_batch_size: -3", ["9:21: batch.micro_batch_size: -3 is out of range"]),
    ("  micro_batch_size: 2", "  micro_batch_size: two", ['9:21: batch.micro_batch_size: "two" is a string']),
    ("  micro_batch_size: 2", "  micro_batch_size: true", ["9:21: batch.micro_batch_size: true is a truth value"]),
    ("  micro_batch_size: 2", "  micro_batch_size: .inf", ["9:21: batch.micro_batch_size: .inf is"]),
    ("  micro_batch_size: 2", "  micro_batch_size: 010", ['9:21: batch.micro_batch_size: "010" is a string']),
    ("  micro_batch_size: 2", "  micro_batch_size: 1:30", ['9:21: batch.micro_batch_size: "1:30" is a string']),
    ("  micro_batch_size: 2", "  micro_batch_size: 2024-01-01", ['9:21: batch.micro_batch_size: "2024-01-01" is a string']),
    ("  micro_batch_size: 2", "  micro_batch_size: [2]", ["9:21: batch.micro_batch_size: a list is given; a whole number ≥ 1 is allowed."]),
    ("  micro_batch_size: 2", "  micro_batch_size: {a: 2}", ["9:21: batch.micro_batch_size: a mapping is given"]),
    ("  micro_batch_size: 2", "  micro_batch_size:\n    - 2", ["9:3: batch.micro_batch_size: a list is given"]),
    ("  micro_batch_size: 2", "  micro_batch_size:", ["9:20: batch.micro_batch_size has no value; a whole number ≥ 1 is allowed."]),
    ("  micro_batch_size: 2", "  micro_batch_size: null", ["9:21: batch.micro_batch_size has no value"]),
    ("  micro_batch_size: 2", f"  micro_batch_size: {10**20}", ["9:21: batch.micro_batch_size: 100000000000000000000 is out of range; a whole number from 1 to 2147483647 is allowed."]),
    ("  zero_stage: 1", "  zero_stage: 4", ["6:15: parallel.zero_stage: 4 is out of range; a whole number from 0 to 3 is allowed."]),
    ("  zero_stage: 1", "  zero_stage: true", ["6:15: parallel.zero_stage: true is a truth value"]),
    ("  zero_stage: 1", "  zero_stage: 1.0", ["6:15: parallel.zero_stage: 1.0 is a number; a whole number from 0 to 3 is allowed. Write 1."]),
    ("  lr: 1e-4", '  lr: "1e-4"', ['12:7: optimizer.lr: "1e-4" is a string; a number > 0 is allowed. Write 0.0001.']),
    ("  lr: 1e-4", "  lr: 0", ["12:7: optimizer.lr: 0 is out of range; a number > 0 is allowed."]),
    ("  lr: 1e-4", "  lr: .nan", ["12:7: optimizer.lr: .nan is not a finite number; a number > 0 is allowed."]),
    ("  lr: 1e-4", "  lr: 1e400", ["12:7: optimizer.lr: 1e400 is not a finite number"]),
    ("  lr: 1e-4", "  lr: nan", ['12:7: optimizer.lr: "nan" is a string; a number > 0 is allowed.']),
    ("  lr: 1e-4", "  lr: 1e-4 # ok\n  eps: -.inf", ["13:8: optimizer.eps: -.inf is not a finite number"]),
    ("  betas: [0.9, 0.95]", "  betas: 0.9", ["13:10: optimizer.betas: 0.9 is a number; a list of 2 numbers ≥ 0 and < 1 is allowed."]),
    ("  betas: [0.9, 0.95]", "  betas: [0.9]", ["13:10: optimizer.betas: a list of 1 is given; a list of 2 numbers"]),
    ("  betas: [0.9, 0.95]", "  betas: []", ["13:10: optimizer.betas: a list of 0 is given; a list of 2 numbers"]),
    ("  betas: [0.9, 0.95]", "  betas: [0.9, 0.9, 0.9]", ["13:10: optimizer.betas: a list of 3 is given"]),
    ("  betas: [0.9, 0.95]", "  betas: [0.9, 1]", ["13:16: optimizer.betas[1]: 1 is out of range; a number ≥ 0 and < 1 is allowed."]),
    ("  betas: [0.9, 0.95]", "  betas:\n  - x\n  - 0.9", ['14:5: optimizer.betas[0]: "x" is a string']),
    ("precision: fp32", "precision: bf17", ['10:12: precision: "bf17" is not a choice; one of fp32, bf16, fp16 is allowed. Did you mean bf16?']),
    ("precision: fp32", "precision: 16", ["10:12: precision: 16 is a whole number; one of fp32, bf16, fp16 is allowed."]),
    ("precision: fp32", "precision:", ['10:11: precision has no value; one of fp32, bf16, fp16 is allowed. Write "fp32", or leave precision out.']),
    ("  steps: 10", "  steps: 10\n  compile: no", ['16:12: train.compile: "no" is a string; true or false is allowed. Write false.']),
    ("  steps: 10", "  steps: 10\n  compile: 1", ["16:12: train.compile: 1 is a whole number; true or false is allowed. Write true."]),
    ("  steps: 10", '  steps: 10\n  compile: "true"', ['16:12: train.compile: "true" is a string; true or false is allowed. Write true.']),
    ("  name_or_path: gpt2", "  name_or_path: 124", ['2:17: model.name_or_path: 124 is a whole number; a string that is not empty is allowed. Write "124".']),
    ("  name_or_path: gpt2", "  name_or_path: 1_2", ['2:17: model.name_or_path: 1_2 is a whole number; a string that is not empty is allowed. Write "1_2".']),
    ("  name_or_path: gpt2", '  name_or_path: ""', ['2:17: model.name_or_path: "" is empty; a string that is not empty is allowed.']),
    ("  name_or_path: gpt2", '  name_or_path: "\\0"', ['2:17: model.name_or_path: "\\x00" contains an invalid character.']),
    ("  steps: 10", "  steps: 10\nlog:\n  report_to: wandb", ['17:14: log.report_to: "wandb" is a string; a list of strings is allowed. Write [wandb].']),
    ("  steps: 10", "  steps: 10\nlog:\n  report_to: [a, 3]", ["17:18: log.report_to[1]: 3 is a whole number"]),
    ("  name_or_path: gpt2", "  name_or_path: gpt2\n  overrides: 3", ["3:14: model.overrides: 3 is a whole number; a mapping is allowed."]),
    ("  name_or_path: gpt2", "  name_or_path: gpt2\n  overrides: {a: [1, .nan]}", ["3:22: model.overrides.a[1] is not a finite number."]),
]

WRONG_NAMES = [
    ("  micro_batch_size: 2", "  mirco_size: 2", ["9:3: batch.mirco_size is not a field. Did you mean micro_batch_size?"]),
    ("precision: fp32", "precison: fp32", ["10:1: precison is not a field. Did you mean precision?"]),
    ("  steps: 10", "  steps: 10\n  lr: 1", ["16:3: train.lr is not a field. Did you mean optimizer.lr?"]),
    ("  steps: 10", "  steps: 10\n  qqq: 1", ["16:3: train.qqq is not a field. Fields of train: steps, seed, grad_clip"]),
    ("  steps: 10", "  steps: 10\nqqq: {a: 1}", ["16:1: qqq is not a field. Fields: model, data, parallel"]),
    ("  steps: 10", '  steps: 10\n  "a\\nb": 1', ['16:3: train."a\\nb" is not a field.']),
    ("  steps: 10", '  steps: 10\n  "": 1', ['16:3: train."" is not a field.']),
    ("  steps: 10", "  seed: 3", ["14:1: train.steps is missing; a whole number ≥ 1 is allowed. Add it: Optimizer steps."]),
    ("train:\n  steps: 10\n", "", ["1:1: the section train is missing. Add it, with steps."]),
    ("train:\n  steps: 10\n", "train: 10", ["14:8: train: 10 is a whole number; a section with fields is allowed."]),
    ("train:\n  steps: 10\n", "train: [10]", ["14:8: train: a list is given; a section with fields is allowed."]),
    ("train:\n  steps: 10\n", "train:\n  # steps: 10", ["14:1: train.steps is missing"]),
    ("  name_or_path: gpt2", "  name_or_path: gpt2\n  trust_remote_code: true", ["3:3: model.trust_remote_code: a recipe cannot allow a model's own code to run; only the command-line flag --trust-remote-code does."]),
    ("  name_or_path: gpt2", "  name_or_path: gpt2\n  overrides: {trust_remote_code: true}", ["3:34: model.overrides.trust_remote_code: a recipe cannot allow"]),
    ("  name_or_path: gpt2", "  name_or_path: gpt2\n  overrides: {a: {trust-remote-code: 1}}", ["3:38: model.overrides.a.trust-remote-code: a recipe cannot allow"]),
]

WRONG_YAML = [
    ("  micro_batch_size: 2", "  micro_batch_size: 2\n  micro_batch_size: 4", ["10:3: batch.micro_batch_size is given twice, on lines 9 and 10. Keep one of them."]),
    ("  steps: 10", "  steps: 10\nmodel: {}", ["16:1: model is given twice, on lines 1 and 16."]),
    ("  steps: 10", "  steps: !!python/object/apply:os.system ['touch executed']", ['15:10: tag "!!python/object/apply:os.system" is not allowed.']),
    ("  steps: 10", "  steps: !foo 10", ['15:10: tag "!foo" is not allowed. Write the plain value without a tag.']),
    ("  steps: 10", "  steps: &s 10", ["15:10: anchors (&name) and aliases (*name) are not allowed. Write the value out."]),
    ("  steps: 10", "  <<: {steps: 10}", ["15:3: merge keys (<<) are not allowed. Write the fields out."]),
    ("  steps: 10", "  steps: 10\n---\na: 1", ["16:1: a second document begins here."]),
    ("  steps: 10", "\tsteps: 10", ["15:1: this is not YAML"]),
    ("  steps: 10", "  steps: [10", ["16:1: this is not YAML"]),
    ("  steps: 10", "  steps: 10\n seed: 1", ["16:2: this is not YAML"]),
    ("  steps: 10", "  steps: \x00", ["15:10: character U+0000 is not allowed in YAML."]),
    ("  steps: 10", "  steps: " + "[" * 50, ["15:41: nested deeper than 32 levels."]),
    (GOOD, "", ["1:1: the file is empty. A recipe has the sections model, data, batch, optimizer, train."]),
    (GOOD, "# nothing\n", ["1:1: the file is empty."]),
    (GOOD, "~\n", ["1:1: the file is empty."]),
    (GOOD, "- a\n", ["1:1: a list is given; a recipe is a mapping of sections (model, data, batch, optimizer, train)."]),
    (GOOD, "\njust text\n", ["2:1: a string is given; a recipe is a mapping"]),
    (GOOD, "l0: &l0 [x]\n" + "".join(f"l{i}: &l{i} [{f'*l{i - 1}, ' * 9}]\n" for i in range(1, 12)), ["1:5: anchors (&name)"]),
]
# fmt: on


def run(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr of `dstk validate` that exits with 2 and prints nothing else."""
    with pytest.raises(SystemExit) as stopped:
        main(["validate", *arguments])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out) == (2, "")
    return err.removesuffix("\n").split("\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "instead", "expected"), WRONG_VALUES + WRONG_NAMES + WRONG_YAML)
def test_a_bad_file_gives_its_problems_at_their_lines(
    here: Path, capfd: pytest.CaptureFixture[str], line: str, instead: str, expected: list[str]
) -> None:
    assert GOOD.count(line) == 1
    (here / "r.yaml").write_text(GOOD.replace(line, instead), encoding="utf-8")
    given = run(["r.yaml"], capfd)
    assert len(given) == len(expected) > 0
    for problem, start in zip(given, expected, strict=True):
        assert problem.startswith(f"error: r.yaml:{start}"), problem
    assert [path.name for path in here.iterdir()] == ["r.yaml"]


def test_there_are_many_bad_files() -> None:
    assert len(WRONG_VALUES + WRONG_NAMES + WRONG_YAML) >= 80


def test_all_problems_of_a_file_come_together_sorted_by_line(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        GOOD.replace("lr: 1e-4", "lr: x").replace("gpt2", "''").replace("micro_batch_size: 2", "micro: 2\n  micro: 3")
    )
    (here / "r.yaml").write_text(text.replace("steps: 10", "steps: !a 0"))
    lines = [int(re.findall(r":(\d+):\d+: ", problem)[0]) for problem in run(["r.yaml"], capfd)]
    assert lines == [2, 7, 9, 10, 13, 16]


def test_the_place_is_right_behind_a_byte_order_mark_and_windows_line_ends(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "\ufeff" + GOOD.replace("model:", "model: 3 #").replace("  name_or_path: gpt2\n", "").replace("\n", "\r\n")
    (here / "r.yaml").write_bytes(text.encode())
    assert run(["r.yaml"], capfd)[0].startswith("error: r.yaml:1:8: model: 3 is a whole number")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("gone.yaml", None, "gone.yaml: there is no such file."),
        ("dangling.yaml", None, "dangling.yaml: this is a link to moved/zero2.yaml, which does not exist. Repair it."),
        ("zero2.yml", None, "zero2.yml: there is no such file. Did you mean zero2.yaml?"),
        ("r.yaml/inside", None, "r.yaml/inside: the file cannot be read: Not a directory."),
        ("latin.yaml", b"model:\n  name: \xe9\n", "latin.yaml:2:9: this is not UTF-8 text. Save the file as UTF-8."),
        ("utf16.yaml", "model:".encode("utf-16"), "utf16.yaml:1:1: this is not UTF-8 text. Save the file as UTF-8."),
        (
            "huge.yaml",
            b"#" * (1 << 20) + b"#",
            "huge.yaml: this file is larger than 1 MiB; a recipe is a page of YAML.",
        ),
    ],
)
def test_what_is_no_readable_file_gives_one_line(
    here: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes | None, problem: str
) -> None:
    (here / "zero2.yaml").write_text(GOOD)
    (here / "r.yaml").write_text(GOOD)
    (here / "dangling.yaml").symlink_to("moved/zero2.yaml")
    if content is not None:
        (here / name).write_bytes(content)
    (given,) = run([name], capfd)
    assert given.startswith(f"error: {problem}")


def test_thousands_of_problems_are_abbreviated(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "r.yaml").write_text(GOOD + "".join(f"a{i}: 1\n" for i in range(20_000)))
    given = run(["r.yaml"], capfd)
    assert (len(given), given[-1]) == (101, "error: r.yaml: and 19900 more problems.")
