"""`dstk memory`: a table, JSON, a picture and a grid; and one line with exit code 2 for what cannot be."""

import json
import subprocess
import sys
from itertools import pairwise
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


def test_a_cell_that_training_refuses_has_no_number(capsys):
    found = json.loads(
        dstk(capsys, "memory", "--model", "gpt2", "--layout", "u2", "--sweep", "zero,recompute", "--json")
    )
    assert all("total" in cell for cell in found["cells"])
    found = json.loads(dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp4-tp2", "--sweep", "zero", "--json"))
    assert [cell["zero"] for cell in found["cells"] if "error" in cell] == [0]
    assert "Write --layout dp4-tp2-pp1-z1" in found["cells"][0]["error"]


def test_a_swept_length_that_ranks_cannot_share_is_refused(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_head": 6, "n_embd": 48, "n_positions": 1024}))
    arguments = ["memory", "--model", str(config), "--layout", "u3", "--sweep", "seq", "--seq", "1023", "--json"]
    (cell,) = json.loads(dstk(capsys, *arguments))["cells"]
    assert "--seq 1024 with ulysses=3: each rank takes an equal part" in cell["error"]


def test_a_sweeps_json_says_what_was_asked(capsys):
    arguments = ["memory", "--model", "gpt2", "--layout", "dp8", "--gpu", "A100-40", "--sweep", "zero,micro", "--json"]
    found = json.loads(dstk(capsys, *arguments))
    assert (found["model"], found["layout"], found["gpu"]) == ("gpt2", "dp8-tp1-pp1-z0", "A100-SXM-40GB")
    assert [(cell["zero"], cell["micro"]) for cell in found["cells"][4:6]] == [(0, 16), (1, 1)]


def test_the_json_says_all_that_the_layouts_name_leaves_out(capsys):
    arguments = ["--sequence-parallel", "--offload-optimizer", "--attention", "flash", "--recompute", "full", "--json"]
    found = json.loads(dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp2-tp2-z1", *arguments))
    names = ("engine", "attention", "recompute", "sequence_parallel", "offload_optimizer", "offload_params")
    assert [found[name] for name in names] == ["deepspeed", "flash", "full", True, "cpu", "none"]


def ddp_recipe(folder: Path) -> str:
    path = folder / "ddp.yaml"
    path.write_text(
        "{model: {name_or_path: gpt2}, data: {seq_len: 512}, batch: {global_size: 6, micro_size: 1}, precision: bf16, "
        "optimizer: {lr: 1e-4}, train: {steps: 1, engine: ddp}}"
    )
    return str(path)


def test_zero_stages_are_not_swept_where_the_engine_has_none(capsys, tmp_path):
    arguments = ["--recipe", ddp_recipe(tmp_path), "--world-size", "2"]
    assert "only deepspeed has ZeRO stages" in refusal(capsys, *arguments, "--sweep", "micro,zero")
    assert "micro 16" in dstk(capsys, "memory", *arguments, "--sweep", "recompute,micro")


def test_the_title_says_attention_accumulation_and_another_engine(capsys, tmp_path):
    arguments = ["--recipe", ddp_recipe(tmp_path), "--world-size", "2", "--attention", "eager"]
    title = dstk(capsys, "memory", *arguments).splitlines()[0]
    assert title == "gpt2, ddp, dp2, bf16, micro-batch 1 x 512, accumulation 3, eager"


def test_the_stage_that_takes_most_is_always_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    arguments = ["--model", "llama-3-70b", "--layout", "pp40-z1", "--gpu", "A100-40"]
    stages = json.loads(dstk(capsys, "memory", *arguments, "--json"))["stages"]
    worst = max(stages, key=lambda stage: stage["total"])["stage"]
    assert 2 < worst < 39  # neither among the first nor the last
    out = dstk(capsys, "memory", *arguments)
    assert out.splitlines()[2].split()[-4:] == ["stage", str(worst), "stage", "39"]
    assert f"stages 0 to {worst - 1}, {worst + 1} to 38" in out


@pytest.mark.parametrize(("layout", "words"), [("dp4-z3", "parameters before ZeRO"), ("dp4-z2", "parameters held")])
def test_parameters_are_counted_before_zero_shards_them(capsys, layout, words):
    assert words in dstk(capsys, "memory", "--model", "gpt2", "--layout", layout)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["--recipe", "recipes/gpt2/z3.yaml"], "note: for 1 rank, as neither --world-size nor parallel.dp says"),
        (["--recipe", "recipes/gpt2/z3.yaml", "--world-size", "4"], ""),
        (["--model", "gpt2", "--layout", "dp4", "--gpu", "T4"], "note: T4 has no bf16 units"),
        (["--model", "gpt2", "--layout", "dp4", "--gpu", "T4", "--precision", "fp16"], ""),
    ],
)
def test_a_note_says_what_was_guessed_or_will_not_train(capsys, arguments, note):
    with pytest.raises(SystemExit):
        main(["memory", *arguments])
    written = capsys.readouterr().err
    assert written.startswith(note) if note else not written


def test_a_picture_is_written(capsys, tmp_path):
    path = tmp_path / "memory.png"
    dstk(capsys, *LLAMA, "--plot", str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("worst", [0, 23, 38, 63])
def test_of_64_bars_the_first_the_last_or_the_tallest_are_labelled_and_none_touch(worst):
    from toolkit.report.memory_plot import places_to_label

    places = places_to_label([2.0 if place == worst else 1.0 for place in range(64)])
    assert worst in places
    assert {0, 63} & set(places)
    assert min(after - before for before, after in pairwise(places)) >= 8


def test_of_16_bars_each_is_labelled():
    from toolkit.report.memory_plot import places_to_label

    assert places_to_label([1.0] * 16) == list(range(16))


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
        (["--model", "gpt2", "--layout", "dp2", "--plot", "a.png", "--sweep", "zero"], "--plot draws one layout"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert words in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dp8-tp4"], "zero_stage=0 with tp=4 and --precision bf16: without ZeRO"),
        (["dp8-tp4"], "Write --layout dp8-tp4-pp1-z1, or --precision fp32."),
        (["pp2"], "Write --layout dp1-tp1-pp2-z1, or --precision fp32."),
        (["dp4-tp2-z0"], "zero_stage=0 with tp=2"),
        (["pp2-z1", "--precision", "fp16"], "--precision fp16 with pp=2: pipelines have no loss scaling"),
        (["tp2-u2"], "ulysses=2 with tp=2"),
        (["pp2-u2"], "ulysses=2 with pp=2"),
        (["u2", "--attention", "eager"], "--attention eager with ulysses=2"),
        (["u2", "--seq", "1023"], "--seq 1023 with ulysses=2: each rank takes an equal part of a sequence"),
        (["tp2-z1", "--sequence-parallel", "--seq", "1023"], "Set --seq 1022 or 1024, or sequence_parallel=false."),
        (["u2-z1", "--model", "bloom-560m"], "ulysses=2: the family bloom was not found to train the same"),
    ],
)
def test_what_training_refuses_is_refused_in_the_words_of_the_options(capsys, arguments, words):
    assert words in refusal(capsys, "--model", "llama-3-8b", "--layout", *arguments)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2-tp2-pp2"])
def test_the_advice_to_add_a_zero_stage_is_followed_by_a_number(capsys, layout):
    line = refusal(capsys, "--model", "llama-3-8b", "--layout", layout)
    advice = line.partition("Write --layout ")[2].partition(",")[0]
    assert "allocated at the peak" in dstk(capsys, "memory", "--model", "llama-3-8b", "--layout", advice)


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


def test_the_command_imports_neither_torch_nor_transformers_nor_yaml():
    code = f"""
import sys
from toolkit.cli.main import main
try:
    main({LLAMA!r})
except SystemExit:
    pass
sys.exit(bool({{"torch", "transformers", "matplotlib", "yaml"}} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
