"""Every `dstk config` that a document shows runs, and the generated tables of the page are current."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from test_documents import DOCUMENTS, ROOT, commands, imported

from toolkit.cli.main import main

SHOWN = [(path.name, words[1:]) for path in DOCUMENTS for words in commands(path) if words[:2] == ["dstk", "config"]]


@pytest.mark.parametrize(("document", "words"), SHOWN, ids=[shlex.join(words)[:90] for _, words in SHOWN])
def test_a_documented_config_is_printed(
    document: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    if "--output" in words:
        assert all(Path(name).is_file() for name in told.out.split())
    elif "--launcher" in words and words[words.index("--launcher") + 1] in ("k8s", "skypilot"):
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(told.out))
    elif "--launcher" in words:
        assert told.out.startswith("#!/usr/bin/env bash\n")
    elif "--explain" not in words:
        assert json.loads(told.out)["zero_optimization"]


def test_the_tables_of_configs_are_up_to_date() -> None:
    generator = imported(ROOT / "docs" / "generate_configs.py")
    current = generator.PAGE.read_text()
    assert generator.page(current) == current, "run: python docs/generate_configs.py"


def test_every_option_of_the_command_is_on_the_page_or_in_its_help() -> None:
    from toolkit.cli.config import command

    unexplained = [option.opts for option in command.params if option.param_type_name == "option" and not option.help]
    assert unexplained == []
