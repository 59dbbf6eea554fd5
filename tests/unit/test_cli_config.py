"""`dstk config`: recipes, flags, formats and files. What is in them is tested with `toolkit.dsconfig`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli.main import main

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "gpt2" / "z3.yaml")
FLAGS = ("--model", "gpt2-xl", "--layout", "dp8-z3", "--global-batch", "512", "--micro", "8", "--precision", "bf16")

Output = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["config", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def made(capsys: Output, *words: str) -> Any:
    assert run(*words) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: Output, *words: str) -> str:
    assert run(*words) == 2
    return capsys.readouterr().err


def test_flags_override_a_recipe(capsys: Output) -> None:
    config = made(capsys, RECIPE, "--layout", "dp4-z1", "--micro", "4", "--lr", "0.5", "--betas", "0.8", "0.9")
    assert config["zero_optimization"]["stage"] == 1
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["optimizer"]["params"]["lr"] == 0.5
    assert config["optimizer"]["params"]["betas"] == [0.8, 0.9]


def test_an_option_names_the_recipe_too(capsys: Output) -> None:
    assert made(capsys, "--recipe", RECIPE, "--world-size", "8") == made(capsys, RECIPE, "--world-size", "8")


def test_flags_alone_say_what_a_recipe_says(capsys: Output) -> None:
    same = ("--lr", "2e-4", "--betas", "0.9", "0.95", "--weight-decay", "0.1")
    assert made(capsys, *FLAGS, *same) == made(capsys, RECIPE, "--world-size", "8")


def test_nodes_and_gpus_make_the_world(capsys: Output) -> None:
    words = (*FLAGS[:2], "--layout", "tp1-z1", *FLAGS[4:], "--nodes", "2", "--gpus-per-node", "8")
    assert made(capsys, *words)["gradient_accumulation_steps"] == 512 // 8 // 16


def test_a_gpu_sizes_the_buckets(capsys: Output) -> None:
    plain, linked = made(capsys, *FLAGS), made(capsys, *FLAGS, "--gpu", "H100-SXM-80GB")
    different = {key for key, value in plain["zero_optimization"].items() if value != linked["zero_optimization"][key]}
    assert different == {"reduce_bucket_size", "stage3_prefetch_bucket_size"}


def test_nvme_has_its_sections(capsys: Output) -> None:
    config = made(capsys, *FLAGS, "--offload-optimizer", "nvme", "--offload-params", "nvme", "--nvme-path", "/n")
    zero = config["zero_optimization"]
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["nvme_path"]) == ("nvme", "/n")
    assert config["optimizer"]["params"]["torch_adam"] is False
    assert "aio" in config


def test_a_program_may_bring_its_optimizer(capsys: Output) -> None:
    assert run(*FLAGS, "--optimizer", "none") == 0
    told = capsys.readouterr()
    assert "optimizer" not in json.loads(told.out)
    assert "note: there is no optimizer section" in told.err


@pytest.mark.parametrize("name", ["onebitadam", "zerooneadam", "onebitlamb"])
def test_a_removed_optimizer_is_refused_with_its_reason(capsys: Output, name: str) -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    assert name not in DEEPSPEED_OPTIMIZERS
    assert "was removed from DeepSpeed" in refusal(capsys, *FLAGS, "--optimizer", name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "gpt2-xl"), "--layout and --global-batch and --micro must be given"),
        ((RECIPE, "--recipe", RECIPE), "2 recipes; give one"),
        (("train.steps=3", *FLAGS), "none is given"),
        ((*FLAGS, "--format", "all"), "--output DIR"),
        ((*FLAGS, "--explain", "--launcher", "slurm"), "Leave out"),
        ((*FLAGS, "--host", "a", "--host", "b"), "2 names of hosts for 1 nodes"),
        ((*FLAGS, "--world-size", "4", "--nodes", "1", "--gpus-per-node", "8"), "Leave one of them out"),
        ((*FLAGS, "--gpu", "H100"), "not in the catalogue"),
        (("--model", "gpt9", *FLAGS[2:]), "not a known shape"),
        ((RECIPE, "train.engine=ddp"), "takes no DeepSpeed config"),
    ],
)
def test_a_mistake_is_one_line(capsys: Output, words: tuple[str, ...], message: str) -> None:
    told = refusal(capsys, *words)
    assert message in told
    assert len(told.splitlines()) == 1


def test_all_writes_every_format(capsys: Output, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    words = (*FLAGS[:2], "--layout", "z3", *FLAGS[4:], "--nodes", "2", "--gpus-per-node", "8")
    assert run(*words, "--format", "all", "--launcher", "deepspeed", "--output", str(folder)) == 0
    written = {path.name for path in folder.iterdir()}
    assert written == {"ds_config.json", "ds_config_auto.json", "accelerate.yaml", "launch.sh", "hostfile"}
    assert capsys.readouterr().out.split() == [
        str(folder / name)
        for name in ("ds_config.json", "accelerate.yaml", "ds_config_auto.json", "launch.sh", "hostfile")
    ]
    named = yaml.safe_load((folder / "accelerate.yaml").read_text())["deepspeed_config"]["deepspeed_config_file"]
    assert (folder / named).is_file()
    assert json.loads((folder / "ds_config_auto.json").read_text())["train_batch_size"] == "auto"


def test_the_launch_line_of_a_recipe_repeats_what_was_changed(capsys: Output) -> None:
    assert run(RECIPE, "train.steps=300", "--micro", "4", "--world-size", "8", "--launcher", "torchrun") == 0
    line = capsys.readouterr().out.replace("\\\n", " ")
    assert "recipes/train.py" in line
    assert "train.steps=300 batch.micro_size=4" in line
    assert "--deepspeed_config" not in line


def test_the_launch_line_of_a_recipe_names_the_json_where_options_change_it(capsys: Output) -> None:
    assert run(RECIPE, "--world-size", "8", "--gpu", "H100-SXM-80GB", "--launcher", "deepspeed") == 0
    assert "--deepspeed_config ds_config.json" in capsys.readouterr().out.replace("\\\n    ", "")


def test_explain_is_a_table_of_every_key(capsys: Output) -> None:
    assert run(*FLAGS, "--explain") == 0
    table = capsys.readouterr().out
    assert run(*FLAGS) == 0
    config = json.loads(capsys.readouterr().out)
    paths = [key for key, value in config.items() if not isinstance(value, dict)]
    paths += [f"zero_optimization.{key}" for key in config["zero_optimization"]]
    assert [path for path in paths if path not in table] == []


def test_neither_torch_nor_deepspeed_is_imported() -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\n"
        f"try: main(['config', *{FLAGS!r}, '--explain'])\n"
        "finally: print(sorted({'torch', 'deepspeed', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
