"""Options of generated configs: bucket sizes from a link, refused combinations, sections, `auto`, launch scripts."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from config_jobs import job, shape

from toolkit.dsconfig.accelerate import accelerate_yaml
from toolkit.dsconfig.buckets import derive, largest_partition, link_of, smallest_bytes
from toolkit.dsconfig.job import ConfigJob
from toolkit.dsconfig.launch import Launch
from toolkit.dsconfig.trainer import trainer_arguments, trainer_config
from toolkit.errors import ConfigError, LayoutError
from toolkit.hardware import gpu
from toolkit.layout import Layout


def link(name: str = "H100-SXM-80GB", layout: str = "dp8-z2", *, per_node: int = 8, gbit: float = 400) -> Any:
    return link_of(gpu(name), Layout.parse(layout), gpus_per_node=per_node, network_bytes_per_second=gbit * 1e9 / 8)


class TestBuckets:
    def test_nine_tenths_of_a_smallest_collective_are_spent_on_bytes(self) -> None:
        between = link()
        moving = smallest_bytes(between) * 7 / 8 / between.bytes_per_second
        assert moving / (moving + between.latency_seconds) == pytest.approx(0.9)

    def test_latency_counts_hops_inside_and_between_nodes(self) -> None:
        # 16 ranks on 2 nodes: 14 hops of NVLink at 3.4 us, one of the network at 14 us, 8.4 us to start
        assert link(layout="dp16-z2").latency_seconds == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6)

    def test_tensor_parallel_ranks_push_data_parallel_ones_onto_more_nodes(self) -> None:
        assert link(layout="dp8-z1").bytes_per_second == 450e9
        assert link(layout="dp8-tp2-z1").bytes_per_second == 50e9

    def test_the_network_cannot_be_faster_than_the_card(self) -> None:
        assert link("A100-PCIe-40GB", "dp16-z2", gbit=3200).bytes_per_second == 32e9

    def test_a_slow_link_asks_for_one_layer_and_a_fast_one_for_more(self) -> None:
        layer = 12 * 1600**2
        slow = derive(shape(), Layout.parse("dp8-z2"), link("T4"))
        fast = derive(shape(), Layout.parse("dp8-z2"), link())
        assert slow.reduce == pytest.approx(layer, abs=100_000)
        assert fast.reduce == pytest.approx(smallest_bytes(link()) / 4, abs=100_000)
        assert fast.reduce > slow.reduce

    def test_a_small_model_still_has_four_buckets(self) -> None:
        small = derive(shape("gpt2"), Layout.parse("dp8-z2"), link())
        parameters = 124_439_808 - 1024 * 768  # matrices and the tied head
        assert small.reduce == pytest.approx(parameters / 4, rel=0.01)

    def test_sixteen_bits_need_twice_the_elements(self) -> None:
        buckets = derive(shape(), Layout.parse("dp8-z3"), link(), gradient_bytes=4, parameter_bytes=2)
        assert buckets.prefetch == pytest.approx(2 * buckets.reduce, abs=200_000)

    def test_tensor_parallelism_makes_a_layer_smaller(self) -> None:
        whole = derive(shape("gpt2-large"), Layout.parse("dp4-z1"), link("T4", "dp4-z1"))
        cut = derive(shape("gpt2-large"), Layout.parse("dp4-tp2-z1"), link("T4", "dp4-tp2-z1"))
        assert cut.reduce == pytest.approx(whole.reduce / 2, abs=100_000)

    def test_a_buffer_on_nvme_holds_the_largest_share(self) -> None:
        share = 50257 * 1600 / 8
        assert share <= largest_partition(shape(), dp=8) < share + 2**20

    def test_the_config_has_the_derived_sizes(self) -> None:
        buckets = derive(shape(), Layout.parse("dp8-z3"), link())
        zero = job(buckets=buckets).config["zero_optimization"]
        assert zero["reduce_bucket_size"] == buckets.reduce
        assert zero["stage3_prefetch_bucket_size"] == buckets.prefetch


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("dp8-z2", {"nvme_params": True, "nvme_path": "/n"}, "only ZeRO-3 shards parameters"),
        ("dp8-z2", {"nvme_optimizer": True, "nvme_path": "/n"}, "keep them in host memory and say nothing"),
        ("dp8-z3", {"nvme_optimizer": True}, "without a path"),
        ("dp8-z3", {"nvme_path": "/n"}, "nothing is offloaded"),
        ("dp8-z2", {"hpz_partition_size": 8}, "hpZ=8 with zero_stage=2"),
        ("dp8-z2", {"quantized_weights": True}, "qwZ"),
        ("dp8-z2", {"quantized_gradients": True}, "qgZ"),
        ("dp8-z3", {"quantized_gradients": True}, "only between nodes"),
        ("dp8-z3", {"hpz_partition_size": 3}, "Choose one of 1, 2, 4, 8"),
        ("dp4-tp2-z3", {"hpz_partition_size": 2}, "as if all of them were data-parallel"),
        ("dp8-z1", {"gradient_dtype": "fp16"}, "gradient_dtype=fp16 with precision=bf16"),
        ("dp8-z0", {"communication_dtype": "bf16"}, "communication_dtype=bf16 with zero_stage=0"),
        ("dp8-z1", {"optimizer": "lamb"}, "ZeRO flattens"),
        ("dp8-z3", {"optimizer": "muon", "nvme_optimizer": True, "nvme_path": "/n"}, "would run on the CPU"),
        ("dp8-z1", {"cpu_checkpointing": True}, "nothing would be moved"),
        (
            "dp8-z1",
            {"activation_checkpointing": True, "parallel": {"recompute": "full"}},
            "layers would be recomputed twice",
        ),
        ("dp8-z1", {"scheduler": "WarmupLR", "optimizer": "none"}, "brings its own"),
        ("dp8-z1", {"profile_step": 0}, "never typical"),
    ],
)
def test_what_deepspeed_refuses_or_ignores_is_refused_in_one_line(
    layout: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        _ = job(layout, **options).config
    assert "\n" not in str(error.value)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        _ = job("dp8-z2", nvme_optimizer=True, quantized_weights=True).config
    assert len(str(error.value).splitlines()) == 3


def test_without_options_the_config_is_the_engines() -> None:
    from toolkit.dsconfig import build

    plain = job("dp8-z2")
    assert plain.config == build(plain.recipe, plain.layout, plain.batch, hidden_size=1600)


def test_zeropp_is_written_whole() -> None:
    zero = job("dp16-z3", nodes=2, hpz_partition_size=8, quantized_gradients=True).config["zero_optimization"]
    assert {key: value for key, value in zero.items() if key.startswith("zero_")} == {
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": True,
    }


def test_nodes_divide_the_ranks() -> None:
    with pytest.raises(LayoutError, match="8 ranks on 3 nodes"):
        job(nodes=3)


class TestScheduler:
    """DeepSpeed's own schedules against their closed forms."""

    @pytest.mark.parametrize(
        ("name", "step", "expected"),
        [
            ("WarmupLR", 5, 1e-4),  # half of the warm-up
            ("WarmupLR", 60, 2e-4),
            ("WarmupDecayLR", 55, 1e-4),  # half of the decay
            ("WarmupCosineLR", 54, 2e-4 * (0.1 + 0.9 / 2)),
            ("OneCycle", 49, 2e-4),
            ("LRRangeTest", 9, 2e-6 * 11),
        ],
    )
    def test_deepspeed_follows_the_recipes_numbers(self, name: Any, step: int, expected: float) -> None:
        import torch
        from deepspeed.runtime import lr_schedules

        section = job("dp8-z1", scheduler=name).config["scheduler"]
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=2e-4)
        scheduler = getattr(lr_schedules, section["type"])(optimizer, **section["params"])
        scheduler.step(step)
        # DeepSpeed counts the steps of a cycle and of a range test, and those of a cosine, from one.
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


class TestTrainer:
    def test_a_pipeline_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no pipeline"):
            trainer_config(job("dp4-pp2-z1"))

    def test_there_is_no_optimizer_of_deepspeeds(self) -> None:
        assert "optimizer" not in trainer_config(job())

    def test_offloaded_states_are_updated_by_deepspeeds_kernels(self) -> None:
        offloaded = job("dp8-z2", placed={"offload_optimizer": "cpu"})
        assert trainer_config(offloaded)["zero_force_ds_cpu_optimizer"] is True
        assert trainer_config(job("dp8-z2"))["zero_force_ds_cpu_optimizer"] is False

    def test_the_arguments_beside_it_are_the_recipes(self) -> None:
        from transformers import HfArgumentParser, TrainingArguments

        words = trainer_arguments(job(precision="fp32"))
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", "x", "--use_cpu", "true", *words]
        )
        assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * 8 == 64
        assert (arguments.learning_rate, arguments.adam_beta2, arguments.weight_decay) == (2e-4, 0.95, 0.1)
        assert arguments.lr_scheduler_kwargs == {"min_lr_rate": 0.1}

    @pytest.mark.parametrize("name", ["cosine_with_min_lr", "polynomial", "warmup_stable_decay", "cosine"])
    def test_the_schedule_is_given_what_the_engine_gives_it(self, name: Any) -> None:
        from toolkit.dsconfig.trainer import schedule_arguments
        from toolkit.train import optimizer

        recipe = job().recipe
        recipe = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"name": name})})
        assert schedule_arguments(recipe) == optimizer._specific(recipe)


class TestAccelerate:
    def test_accelerate_reads_it_and_starts_the_job(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_deepspeed_cmd_env

        path = tmp_path / "accelerate.yaml"
        path.write_text(accelerate_yaml(job("dp8-z3"), config_file="ds.json", main_address="node1", main_port=29511))
        parsed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        arguments, defaults, _ = _validate_launch_command(parsed)
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(arguments)
        assert arguments.use_deepspeed
        assert arguments.nproc_per_node == "8"
        assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "ds.json"
        assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"

    def test_the_plugin_takes_the_json_that_it_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from accelerate import DeepSpeedPlugin

        made = job("dp8-z3")
        text = accelerate_yaml(made, config_file="ds.json", main_address="node1", main_port=29511)
        fields = [line.split(":")[0].strip() for line in text.splitlines() if line.startswith("  ")]
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(fields))
        plugin = DeepSpeedPlugin(hf_ds_config=dict(made.config))
        assert (plugin.zero_stage, plugin.gradient_clipping) == (3, 0.7)


class TestLaunch:
    """Each script against the launcher's own parser."""

    @staticmethod
    def words(launcher: Any, made: ConfigJob, **options: Any) -> list[str]:
        """The arguments that the launcher gets, as bash splits them."""
        script = Launch(job=made, program=["train.py", "--note", "a b"], **options).script(launcher)
        body = script.replace("cat > hostfile", "cat > /dev/null")
        shadow = (
            f'{launcher}() {{ printf "%s\\n" "$@"; }}; srun() {{ printf "%s\\n" "$@"; }}; scontrol() {{ echo n1; }}\n'
        )
        done = subprocess.run(
            ["bash", "-c", shadow + body, "job", "1"],
            env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    def test_deepspeed(self) -> None:
        from deepspeed.launcher.runner import parse_args

        one = parse_args(self.words("deepspeed", job()))
        assert (one.num_gpus, one.user_script, one.user_args) == (8, "train.py", ["--note", "a b"])
        two = parse_args(self.words("deepspeed", job("dp16-z3", nodes=2)))
        assert two.hostfile == "hostfile"

    def test_the_hostfile_is_one_that_deepspeed_reads(self, tmp_path: Path) -> None:
        from deepspeed.launcher.runner import fetch_hostfile

        (tmp_path / "hostfile").write_text(
            Launch(job=job("dp16-z3", nodes=2), program=["x"], hosts=["a", "b"]).hostfile()
        )
        assert dict(fetch_hostfile(str(tmp_path / "hostfile"))) == {"a": 8, "b": 8}

    def test_torchrun(self) -> None:
        from torch.distributed.run import get_args_parser

        told = get_args_parser().parse_args(
            self.words("torchrun", job("dp16-z3", nodes=2), hosts=["a", "b"], port=2950)
        )
        assert (told.nnodes, told.nproc_per_node, told.rdzv_endpoint) == ("2", "8", "a:2950")
        assert (told.training_script, told.training_script_args) == ("train.py", ["--note", "a b"])

    def test_accelerate(self) -> None:
        from accelerate.commands.launch import launch_command_parser

        words = self.words("accelerate", job("dp16-z3", nodes=2))
        assert words[0] == "launch"
        told = launch_command_parser().parse_args(words[1:])
        assert (told.num_machines, told.num_processes, told.machine_rank) == (2, 16, 1)
        assert told.use_deepspeed

    def test_accelerate_with_its_yaml(self) -> None:
        words = self.words("accelerate", job(), accelerate_config="accelerate.yaml")
        assert words == ["launch", "--config_file", "accelerate.yaml", "train.py", "--note", "a b"]

    def test_slurm_starts_torchrun_on_every_node(self) -> None:
        from torch.distributed.run import get_args_parser

        words = self.words("slurm", job("dp16-z3", nodes=2))
        told = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert (told.nnodes, told.nproc_per_node, told.rdzv_endpoint) == ("2", "8", "n1:20007")

    def test_slurm_asks_for_nodes_and_gpus(self) -> None:
        script = Launch(job=job("dp16-z3", nodes=2), program=["x"]).script("slurm")
        assert "#SBATCH --nodes=2\n" in script
        assert "#SBATCH --gpus-per-node=8\n" in script
        assert "#SBATCH --ntasks-per-node=1\n" in script
