"""`dstk config`: recipes, flags, formats and files. What is in them is tested with `toolkit.dsconfig`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from stub_launchers import recorded

from toolkit.cli.config_options import _layout_fields
from toolkit.cli.main import main
from toolkit.config.layout import Layout

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "gpt2" / "gpt2-xl-pretrain.yaml")
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


def test_the_recipe_can_be_an_option(capsys: Output) -> None:
    assert made(capsys, "--recipe", RECIPE, "--world-size", "8") == made(capsys, RECIPE, "--world-size", "8")


def test_flags_alone_say_what_a_recipe_says(capsys: Output) -> None:
    same = ("--lr", "2e-4", "--betas", "0.9", "0.95", "--weight-decay", "0.1")
    assert made(capsys, *FLAGS, *same) == made(capsys, RECIPE, "--world-size", "8")


def with_layout(layout: str) -> tuple[str, ...]:
    return (*FLAGS[:2], "--layout", layout, *FLAGS[4:])


def test_flags_alone_take_every_part_of_a_layout(capsys: Output) -> None:
    assert made(capsys, *with_layout("dp8-z3-offload"))["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert made(capsys, *with_layout("dp8-hpz4-z3"))["zero_optimization"]["zero_hpz_partition_size"] == 4
    layout = "dp2-pp2-zbvw2-z1"
    fields = _layout_fields({"layout": layout})  # DeepSpeed's config has no schedule
    assert fields["parallel.schedule"] == "zb-v"
    assert fields["parallel.max_pending_weights"] == 2


def test_a_flag_goes_before_the_same_part_of_a_layout(capsys: Output) -> None:
    flags = ("--offload-optimizer", "none", "--offload-params", "none")
    assert made(capsys, *with_layout("dp8-z3-offload"), *flags) == made(capsys, *with_layout("dp8-z3"))


def test_a_layout_without_a_stage_is_read_as_every_command_reads_it(capsys: Output) -> None:
    assert made(capsys, *with_layout("dp8"))["zero_optimization"]["stage"] == Layout.parse("dp8").zero_stage


def test_nodes_times_gpus_is_the_world_size(capsys: Output) -> None:
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


def test_a_program_may_pass_its_own_optimizer(capsys: Output) -> None:
    assert run(*FLAGS, "--optimizer", "none") == 0
    printed = capsys.readouterr()
    assert "optimizer" not in json.loads(printed.out)
    assert "note: there is no optimizer section" in printed.err


@pytest.mark.parametrize("name", ["onebitadam", "zerooneadam", "onebitlamb"])
def test_a_removed_optimizer_is_an_error_with_the_reason(capsys: Output, name: str) -> None:
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
        ((*FLAGS, "--explain", "--launcher", "slurm"), "Omit --output"),
        ((*FLAGS, "--host", "a", "--host", "b"), "2 host names for 1 nodes"),
        ((*FLAGS, "--world-size", "4", "--nodes", "1", "--gpus-per-node", "8"), "Omit one of them"),
        ((*FLAGS, "--gpu", "H1000"), "not in the catalogue"),
        (
            ("--model", "gpt2-xl", "--layout", "dp8-tp3-z1", *FLAGS[4:]),
            "tp=3: 25 attention heads cannot be shared equally by 3 ranks. Set tp to 1, 5 or 25.",
        ),
        (("--model", "gpt9", *FLAGS[2:]), "it is neither a known shape nor a directory"),
        (("--model", "some-org/llama3-70b", *FLAGS[2:]), "Did you mean llama-3-70b?"),
        (
            (*FLAGS, "--layout", "dp8-z3", "--offload-optimizer", "nvme"),
            "no --nvme-path with --offload-optimizer nvme: nothing says where the drive is mounted. Use --nvme-path a",
        ),
        (
            (*FLAGS, "--layout", "dp8-z2", "--quantized-weights"),
            "--quantized-weights with zero_stage=2: ZeRO++ is a part of ZeRO-3",
        ),
        ((*FLAGS, "--optimizer", "adamw8bit", "--offload-optimizer", "cpu"), "without kernels"),
        ((RECIPE, "train.engine=ddp"), "takes no DeepSpeed config"),
        ((RECIPE, "--world-size", "8", "--micro", "48", "--global-batch", "100"), "100 is not a multiple of 48 x 8"),
    ],
)
def test_a_mistake_is_one_line(capsys: Output, words: tuple[str, ...], message: str) -> None:
    printed = refusal(capsys, *words)
    assert message in printed
    assert len(printed.splitlines()) == 1


ELASTIC = (RECIPE, "--nodes", "2", "--gpus-per-node", "8", "--min-nodes", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--launcher", "slurm", "parallel=auto"), "only torchrun starts this toolkit's program again"),
        (("--launcher", "torchrun", "parallel=auto", "--script", "mine.py"), "and no --script"),
        (("--launcher", "torchrun", "--layout", "dp16"), "Add parallel=auto, and omit --layout"),
        (("--launcher", "torchrun", "parallel=auto", "--min-nodes", "3"), "there are 2 nodes at most"),
        (("--launcher", "torchrun", "parallel=auto", "--monitor", "csv"), "need a JSON, which is that of one layout"),
    ],
)
def test_what_no_elastic_job_can_be_is_refused(capsys: Output, words: tuple[str, ...], message: str) -> None:
    printed = refusal(capsys, *ELASTIC, *words)
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_an_elastic_job_plans_at_each_start_and_resumes(capsys: Output) -> None:
    words = ("--launcher", "torchrun", "parallel=auto", "--gpu", "H100-SXM-80GB", "--run-name", "xl")
    assert run(*ELASTIC, *words) == 0
    script = capsys.readouterr().out
    assert "--nnodes 1:2 --max_restarts 100" in script
    assert "parallel=auto --resume auto run_dir=runs/xl" in script
    assert "ds_config.json" not in script
    assert "--layout" not in script


def test_conflicts_of_options_are_lines_that_name_the_options(capsys: Output) -> None:
    words = ("--grad-accum-dtype", "fp16", "--cpu-checkpointing")
    first, second = refusal(capsys, *FLAGS, *words).splitlines()
    assert first.startswith("error: --grad-accum-dtype fp16 with --precision bf16: ")
    assert second.startswith("error: --cpu-checkpointing with")
    words = ("--layout", "dp8-z2", "--offload-params", "nvme", "--nvme-path", "/n")
    assert "with zero_stage=2: only ZeRO-3 shards parameters" in refusal(capsys, *FLAGS, *words)
    assert "--grad-accum-dtype fp16 with --precision bf16: " in refusal(capsys, *FLAGS, "--grad-accum-dtype", "fp16")


def test_all_writes_every_format(capsys: Output, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    words = (*FLAGS[:2], "--layout", "z3", *FLAGS[4:], "--nodes", "2", "--gpus-per-node", "8")
    assert run(*words, "--format", "all", "--launcher", "deepspeed", "--output", str(folder)) == 0
    names = ["ds_config.json", "accelerate.yaml", "ds_config_accelerate.json", "ds_config_auto.json"]
    names += ["launch.sh", "hostfile"]
    assert {path.name for path in folder.iterdir()} == set(names)
    assert capsys.readouterr().out.split() == [str(folder / name) for name in names]
    named = yaml.safe_load((folder / "accelerate.yaml").read_text())["deepspeed_config"]["deepspeed_config_file"]
    assert Path(named).is_absolute()
    assert "optimizer" not in json.loads(Path(named).read_text())
    assert json.loads((folder / "ds_config_auto.json").read_text())["train_batch_size"] == "auto"


def test_the_launch_line_of_a_recipe_repeats_what_was_changed(capsys: Output) -> None:
    assert run(RECIPE, "train.steps=3000", "--micro", "4", "--world-size", "8", "--launcher", "torchrun") == 0
    line = capsys.readouterr().out.replace("\\\n", " ")
    assert f"-m toolkit.training --config {RECIPE}" in line
    assert "train.steps=3000 batch.micro_batch_size=4" in line
    assert "--deepspeed_config" not in line


def test_a_batch_that_micro_does_not_divide_is_rounded_up_also_for_the_run(capsys: Output) -> None:
    words = (RECIPE, "--world-size", "8", "--micro", "48")
    assert (made(capsys, *words)["train_batch_size"], made(capsys, *words)["gradient_accumulation_steps"]) == (768, 2)
    assert run(*words, "--launcher", "torchrun") == 0
    printed = capsys.readouterr()
    assert "batch.global_batch_size=768 batch.micro_batch_size=48" in printed.out.replace("\\\n    ", "")
    assert printed.err.startswith(
        "note: batch.global_batch_size is 768 here, not 512: the next multiple of 48 samples x"
    )


def test_the_launch_line_of_a_recipe_names_the_json_where_options_change_it(capsys: Output) -> None:
    assert run(RECIPE, "--world-size", "8", "--gpu", "H100-SXM-80GB", "--launcher", "deepspeed") == 0
    printed = capsys.readouterr()
    assert '--deepspeed_config "$here"/ds_config.json' in printed.out.replace("\\\n    ", "")
    assert printed.err == "note: it reads ds_config.json beside itself; --output DIR writes script and files.\n"


class TestWithoutAShape:
    """A mixture of experts trains, though its shape is not read: its width is enough, and only where it is used."""

    @pytest.fixture
    def mixture(self, tmp_path: Path) -> str:
        config = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config |= {"intermediate_size": 128, "vocab_size": 512, "num_local_experts": 4}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    def test_buckets_follow_from_the_width_as_in_training(self, mixture: str, capsys: Output) -> None:
        from transformers import AutoConfig

        from toolkit.dsconfig.buckets import of_a_layer

        zero = made(capsys, "--model", mixture, *FLAGS[2:])["zero_optimization"]
        assert zero["stage3_param_persistence_threshold"] == 640
        width = AutoConfig.from_pretrained(mixture).get_text_config().hidden_size
        assert zero["reduce_bucket_size"] == of_a_layer(width).reduce
        assert run("--model", mixture, *FLAGS[2:], "--explain") == 0

    def test_what_follows_from_the_whole_shape_says_so(self, mixture: str, capsys: Output) -> None:
        assert "mixtral" in refusal(capsys, "--model", mixture, *FLAGS[2:], "--gpu", "H100-SXM-80GB")
        nvme = ("--offload-params", "nvme", "--nvme-path", "/n")
        assert "mixtral" in refusal(capsys, "--model", mixture, *FLAGS[2:], *nvme)

    def test_a_hub_name_is_enough_where_no_width_is_written(self, capsys: Output) -> None:
        hub = ("--model", "some-org/some-model", *FLAGS[2:])
        assert made(capsys, *hub, "--layout", "dp8-z0")["zero_optimization"] == {"stage": 0}
        assert made(capsys, *hub, "--format", "hf-trainer")["zero_optimization"]["reduce_bucket_size"] == "auto"
        assert run(*hub, "--launcher", "slurm") == 0
        assert "nothing is fetched from a hub" in refusal(capsys, *hub)


class TestScripts:
    """What is written runs from any directory."""

    @pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "accelerate", "slurm"])
    @pytest.mark.parametrize("nodes", ["1", "2"])
    @pytest.mark.parametrize("options", [(), ("--gpu", "H100-SXM-80GB"), ("--format", "all")], ids=" ".join)
    def test_a_script_of_a_recipe_names_files_that_exist(
        self, launcher: str, nodes: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        Path("my text").mkdir()
        text = Path(RECIPE).read_text()
        Path("my recipe.yaml").write_text(re.sub(r"source: .*\n  subset: .*", "source: my text", text))
        where = ("--nodes", nodes, "--gpus-per-node", "8", "--launcher", launcher, "--output", "made here")
        assert run("my recipe.yaml", *where, *options) == 0
        folder = tmp_path / "moved" if launcher != "slurm" else Path("made here").absolute()
        if launcher != "slurm":  # which runs a copy of its script, and so finds its files where they were written
            Path("made here").rename(folder)
        script = folder / ("launch.sh" if launcher != "slurm" else "job.sbatch")
        subprocess.run(["bash", "-n", str(script)], check=True)
        copy = script.rename(tmp_path / "slurm_script") if launcher == "slurm" else script
        words = recorded(copy, "0", folder=tmp_path, cwd=Path("/"))
        named = [
            word.rpartition("=")[2].strip('"')
            for word in words
            if word.startswith("/") or "=/" in word or '="/' in word
        ]
        assert [name for name in named if not Path(name).exists()] == []
        assert str(folder / "my recipe.yaml") in named
        assert f'data.source="{Path("my text").absolute()}"' in words
        assert ("--deepspeed_config" in words) == ("--gpu" in options)
        assert (str(folder / "accelerate.yaml") in named) == (launcher == "accelerate" and "all" in options)
        assert "toolkit.training" in words

    def test_a_script_of_a_program_names_it_by_its_absolute_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert run(*FLAGS, "--launcher", "torchrun") == 0
        assert '"$here"/train.py' in capsys.readouterr().out
        Path("train.py").touch()
        for words, named in (
            ((), "train.py --deepspeed_config"),
            (("--script", "./train.py --size 3.5"), "train.py --size 3.5"),
        ):
            assert run(*FLAGS, "--launcher", "torchrun", *words) == 0
            joined = capsys.readouterr().out.replace(" \\\n    ", " ")  # a long path is broken into lines
            assert f"{tmp_path}/{named}" in joined

    def test_a_recipe_is_not_overwritten_by_a_file_of_its_name(self, tmp_path: Path, capsys: Output) -> None:
        recipe = tmp_path / "accelerate.yaml"
        recipe.write_text(Path(RECIPE).read_text())
        words = (str(recipe), "--world-size", "8", "--format", "accelerate", "--launcher", "torchrun")
        assert "Rename the recipe" in refusal(capsys, *words, "--output", str(tmp_path))
        assert recipe.read_text() == Path(RECIPE).read_text()


def test_explain_is_a_table_of_every_key(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")  # long keys are folded where a table is narrow
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
