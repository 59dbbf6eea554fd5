"""`dstk memory`: a table, JSON, a picture and a grid; and one line with exit code 2 for what cannot be."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from toolkit.cli.main import cli, main
from toolkit.errors import Refusal, ToolkitError
from toolkit.estimate import framework_profile

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


def refused(*arguments: str) -> Refusal:
    with pytest.raises(ToolkitError) as caught:
        cli.main(["memory", *arguments], standalone_mode=False)
    assert caught.value.refusal is not None
    return caught.value.refusal


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


def foreign(capsys, tmp_path, config, *options):
    """What is said of a user's own DeepSpeed config: the JSON, and the notes."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        main(["memory", "--model", "gpt2", "--layout", "dp8", "--deepspeed", str(path), "--json", *options])
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    return json.loads(said.out), said.err


ZERO_2 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def test_a_users_deepspeed_config_has_deepspeeds_defaults_and_says_so(capsys, tmp_path):
    theirs, notes = foreign(capsys, tmp_path, ZERO_2 | {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2})
    assert (theirs["layout"], theirs["engine"]) == ("dp8-tp1-pp1-z2", "DeepSpeed")
    assert (theirs["micro_batch_size"], theirs["accumulation"]) == (2, 4)
    assert "gradients accumulate in 16 bits (this toolkit's configs: fp32)" in notes
    assert "reduce_bucket_size 500,000,000" in notes
    said = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 10**6}}
    same, notes = foreign(capsys, tmp_path, ZERO_2 | said)
    assert "accumulate" not in notes
    assert "reduce_bucket_size" not in notes
    assert same["stages"][0]["buckets"] < theirs["stages"][0]["buckets"]


def test_the_trainer_replaces_auto(capsys, tmp_path):
    autos = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    autos |= {"stage3_param_persistence_threshold": "auto"}
    config = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": autos}
    found, _ = foreign(capsys, tmp_path, config, "--trainer")
    # transformers, integrations/deepspeed.py: hidden^2, 0.9 hidden^2 and 10 hidden; eight samples of each device.
    sizes = {"reduce_bucket_size": 768**2, "stage3_prefetch_bucket_size": int(0.9 * 768**2)}
    sizes |= {"stage3_param_persistence_threshold": 7680}
    written = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}}
    same, _ = foreign(capsys, tmp_path, written | {"zero_optimization": autos | sizes}, "--trainer")
    assert found["stages"] == same["stages"]
    assert found["micro_batch_size"] == 8


@pytest.mark.parametrize(
    ("config", "options", "given"),
    [
        ({"train_micro_batch_size_per_gpu": "auto"}, [], ["--deepspeed"]),
        ({"train_micro_batch_size_per_gpu": "four"}, [], ["train_micro_batch_size_per_gpu"]),
        ({"optimizer": {"type": "OneBitAdam"}}, [], ["optimizer.type"]),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, [],
         ["zero_optimization.zero_quantized_weights"]),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, [],
         ["bf16.bf16_master_weights_and_grads"]),
        (ZERO_2, ["--layout", "dp2-tp4"], ["--deepspeed", "--layout"]),
        (ZERO_2, ["--layout", "dp8-z3"], ["--layout"]),
        (ZERO_2 | {"optimizer": {"type": "AdamW"}}, ["--optimizer", "sgd"], ["--optimizer"]),
        (ZERO_2, ["--framework", "megatron"], ["--framework", "--deepspeed"]),
        (ZERO_2, ["--engine", "ddp"], ["--deepspeed", "--engine"]),
        (ZERO_2, ["--optimizer", "muon"], ["--optimizer"]),
        (ZERO_2, ["--optimizer", "adafactor"], ["--optimizer"]),
        (ZERO_2, ["--trainable", "lora:r=0"], ["--trainable"]),
        (ZERO_2, ["--trainable", "nothing"], ["model_type"]),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, ["--optimizer", "adamw8bit"], ["--optimizer"]),
        ({"optimizer": {"type": "Muon"}}, [], ["optimizer.type"]),
        (ZERO_2, ["--offload-optimizer"], ["--deepspeed", "--offload-optimizer"]),
        (ZERO_2, ["--pure-bf16"], ["--deepspeed", "--pure-bf16"]),
        (ZERO_2, ["--precision", "fp16"], ["--precision"]),
        ({}, ["--sweep", "zero"], ["--sweep", "train.engine"]),
    ],
)  # fmt: skip
def test_a_config_that_the_estimate_cannot_answer_is_refused(tmp_path, config, options, given):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    arguments = ["--model", "gpt2", "--layout", "dp8", "--deepspeed", str(path), *options]
    assert [field for field, _ in refused(*arguments).settings] == given


@pytest.mark.parametrize(
    ("content", "said"), [([], "not a JSON object"), ({"zero_optimization": {"stage": "x"}}, "dstk lint")]
)
def test_a_file_that_is_no_config_is_refused_with_its_path(capsys, tmp_path, content, said):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    line = refusal(capsys, "--model", "gpt2", "--layout", "dp8", "--deepspeed", str(path))
    assert said in line
    assert str(path) in line


def test_options_that_agree_may_be_given_twice(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": []}))
    given = ["memory", "--model", "gpt2", "--layout", "dp8", "--deepspeed", str(path)]
    assert dstk(capsys, *given, "--trainer") == dstk(capsys, *given, "--trainer", "--engine", "deepspeed")


def test_a_framework_has_no_engine_of_this_toolkit():
    for engine in ("deepspeed", "fsdp"):
        found = refused("--model", "gpt2", "--layout", "dp8", "--framework", "megatron", "--engine", engine)
        assert found.settings == (("--framework", "megatron"), ("--engine", engine))


def test_the_help_names_every_framework(capsys):
    profiles = Path(framework_profile.__file__).with_name("framework_profiles.json")
    text = dstk(capsys, "memory", "--help")
    assert [name for name in json.loads(profiles.read_text()) if name not in text] == []


def test_engines_and_optimizers_of_other_programs(capsys):
    def states(*options):
        out = dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp8", "--json", *options)
        (stage,) = json.loads(out)["stages"]
        count = stage["parameter_count"]
        return tuple(round(stage[name] / count, 2) for name in ("parameters", "gradients", "optimizer", "buckets"))

    assert states("--engine", "ddp") == (4, 4, 8, 4)
    assert states("--engine", "ddp", "--optimizer", "lion") == (4, 4, 4, 4)
    assert states("--engine", "fsdp", "--optimizer", "sgd")[:3] == (0.5, 0.5, 0)
    assert states("--engine", "ddp", "--optimizer", "adamw8bit") == (4, 4, 2.04, 4)
    assert states("--trainer", "--engine", "fsdp", "--optimizer", "adamw8bit")[2] == 0.25
    of_matrices = 12 * 12 * 768**2 / 124_439_808  # of these Muon keeps one momentum
    assert states("--engine", "ddp", "--optimizer", "muon") == (4, 4, round(8 - 4 * of_matrices, 2), 4)
    assert states("--engine", "fsdp", "--optimizer", "adafactor")[2] == 0.01
    assert states("--engine", "ddp", "--pure-bf16") == (2, 2, 4, 2)
    assert states("--trainer", "--accumulation", "2", "--micro", "1") == (4, 4, 8, 4)
    assert refused("--model", "gpt2", "--layout", "dp8-z2", "--trainer").field == "--layout"


def test_frozen_parameters_are_weights_alone(capsys, tmp_path):
    def states(*options):
        out = dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp8", "--json", "--trainable", "*.mlp.*", *options)
        (stage,) = json.loads(out)["stages"]
        whole, part = stage["parameter_count"], stage["trained_count"]
        assert part == 12 * (2 * 768 * 3072 + 3072 + 768)
        kinds = ("gradients", "masters", "optimizer")
        return stage["parameters"] / whole, *(round(stage[name] / part, 2) for name in kinds)

    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO_2))
    assert states("--trainer", "--accumulation", "2", "--micro", "1") == (4, 4, 0, 8)
    assert states("--deepspeed", str(path))[2:] == (0.5, 1)
    assert states("--engine", "fsdp", "--optimizer", "adamw8bit")[3] == 0.25


def test_lora_adds_adapters_by_peft(capsys):
    pytest.importorskip("peft")
    given = ["memory", "--model", "gpt2", "--layout", "dp8", "--trainer", "--trainable"]
    (stage,) = json.loads(dstk(capsys, *given, "lora:r=4,targets=c_attn", "--json"))["stages"]
    assert stage["trained_count"] == 12 * 4 * (768 + 3 * 768)
    assert "trainable parameters" in dstk(capsys, *given, "lora:r=4,targets=c_attn")
    line = refusal(capsys, *given[1:], "lora:targets=nothing")
    assert "no layer of this model is called nothing" in line


def test_a_chunked_loss_has_no_whole_logits(capsys, tmp_path):
    def logits(*options):
        (stage,) = json.loads(dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp8", "--json", *options))[
            "stages"
        ]
        return stage["logits"]

    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO_2))
    for setup in (["--trainer"], ["--engine", "fsdp", "--micro", "8"], ["--deepspeed", str(path), "--micro", "8"]):
        assert logits(*setup, "--chunked-loss", "512") < logits(*setup) / 8


def test_near_the_limit_the_answer_is_tight(capsys):
    arguments = ["memory", "--model", "llama-3-8b", "--layout", "dp8-z1", "--seq", "4096", "--recompute", "full"]
    near = [*arguments, "--gpu", "H100-80"]
    out = dstk(capsys, *near)
    found = json.loads(dstk(capsys, *near, "--json"))
    (stage,) = found["stages"]
    left = f"{stage['left'] / 2**30:.2f} GiB left"
    assert f"tight on H100-SXM-80GB: {left}; runs of this kind needed -3 % to +3 %" in out
    (line,) = (line for line in out.splitlines() if "reserved by PyTorch's allocator" in line)
    assert line.split()[-1] == f"{stage['reserved'] / 2**30:.2f}"
    assert (found["verdict"], found["fits"]) == ("tight", False)
    assert found["allocated"] < found["reserved"] < found["total"]
    assert " ?" in dstk(capsys, *near, "--sweep", "zero")


def test_another_framework_has_its_own_states_and_layers(capsys):
    own = json.loads(dstk(capsys, *LLAMA, "--json"))
    theirs = json.loads(dstk(capsys, *LLAMA, "--framework", "megatron:virtual_stages=2,dropout=false", "--json"))
    assert theirs["engine"] == "megatron"
    assert theirs["attention"] == "flash"
    first = theirs["stages"][0]
    assert (first["parameters"], first["gradients"]) == (2 * first["parameter_count"], 4 * first["parameter_count"])
    assert theirs["allocated"] != own["allocated"]
    out = dstk(
        capsys, "memory", "--model", "gpt2", "--layout", "dp8", "--framework", "megatron", "--sweep", "zero,recompute"
    )
    assert "its profile has ZeRO-0 and 1" in out


def test_a_recipe_is_estimated_like_the_layout_that_it_names(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {name_or_path: gpt2}\n"
        "data: {seq_len: 512}\n"
        "parallel: {dp: 4, zero_stage: 2}\n"
        "batch: {global_batch_size: 32, micro_batch_size: 2}\n"
        "precision: bf16\n"
        "optimizer: {lr: 1e-4}\n"
        "train: {steps: 1}\n"
    )
    from_recipe = json.loads(dstk(capsys, "memory", "--recipe", str(recipe), "--json"))
    arguments = ["--model", "gpt2", "--layout", "dp4-z2", "--seq", "512", "--micro", "2", "--accumulation", "4"]
    from_options = json.loads(dstk(capsys, "memory", *arguments, "--json"))
    assert from_recipe["stages"] == from_options["stages"]


def test_a_layout_has_the_flags_of_a_recipes(capsys):
    asked = ["memory", "--model", "gpt2", "--json", "--gpu", "L40S", "--layout"]
    flags = json.loads(dstk(capsys, *asked, "dp4-tp2-z1-sp-recompute"))
    options = json.loads(dstk(capsys, *asked, "dp4-tp2-z1", "--sequence-parallel", "--recompute", "full"))
    assert flags == options
    found = [json.loads(dstk(capsys, *asked, f"dp4-z0{flag}"))["stages"][0] for flag in ("", "-offacts")]
    assert found[1]["activations"]["mlp"] < found[0]["activations"]["mlp"] / 2
    assert refused("--model", "gpt2", "--layout", "dp4-z0-offload").field == "offload_optimizer"


def test_a_layout_of_a_plan_ends_in_its_micro_batch(capsys):
    words = ["memory", "--model", "gpt2", "--seq", "512", "--json", "--layout"]
    planned = dstk(capsys, *words, "dp8-tp1-pp1-z3-recompute-m4")
    assert planned == dstk(capsys, *words, "dp8-tp1-pp1-z3-recompute", "--micro", "4")
    assert json.loads(planned)["micro_batch_size"] == 4
    assert json.loads(dstk(capsys, *words, "dp8-z3-m4", "--micro", "2"))["micro_batch_size"] == 2
    assert "'m0' is not a part of a layout" in refusal(capsys, *words[1:], "dp8-z3-m0")


def test_an_option_takes_the_place_of_a_recipes_field(capsys):
    arguments = [
        "memory",
        "--recipe",
        "gpt2-xl-pretrain",
        "--layout",
        "z3-recompute",
        "--world-size",
        "4",
        "--json",
    ]
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


def test_a_cell_that_training_refuses_has_an_error(capsys):
    found = json.loads(
        dstk(capsys, "memory", "--model", "gpt2", "--layout", "u2", "--sweep", "zero,recompute", "--json")
    )
    assert all("total" in cell for cell in found["cells"])
    found = json.loads(dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp4-tp2", "--sweep", "zero", "--json"))
    assert [cell["zero"] for cell in found["cells"] if "error" in cell] == [0]
    assert "Use --layout dp4-tp2-pp1-z1" in found["cells"][0]["error"]


def test_a_swept_length_that_ranks_cannot_share_is_refused(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_head": 6, "n_embd": 48, "n_positions": 1024}))
    arguments = ["memory", "--model", str(config), "--layout", "u3", "--sweep", "seq", "--seq", "1023", "--json"]
    (cell,) = json.loads(dstk(capsys, *arguments))["cells"]
    assert "--seq 1024 with ulysses=3: each rank takes an equal part" in cell["error"]


def test_the_json_of_a_sweep_has_the_query(capsys):
    arguments = ["memory", "--model", "gpt2", "--layout", "dp8", "--gpu", "A100-40", "--sweep", "zero,micro", "--json"]
    found = json.loads(dstk(capsys, *arguments))
    assert (found["model"], found["layout"], found["gpu"]) == ("gpt2", "dp8-tp1-pp1-z0", "A100-SXM-40GB")
    assert [(cell["zero"], cell["micro"]) for cell in found["cells"][4:6]] == [(0, 16), (1, 1)]


def test_the_json_has_settings_that_the_layout_string_lacks(capsys):
    arguments = ["--sequence-parallel", "--offload-optimizer", "--attention", "flash", "--recompute", "full", "--json"]
    found = json.loads(dstk(capsys, "memory", "--model", "gpt2", "--layout", "dp2-tp2-z1", *arguments))
    names = ("engine", "attention", "recompute", "sequence_parallel", "offload_optimizer", "offload_params")
    assert [found[name] for name in names] == ["deepspeed", "flash", "full", True, "cpu", "none"]


def ddp_recipe(folder: Path) -> str:
    path = folder / "ddp.yaml"
    path.write_text(
        "{model: {name_or_path: gpt2}, data: {seq_len: 512}, batch: {global_batch_size: 6, micro_batch_size: 1}, "
        "precision: bf16, optimizer: {lr: 1e-4}, train: {steps: 1, engine: ddp}}"
    )
    return str(path)


def test_zero_stages_are_not_swept_where_the_engine_has_none(capsys, tmp_path):
    arguments = ["--recipe", ddp_recipe(tmp_path), "--world-size", "2"]
    assert refused(*arguments, "--sweep", "micro,zero").settings[0] == ("--sweep", "zero")
    assert "micro 16" in dstk(capsys, "memory", *arguments, "--sweep", "recompute,micro")


def test_the_title_has_attention_accumulation_and_engine(capsys, tmp_path):
    arguments = ["--recipe", ddp_recipe(tmp_path), "--world-size", "2", "--attention", "eager"]
    title = dstk(capsys, "memory", *arguments).splitlines()[0]
    assert title == "gpt2, ddp, dp2, bf16, micro-batch 1 x 512, accumulation 3, eager"


def test_the_stage_that_needs_most_is_always_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    arguments = ["--model", "llama-3-70b", "--layout", "pp40-z1", "--gpu", "A100-40"]
    stages = json.loads(dstk(capsys, "memory", *arguments, "--json"))["stages"]
    worst = max(stages, key=lambda stage: stage["total"])["stage"]
    assert 2 < worst < 39  # neither among the first nor the last
    out = dstk(capsys, "memory", *arguments)
    assert out.splitlines()[2].split()[-4:] == ["stage", str(worst), "stage", "39"]
    assert f"stages 0 to {worst - 1}, {worst + 1} to 38" in out


@pytest.mark.parametrize(("layout", "words"), [("dp4-z3", "parameters before ZeRO"), ("dp4-z2", "parameters per rank")])
def test_parameters_are_counted_before_zero_shards_them(capsys, layout, words):
    assert words in dstk(capsys, "memory", "--model", "gpt2", "--layout", layout)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            ["--recipe", "gpt2-xl-pretrain", "--layout", "z3-recompute"],
            "note: for 1 rank, as neither --world-size nor parallel.dp says",
        ),
        (["--recipe", "gpt2-xl-pretrain", "--layout", "z3-recompute", "--world-size", "4"], ""),
        (["--model", "gpt2", "--layout", "dp4", "--gpu", "T4"], "note: T4 has no bf16 units"),
        (
            ["--model", "llama-3-8b", "--layout", "dp8-z3-recompute", "--seq", "16384"],
            (
                "note: llama-3-8b has 8192 positions; training on 16384 tokens needs "
                "model.overrides.max_position_embeddings=16384\n"
            ),
        ),
        (["--model", "llama-3-8b", "--layout", "dp8-z3-recompute", "--seq", "8192"], ""),
        (
            ["--model", "gpt2", "--layout", "dp4", "--gpu", "A100"],
            "note: --gpu A100 is taken for A100-SXM-80GB; others",
        ),
        (["--model", "gpt2", "--layout", "dp4", "--gpu", "A100-SXM-40GB"], ""),
        (
            [
                "--recipe",
                "gpt2-xl-pretrain",
                "--layout",
                "z3-recompute",
                "--world-size",
                "8",
                "--micro",
                "48",
            ],
            "note: batch.global_batch_size is 768 here, not 512: the next multiple of 48 samples x dp 8.",
        ),
        (
            [
                "--recipe",
                "gpt2-xl-pretrain",
                "--layout",
                "z3-recompute",
                "--world-size",
                "8",
                "--micro",
                "16",
            ],
            "",
        ),
        (["--model", "gpt2", "--layout", "dp4", "--gpu", "T4", "--precision", "fp16"], ""),
    ],
)
def test_notes_state_guesses_and_what_will_not_train(capsys, arguments, note):
    with pytest.raises(SystemExit):
        main(["memory", *arguments])
    written = capsys.readouterr().err
    assert written.startswith(note) if note else not written


def test_a_plot_is_written(capsys, tmp_path):
    path = tmp_path / "memory.png"
    dstk(capsys, *LLAMA, "--plot", str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("worst", [0, 23, 38, 63])
def test_of_64_bars_the_first_the_last_or_the_tallest_are_labelled_and_none_touch(worst):
    from toolkit.report.images import places_to_label

    places = places_to_label([2.0 if place == worst else 1.0 for place in range(64)])
    assert worst in places
    assert {0, 63} & set(places)
    assert min(after - before for before, after in pairwise(places)) >= 8


def test_of_16_bars_each_is_labelled():
    from toolkit.report.images import places_to_label

    assert places_to_label([1.0] * 16) == list(range(16))


def test_a_config_json_alone_is_enough(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 512}))
    from_file = dstk(capsys, "memory", "--model", str(config), "--layout", "dp2-z2", "--json")
    from_folder = dstk(capsys, "memory", "--model", str(tmp_path), "--layout", "dp2-z2", "--json")
    assert json.loads(from_file)["stages"] == json.loads(from_folder)["stages"]


def test_a_recipe_without_attention_is_estimated_with_what_the_family_has(capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    text = (
        "model: {name_or_path: gemma-2-2b}\ndata: {seq_len: 128}\nbatch: {global_batch_size: 2, micro_batch_size: 1}\n"
    )
    recipe.write_text(f"{text}precision: bf16\noptimizer: {{lr: 1e-4}}\ntrain: {{steps: 1}}\n")
    asked = [[], ["--attention", "eager"], ["--attention", "flash"]]
    default, eager, flash = (
        dstk(capsys, "memory", "--recipe", str(recipe), "--world-size", "2", *one) for one in asked
    )
    assert default.splitlines()[1:] == eager.splitlines()[1:]
    assert default.splitlines()[1:] != flash.splitlines()[1:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nope", "--layout", "dp2"], "model=nope: it is neither a known shape nor a directory"),
        (["--model", "llama3-70", "--layout", "dp2"], "nothing is fetched from a hub. Did you mean llama-3-70b,"),
        (["--model", "someone/Llama3-70B", "--layout", "dp2"], "from a hub. Did you mean llama-3-70b?"),
        (
            ["--recipe", "gpt2-xl-pretrain", "--layout", "z3-recompute", "--world-size", "7"],
            "512 is not a multiple of 8 x 7 = 56.",
        ),
        (["--model", "gpt2", "--layout", "dp2-tp5"], "tp=5: 12 attention heads cannot be shared equally by 5 ranks"),
        (["--model", "llama-3.2-1b", "--layout", "tp16", "--optimizer", "adamw8bit"], "--optimizer adamw8bit"),
        (
            ["--model", "gpt2", "--layout", "dp2", "--chunked-loss", "64"],
            "--chunked-loss 64: this toolkit's recipes do",
        ),
        (
            ["--recipe", "gpt2-xl-pretrain", "--layout", "z3-recompute", "--chunked-loss", "64"],
            "Omit --chunked-loss.",
        ),
        (["--model", "gpt2", "--layout", "dp2", "--trainable", "lora"], "--trainable lora: this toolkit's recipes do"),
        (
            ["--model", "gpt2", "--layout", "dp2", "--framework", "megatron", "--trainable", "lora"],
            "--framework megatron with --trainable lora",
        ),
        (["--model", "gpt2", "--layout", "tp2", "--engine", "ddp", "--optimizer", "adamw8bit"], "Leave tp and pp out"),
        (["--model", "gpt2", "--layout", "pp13"], "pp=13: 12 decoder layers cannot fill 13 stages"),
        (["--model", "gpt2", "--layout", "dp2-q3"], "'q3' is not a part of a layout"),
        (["--model", "gpt2", "--layout", "dp2-pp2-z3"], "a DeepSpeed pipeline allows zero_stage 0 or 1"),
        (
            ["--model", "gpt2", "--layout", "dp2", "--gpu", "H1000"],
            "gpu=H1000: it is not in the catalogue. Did you mean H100",
        ),
        (["--model", "gpt2", "--layout", "dp2", "--seq", "5000"], "gpt2 has 1024 positions"),
        (
            ["--model", "bloom-560m", "--layout", "dp2", "--recompute", "selective"],
            "recompute selective: bloom computes attention in its own layers",
        ),
        (["--model", "gpt2"], "Name --model and --layout, or a --recipe"),
        (["--model", "gpt2", "--recipe", "r.yaml"], "Omit --model."),
        (["--model", "gpt2", "--layout", "dp2", "--sweep", "colour"], "'colour' cannot be swept"),
        (["--model", "gpt2", "--layout", "dp2", "--plot", "/nowhere/a.png"], "--plot /nowhere/a.png"),
        (
            ["--model", "gpt2", "--layout", "dp2", "--plot", "a.png", "--sweep", "zero"],
            "--plot a.png with --sweep zero: a plot shows one layout",
        ),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert words in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dp8-tp4"], "zero_stage=0 with tp=4 and --precision bf16: without ZeRO"),
        (["dp8-tp4"], "Use --layout dp8-tp4-pp1-z1, or --precision fp32."),
        (["pp2"], "Use --layout dp1-tp1-pp2-z1, or --precision fp32."),
        (["dp4-tp2-z0"], "zero_stage=0 with tp=2"),
        (["pp2", "--precision", "fp16"], "zero_stage=0 with pp=2 and --precision fp16: without ZeRO"),
        (["tp2-u2"], "ulysses=2 with tp=2"),
        (["pp2-u2"], "ulysses=2 with pp=2"),
        (["u2", "--attention", "eager"], "--attention eager with ulysses=2"),
        (["u2", "--seq", "1023"], "--seq 1023 with ulysses=2: each rank takes an equal part of a sequence"),
        (["tp2-z1", "--sequence-parallel", "--seq", "1023"], "Use --seq 1022 or 1024, or no --sequence-parallel."),
        (["u2-z1", "--model", "bloom-560m"], "ulysses=2: the family bloom was not found to train the same"),
    ],
)
def test_refusals_of_training_name_the_options(capsys, arguments, words):
    assert words in refusal(capsys, "--model", "llama-3-8b", "--layout", *arguments)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2-tp2-pp2"])
def test_the_advised_zero_stage_works(capsys, layout):
    line = refusal(capsys, "--model", "llama-3-8b", "--layout", layout)
    advice = line.partition("Use --layout ")[2].partition(",")[0]
    assert "allocated at the peak" in dstk(capsys, "memory", "--model", "llama-3-8b", "--layout", advice)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({"model_type": "mamba"}, ("model_type", "mamba")),
        ({"model_type": "gpt_neox", "n_layer": 12}, ("n_layer", 12)),
        ({"hidden_size": 64}, ("model_type", None)),
    ],
)
def test_a_config_that_is_no_decoder_with_pipelines_is_refused(tmp_path, config, given):
    path: Path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert refused("--model", str(path), "--layout", "dp2").settings == (given,)


def test_more_tokens_than_positions_are_refused_for_a_family_whose_config_is_not_read(tmp_path):
    path: Path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "is_decoder": True, "num_hidden_layers": 2}))
    assert refused("--model", str(path), "--layout", "dp2", "--seq", "4096").field == "--seq"


def test_a_model_file_that_is_no_config_is_refused(capsys, tmp_path):
    path: Path = tmp_path / "config.json"
    path.write_text("[1]")
    assert "not a JSON object but a list" in refusal(capsys, "--model", str(path), "--layout", "dp2")


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
