import json
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.lint.finding import RULES

ROOT = Path(__file__).parents[2]
CLEAN = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "overlap_comm": True},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CLEAN, indent=2))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["lint", *words])
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(CLEAN | values, indent=2))


def test_a_clean_file_exits_with_0(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ds.json", "--gpus", "8") == (0, "1 file: nothing found\n", "")


@pytest.mark.parametrize(("others", "said"), [(1, "1 other file skipped"), (2, "2 other files skipped")])
def test_files_of_other_programs_in_a_directory_are_counted(
    others: int, said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(others):
        (config.parent / f"other-{number}.json").write_text('{"name": "no config"}')
    assert run(capsys, ".", "--gpus", "8") == (0, f"1 file: nothing found, {said}\n", "")


def test_infos_exit_with_0(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, wall_clock_breakdown=True)
    code, out, _ = run(capsys, "ds.json")
    assert (code, "1 info" in out) == (0, True)


@pytest.mark.parametrize("values", [{"gradient_cliping": 1.0}, {"train_batch_size": "64"}])
def test_warnings_and_errors_exit_with_1(
    values: dict[str, object], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(config, **values)
    assert run(capsys, "ds.json")[0] == 1


def test_a_file_that_cannot_be_read_exits_with_2_and_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text('{"train_batch_size": }')
    code, _, err = run(capsys, "ds.json")
    assert code == 2
    assert err.startswith("error: ds.json:1:22: ")
    assert err.count("\n") == 1


def test_a_finding_prints_position_severity_rule_effect_fix_and_source(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(config, gradient_cliping=1.0)
    assert run(capsys, "ds.json")[1].splitlines() == [
        "ds.json:12:3: warning DS101: gradient_cliping is not a key of DeepSpeed. Did you mean gradient_clipping?",
        "    DeepSpeed ignores it silently.",
        "    fix: Correct the name, or remove the key.",
        *[f"    see {source}" for source in RULES["DS101"].sources],
        "",
        "1 file: 1 warning",
    ]


def test_json_is_for_programs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, train_batch_size="64")
    code, out, _ = run(capsys, "ds.json", "--format", "json")
    (finding,) = json.loads(out)["findings"]
    assert code == 1
    assert (finding["rule"], finding["line"], finding["path"]) == ("DS202", 2, ["train_batch_size"])


def test_github_is_one_workflow_command_a_finding(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, train_batch_size="64")
    (line,) = run(capsys, "ds.json", "--format", "github")[1].splitlines()
    assert line.startswith("::error file=ds.json,line=2,col=23,title=DS202::train_batch_size")
    assert "%0A" in line


def test_rules_are_listed_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--rules")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(RULES)


def test_rules_are_ignored_by_id_only(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, gradient_cliping=1.0)
    assert run(capsys, "ds.json", "--ignore", "DS101")[0] == 0
    code, _, err = run(capsys, "ds.json", "--ignore", "DS999")
    assert (code, "not a rule" in err) == (2, True)


def test_fix_prints_its_changes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, train_batch_size="64")
    code, out, _ = run(capsys, "ds.json", "--fix")
    assert (code, out) == (0, "ds.json: fixed DS202 train_batch_size set to 64\n1 file: nothing found\n")
    assert json.loads(config.read_text()) == CLEAN


def test_arguments_of_the_trainer_come_from_files_and_names(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "args.yaml").write_text("per_device_train_batch_size: 8\nmax_grad_norm: 1.0\n")
    words = ("ds.json", "--trainer-args", "args.yaml", "--trainer-args")
    assert "HF104" in run(capsys, *words, "bf16=true")[1]
    assert "HF104" not in run(capsys, *words, "per_device_train_batch_size=4")[1]


def test_a_recipe_decides_layout_batch_and_values(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "gpt2" / "gpt2-xl-pretrain.yaml")
    change(config, gradient_clipping=0.25)
    code, out, _ = run(capsys, "ds.json", "--recipe", recipe, "--gpus", "8")
    assert code == 1
    assert "RC101: gradient_clipping=0.25: the recipe's train.grad_clip makes it 1.0" in out


@pytest.mark.parametrize("words", [("--model", "gpt9"), ("--layout", "x3"), ("--deepspeed", "new"), ("--gpus", "0")])
def test_a_wrong_option_is_one_line(words: tuple[str, ...], config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "ds.json", *words)
    assert (code, err.count("\n")) == (2, 1)


def test_the_configs_of_this_repository_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(ROOT / "ds_configs"))
    assert (code, err) == (0, ""), out


def test_neither_torch_nor_deepspeed_is_imported() -> None:
    script = (
        "import sys; from toolkit.cli.main import main\n"
        "try: main(['lint', sys.argv[1]])\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, sorted({name.split('.')[0] for name in sys.modules} & "
        "{'torch', 'deepspeed', 'transformers', 'accelerate', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT / "ds_configs" / "zero1.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"
