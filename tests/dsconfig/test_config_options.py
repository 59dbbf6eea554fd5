"""Options of generated configs: bucket sizes from a link, refused combinations, sections, `auto`, launch scripts."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from config_jobs import job, shape
from nonempty import nonempty
from refusals import refused
from slow_tests import ROOT
from stub_launchers import recorded

from toolkit.config.layout import Layout
from toolkit.dsconfig.buckets import derive, largest_partition, link_of, smallest_bytes
from toolkit.dsconfig.build import ConfigJob
from toolkit.dsconfig.launch_scripts import SRUN_OPTIONS, TRAIN, Launch
from toolkit.dsconfig.trainer import trainer_arguments, trainer_config
from toolkit.errors import ConfigError, LayoutError
from toolkit.hardware import gpu
from toolkit.launch import rendezvous


def link(name: str = "H100-SXM-80GB", layout: str = "dp8-z2", *, per_node: int = 8, gbit: float = 400) -> Any:
    return link_of(gpu(name), Layout.parse(layout), gpus_per_node=per_node, network_bytes_per_second=gbit * 1e9 / 8)


class TestBuckets:
    def test_the_smallest_collective_spends_90_percent_of_its_time_on_bytes(self) -> None:
        between = link()
        moving = smallest_bytes(between) * 7 / 8 / between.bytes_per_second
        assert moving / (moving + between.latency_seconds) == pytest.approx(0.9)

    def test_latency_counts_hops_within_and_between_nodes(self) -> None:
        # 16 ranks on 2 nodes: 14 hops of NVLink at 3.4 us, one of the network at 14 us, 8.4 us to start
        assert link(layout="dp16-z2").latency_seconds == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 14e-6)

    def test_tensor_parallelism_spreads_data_parallel_ranks_over_more_nodes(self) -> None:
        assert link(layout="dp8-z1").bytes_per_second == 450e9
        assert link(layout="dp8-tp2-z1").bytes_per_second == 50e9

    def test_the_network_cannot_be_faster_than_the_card(self) -> None:
        assert link("A100-PCIe-40GB", "dp16-z2", gbit=3200).bytes_per_second == 32e9

    def test_a_bucket_is_one_layer_on_a_slow_link_and_more_on_a_fast_one(self) -> None:
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
        sharded = derive(shape("gpt2-large"), Layout.parse("dp4-tp2-z1"), link("T4", "dp4-tp2-z1"))
        assert sharded.reduce == pytest.approx(whole.reduce / 2, abs=100_000)

    def test_a_buffer_on_nvme_holds_the_largest_share(self) -> None:
        share = 50257 * 1600 / 8
        assert share <= largest_partition(shape(), dp=8) < share + 2**20

    def test_the_config_has_the_derived_sizes(self) -> None:
        buckets = derive(shape(), Layout.parse("dp8-z3"), link())
        zero = job(buckets=buckets).config["zero_optimization"]
        assert zero["reduce_bucket_size"] == buckets.reduce
        assert zero["stage3_prefetch_bucket_size"] == buckets.prefetch


ZERO_3 = ("zero_stage", 3)
NVME_PATH = ("nvme_path", "a directory on a drive of each node")


@pytest.mark.parametrize(
    ("layout", "options", "fields", "remedy"),
    [
        ("dp8-z3", {"parallel": {"quantized_gradients": True}}, "quantized_gradients nodes", None),
        ("dp8-z2", {"parallel": {"quantized_weights": True}}, "quantized_weights zero_stage", ZERO_3),
        ("dp8-z2", {"nodes": 2, "parallel": {"quantized_gradients": True}}, "quantized_gradients zero_stage", ZERO_3),
        ("dp8-z3", {"parallel": {"offload_optimizer": "nvme"}}, "nvme_path offload_optimizer", NVME_PATH),
        ("dp8-z3", {"parallel": {"offload_params": "nvme"}}, "nvme_path offload_params", NVME_PATH),
        ("dp8-z1", {"gradient_dtype": "fp16"}, "gradient_dtype precision", ("gradient_dtype", "fp32 or bf16")),
        ("dp8-z0", {"communication_dtype": "bf16"}, "communication_dtype zero_stage", ("zero_stage", 1)),
        ("dp8-z1", {"optimizer": "lamb"}, "optimizer zero_stage", ("zero_stage", 0)),
        ("dp8-z3", {"optimizer": "muon", "placed": {"offload_optimizer": "cpu"}}, "optimizer offload_optimizer", None),
        ("dp8-ep2-z2", {"optimizer": "muon"}, "optimizer ep zero_stage", ("ep", 1)),
        ("dp8-z1", {"cpu_checkpointing": True}, "cpu_checkpointing activation_checkpointing", None),
        (
            "dp8-z1",
            {"activation_checkpointing": True, "parallel": {"recompute": "full"}},
            "activation_checkpointing recompute",
            None,
        ),
        ("dp8-z1", {"scheduler": "WarmupLR", "optimizer": "none"}, "scheduler optimizer", None),
        ("dp8-z1", {"profile_step": 0}, "profile_step", ("profile_step", 10)),
    ],
)
def test_options_that_deepspeed_rejects_or_ignores_are_a_one_line_error(
    layout: str, options: dict[str, Any], fields: str, remedy: object
) -> None:
    with refused(ConfigError, *fields.split(), remedy=remedy):
        _ = job(layout, **options).config


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        _ = job("dp8-z1", gradient_dtype="fp16", optimizer="lamb", profile_step=0).config
    assert len(str(error.value).splitlines()) == 3


def test_without_options_the_config_is_the_engines() -> None:
    from toolkit.dsconfig import build

    plain = job("dp8-z2")
    assert plain.config == build(plain, hidden_size=1600)


def test_zeropp_writes_all_of_its_keys() -> None:
    fields = {"hpz": 8, "quantized_gradients": True}
    zero = job("dp16-z3", nodes=2, parallel=fields).config["zero_optimization"]
    assert {key: value for key, value in zero.items() if key.startswith("zero_")} == {
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": True,
    }


def test_a_timed_pipeline_has_the_steps_that_its_engine_divides_by() -> None:
    assert job("dp4-pp2-z1", wall_clock_breakdown=True).config["steps_per_print"] == 10
    assert job("dp8-z1", wall_clock_breakdown=True).config["steps_per_print"] is None
    assert job("dp4-pp2-z1").config["steps_per_print"] is None


def test_nodes_divide_the_ranks() -> None:
    with refused(LayoutError, "nodes", "world_size"):
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
    @pytest.mark.parametrize("layout", ["dp4-pp2-z1", "dp4-ep2-z1"])
    def test_what_it_does_not_have_is_refused(self, layout: str) -> None:
        with refused(ConfigError, "layout"):
            trainer_config(job(layout))

    def test_there_is_no_optimizer_section(self) -> None:
        assert "optimizer" not in trainer_config(job())

    def test_offloaded_states_are_updated_by_deepspeeds_kernels(self) -> None:
        offloaded = job("dp8-z2", placed={"offload_optimizer": "cpu"})
        assert trainer_config(offloaded)["zero_force_ds_cpu_optimizer"] is True
        assert trainer_config(job("dp8-z2"))["zero_force_ds_cpu_optimizer"] is False

    def test_the_training_arguments_are_the_recipes(self) -> None:
        from transformers import HfArgumentParser, TrainingArguments

        words = trainer_arguments(job(precision="fp32"))
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", "x", "--use_cpu", "true", *words]
        )
        assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * 8 == 64
        assert (arguments.learning_rate, arguments.adam_beta2, arguments.weight_decay) == (2e-4, 0.95, 0.1)
        assert arguments.lr_scheduler_kwargs == {"min_lr_rate": 0.1}

    def test_the_schedule_has_the_arguments_of_the_engine(self) -> None:
        from toolkit.dsconfig.trainer import schedule_arguments
        from toolkit.engines import optimizer

        assert optimizer.schedule_arguments is schedule_arguments  # type: ignore[attr-defined]


class TestAccelerate:
    def test_accelerate_reads_it_and_starts_the_job(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_deepspeed_cmd_env

        path = tmp_path / "accelerate.yaml"
        path.write_text(Launch(job=job("dp8-z3"), program=[]).accelerate_yaml("ds.json"))
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
        text = Launch(job=made, program=[]).accelerate_yaml("ds.json")
        fields = [line.split(":")[0].strip() for line in text.splitlines() if line.startswith("  ")]
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(fields))
        plugin = DeepSpeedPlugin(hf_ds_config=dict(made.config))
        assert (plugin.zero_stage, plugin.gradient_clipping) == (3, 0.7)


class TestLaunch:
    """Each script against the launcher's own parser."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def words(self, launcher: Any, made: ConfigJob, *, module: bool = False, **options: Any) -> list[str]:
        """The arguments that the launcher gets."""
        program = [*(TRAIN if module else ["train.py"]), "--note", "a b"]
        script = self.folder / "job.sh"
        script.write_text(Launch(job=made, program=program, **options).script(launcher))
        started, *words = recorded(script, "1", folder=self.folder, cwd=self.folder)
        assert started == {"slurm": "srun"}.get(launcher, launcher)
        return words

    def test_deepspeed(self) -> None:
        from deepspeed.launcher.runner import parse_args

        one = parse_args(self.words("deepspeed", job()))
        assert (one.num_gpus, one.user_script, one.user_args) == (8, "train.py", ["--note", "a b"])
        two = parse_args(self.words("deepspeed", job("dp16-z3", nodes=2), module=True))
        assert two.hostfile == str(self.folder / "hostfile")
        assert (two.module, two.user_script) == (True, "toolkit.training")

    def test_the_hostfile_is_one_that_deepspeed_reads(self) -> None:
        from deepspeed.launcher.runner import fetch_hostfile

        self.words("deepspeed", job("dp16-z3", nodes=2), hosts=["a", "b"])
        assert dict(fetch_hostfile(str(self.folder / "hostfile"))) == {"a": 8, "b": 8}

    def test_a_hostfile_that_was_edited_is_kept(self) -> None:
        (self.folder / "hostfile").write_text("mine slots=8\n")
        self.words("deepspeed", job("dp16-z3", nodes=2))
        assert (self.folder / "hostfile").read_text() == "mine slots=8\n"

    def test_torchrun(self) -> None:
        from torch.distributed.run import get_args_parser

        made = job("dp16-z3", nodes=2)
        parsed = get_args_parser().parse_args(self.words("torchrun", made, hosts=["a", "b"], port=2950, module=True))
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("2", "8", "a:2950")
        assert (parsed.module, parsed.training_script) == (True, "toolkit.training")
        assert parsed.training_script_args == ["--note", "a b"]

    def test_torchrun_with_nodes_that_go_and_come(self) -> None:
        from torch.distributed.run import get_args_parser

        words = self.words("torchrun", job("dp16-z3", nodes=2), hosts=["a", "b"], name="gpt2", min_nodes=1, module=True)
        parsed = get_args_parser().parse_args(words)
        assert (parsed.nnodes, parsed.max_restarts, parsed.rdzv_id) == ("1:2", 100, "gpt2")
        assert parsed.rdzv_backend == rendezvous.NAME
        assert "\nexport TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (self.folder / "job.sh").read_text()

    def test_accelerate(self) -> None:
        from accelerate.commands.launch import launch_command_parser

        words = self.words("accelerate", job("dp16-z3", nodes=2), module=True)
        assert words[0] == "launch"
        parsed = launch_command_parser().parse_args(words[1:])
        assert (parsed.num_machines, parsed.num_processes, parsed.machine_rank) == (2, 16, 1)
        assert parsed.use_deepspeed
        assert (parsed.module, parsed.training_script) == (True, "toolkit.training")

    def test_accelerate_with_its_yaml(self) -> None:
        words = self.words("accelerate", job(), accelerate_files=("a.yaml", "b.json"))
        files = ["--config_file", f"{self.folder}/a.yaml", "--deepspeed_config_file", f"{self.folder}/b.json"]
        assert words == ["launch", *files, "train.py", "--note", "a b"]

    def test_slurm_starts_torchrun_on_every_node(self) -> None:
        from torch.distributed.run import get_args_parser

        words = self.words("slurm", job("dp16-z3", nodes=2))
        parsed = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("2", "8", "n1:20007")

    def test_the_documents_start_srun_with_the_same_options(self) -> None:
        documents = "\n".join(path.read_text() for path in nonempty(ROOT.glob("docs/*.md")))
        scripts = documents.join(Launch(job=job(), program=words).script("slurm") for words in (["x"], TRAIN))
        commands = re.findall(r"^(?:exec )?(srun .*)", scripts, re.MULTILINE)
        assert len(commands) > 4
        assert all(command.startswith(" ".join(("srun", *SRUN_OPTIONS))) for command in commands), commands

    def test_slurm_starts_a_rank_of_this_toolkit_in_each_task(self) -> None:
        words = self.words("slurm", job("dp16-z3", nodes=2), module=True)
        assert words[words.index("python") :] == [
            "python",
            *TRAIN,
            "--note",
            "a b",
            "run_dir=runs/7",
            "--resume",
            "auto",
        ]

    def test_a_run_that_saved_when_it_was_signaled_queues_again(self) -> None:
        script = Launch(job=job(), program=TRAIN).script("slurm")
        body = script.partition("code=0")[2]
        for code, queued in ((75, "requeue 7\n"), (1, "")):
            shadow = (
                f"srun() {{ return {code}; }}; scontrol() {{ echo $*; }}; SLURM_CPUS_PER_TASK=8 SLURM_JOB_ID=7 code=0"
            )
            done = subprocess.run(["bash", "-euc", shadow + body], capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (code, queued)

    @pytest.mark.parametrize(("program", "tasks", "cores"), [(["x"], 1, 64), (TRAIN, 8, 8)])
    def test_slurm_requests_nodes_gpus_and_cores(self, program: Sequence[str], tasks: int, cores: int) -> None:
        script = Launch(job=job("dp16-z3", nodes=2), program=program, folder="/my runs").script("slurm")
        directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
        assert {"--nodes=2", "--gpus-per-node=8", "--exclusive", "--mem=0"} <= set(directives)
        assert {f"--ntasks-per-node={tasks}", f"--cpus-per-task={cores}"} <= set(directives)
        assert "--output='/my runs/%x-%j.log'" in directives
        assert ("--requeue" in directives) == (program is TRAIN)
