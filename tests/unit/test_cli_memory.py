"""`dstk memory`: a table, JSON, a picture and a grid; and one line with exit code 2 for what cannot be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.main import main

LLAMA = ["memory", "--model", "llama-3-8b", "--layout", "dp8-tp4-pp2-z1", "--seq", "4096"]


def dstk(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["memory", *arguments])
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_the_table_has_a_column_a_stage_and_says_what_fits(capsys):
    out = dstk(capsys, *LLAMA, "--gpu", "H100-80")
    assert "stage 0" in out
    assert "stage 1" in out
    assert "fits on H100-SXM-80GB" in out
    assert "largest micro-batch that fits" in out


def test_the_json_has_every_stage_in_bytes(capsys):
    found = json.loads(dstk(capsys, *LLAMA, "--gpu", "H100-80", "--json"))
    assert [stage["layers"] for stage in found["stages"]] == [17, 15]
    assert found["total"] == max(stage["total"] for stage in found["stages"])
    assert found["fits"] is True


def test_a_recipe_is_estimated_like_the_layout_that_it_names(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {name_or_path: gpt2}\n"
        "data: {seq_len: 512}\n"
        "parallel: {dp: 4, zero_stage: 2}\n"
        "batch: {global_size: 32, micro_size: 2}\n"
        "precision: bf16\n"
        "optimizer: {lr: 1e-4}\n"
        "train: {steps: 1}\n"
    )
    from_recipe = json.loads(dstk(capsys, "memory", "--recipe", str(recipe), "--json"))
    arguments = ["--model", "gpt2", "--layout", "dp4-z2", "--seq", "512", "--micro", "2", "--accumulation", "4"]
    from_options = json.loads(dstk(capsys, "memory", *arguments, "--json"))
    assert from_recipe["stages"] == from_options["stages"]


def test_an_option_takes_the_place_of_a_recipes_field(capsys):
    arguments = ["memory", "--recipe", "recipes/gpt2/z3.yaml", "--world-size", "4", "--json"]
    plain = json.loads(dstk(capsys, *arguments))
    offloaded = json.loads(dstk(capsys, *arguments, "--offload-optimizer", "--micro", "1"))
    assert plain["stages"][0]["masters"] == offloaded["stages"][0]["host"]["masters"]
    assert offloaded["micro_batch_size"] == 1


def test_a_sweep_has_a_row_for_each_combination(capsys):
    out = dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp8-pp2", "--sweep", "zero,recompute,micro")
    rows = [line.split() for line in out.splitlines() if line.strip()[:1] in "0123" and line.strip()]
    assert [tuple(row[:2]) for row in rows[:3]] == [("0", "none"), ("0", "selective"), ("0", "full")]
    assert rows[-1][2:] == ["-"] * 5  # a pipeline has no ZeRO-3
    assert "a DeepSpeed pipeline allows zero_stage 0 or 1" in out


def test_a_picture_is_written(capsys, tmp_path):
    path = tmp_path / "memory.png"
    dstk(capsys, *LLAMA, "--plot", str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_config_json_alone_is_enough(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 512}))
    from_file = dstk(capsys, "memory", "--model", str(config), "--layout", "dp2-z2", "--json")
    from_folder = dstk(capsys, "memory", "--model", str(tmp_path), "--layout", "dp2-z2", "--json")
    assert json.loads(from_file)["stages"] == json.loads(from_folder)["stages"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nope", "--layout", "dp2"], "model nope: not a known shape"),
        (["--model", "gpt2", "--layout", "dp2-tp5"], "tp=5: 12 attention heads cannot be shared equally by 5 ranks"),
        (["--model", "gpt2", "--layout", "pp13"], "pp=13: 12 decoder layers cannot fill 13 stages"),
        (["--model", "gpt2", "--layout", "dp2-q3"], "'q3' is not a part of a layout"),
        (["--model", "gpt2", "--layout", "dp2-pp2-z3"], "a DeepSpeed pipeline allows zero_stage 0 or 1"),
        (["--model", "gpt2", "--layout", "dp2", "--gpu", "H1000"], "gpu=H1000 is not in the catalogue. Nearest:"),
        (["--model", "gpt2", "--layout", "dp2", "--seq", "5000"], "gpt2 has 1024 positions"),
        (
            ["--model", "bloom-560m", "--layout", "dp2", "--recompute", "selective"],
            "recompute=selective: bloom computes attention in its own layers",
        ),
        (["--model", "gpt2"], "Name --model and --layout, or a --recipe"),
        (["--model", "gpt2", "--recipe", "r.yaml"], "leave out --model and --layout"),
        (["--model", "gpt2", "--layout", "dp2", "--sweep", "colour"], "'colour' cannot be swept"),
        (["--model", "gpt2", "--layout", "dp2", "--plot", "/nowhere/a.png"], "--plot /nowhere/a.png"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert words in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mixtral"}, "model_type=mixtral is not a dense decoder"),
        ({"model_type": "gpt_neox", "n_layer": 12}, "n_layer is not a field of a gpt_neox config"),
        ({"hidden_size": 64}, "The config has no model_type"),
        ([1], "holds a list"),
    ],
)
def test_a_config_that_is_no_dense_decoder_is_refused(capsys, tmp_path, config, words):
    path: Path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert words in refusal(capsys, "--model", str(path), "--layout", "dp2")


def test_the_command_imports_neither_torch_nor_transformers():
    code = f"""
import sys
from toolkit.cli.main import main
try:
    main({LLAMA!r})
except SystemExit:
    pass
sys.exit(bool({{"torch", "transformers", "matplotlib"}} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
