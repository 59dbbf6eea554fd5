"""The same recipe and script under every launcher, with the commands of the README."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interruptions import PORT_FLAGS

from toolkit.checkpoint.verify import verify
from toolkit.config import dump_recipe, gallery, load_recipe
from toolkit.errors import RunError
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.launch.spawn import free_port

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "deepspeed --num_gpus 2 recipes/train.py --config recipes/demo.yaml",
    "accelerate launch --use_deepspeed --num_processes 2 recipes/train.py --config recipes/demo.yaml",
    "torchrun --nproc_per_node 2 recipes/train.py --config recipes/demo.yaml",
    "srun --ntasks 2 python recipes/train.py --config recipes/demo.yaml",
    "python recipes/train.py --config recipes/demo.yaml",
    "dstk train recipes/demo.yaml --nproc 2",
]
WHOLE = pytest.mark.whole
"""Seconds of start-up for what the stubs in tests/cli/test_cli_config.py check with the launchers' arguments alone."""
SRUN = """#!/usr/bin/env bash
# What srun does on one node: start the tasks, and set the number of each.
shift; tasks=$1; shift
for task in $(seq 0 $((tasks - 1))); do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=$tasks SLURM_STEP_ID=0 SLURM_JOB_ID=$$ \
  SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_NODELIST=127.0.0.1 "$@" &
done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The commands of the virtual environment first, a substitute for `srun`, and no rank variables."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def small_recipe(make_recipe, tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    model = {"name_or_path": "gpt2-tiny"}
    path.write_text(dump_recipe(make_recipe(train__steps=2, schedule={}, parallel={"zero_stage": 2}, model=model)))
    return path


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=WHOLE if command.startswith(("accelerate", "srun")) else []) for command in COMMANDS],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_a_launcher_trains_a_planned_recipe_on_its_ranks(
    command: str, environment: dict[str, str], small_recipe: Path, tmp_path: Path
) -> None:
    words = shlex.split(command.replace("recipes/demo.yaml", str(small_recipe)))
    if (flag := PORT_FLAGS.get(words[0])) is not None:
        words.insert(words.index("recipes/train.py"), f"{flag}={free_port()}")
    plan = ["parallel=auto", "batch.micro_batch_size=null"]
    kept = [f"parallel.{field}" for field in ("tp=1", "pp=1", "ulysses=1", "zero_stage=2", "recompute=none")]
    done = subprocess.run(
        [*words, *plan, *kept, f"run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in done.stderr.splitlines() if "torchao" in line or "_pytree" in line]
    expected = 1 if words[0] == "python" else 2
    assert f", dp{expected}-tp1-pp1-z2" in done.stdout
    assert load_recipe(tmp_path / "run" / "recipe.yaml").batch.micro_batch_size == 16 // expected
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]


@pytest.mark.parametrize("launcher", ["accelerate", *(pytest.param(x, marks=WHOLE) for x in ("deepspeed", "torchrun"))])
def test_a_script_that_dstk_config_wrote_trains_from_another_directory(
    launcher: str, environment: dict[str, str], small_recipe: Path, tmp_path: Path
) -> None:
    words = ["dstk", "config", small_recipe.name, "--world-size", "2", "--device", "cpu", "--port", str(free_port())]
    words += ["--launcher", launcher, "--output", "made here", f"run_dir={tmp_path / 'run'}"]
    words += ["--format", "accelerate"] * (launcher == "accelerate")  # then with its YAML and the JSON beside it
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=60)
    (tmp_path / "made here").rename(tmp_path / "moved there")
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [tmp_path / "moved there" / "launch.sh"],
        cwd=tmp_path / "elsewhere",
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", dp2-tp1-pp1-z2" in done.stdout
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("scheme", ["lib/site/share", "share"], ids=["pip --target", "pip --prefix"])
def test_the_script_is_found_where_pip_installs_it(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, recipes = tmp_path / "lib" / "site", tmp_path / scheme / "deepspeed-megatron-toolkit" / "recipes"
    (recipes / "gpt2").mkdir(parents=True)
    (package / "deepspeed_megatron_toolkit-1.dist-info").mkdir(parents=True)
    (recipes / "train.py").touch()
    record = package / "deepspeed_megatron_toolkit-1.dist-info" / "RECORD"
    record.write_text("toolkit/train.py,,\n../../share/deepspeed-megatron-toolkit/recipes/train.py,,\n")
    (record.parent / "METADATA").write_text("Name: deepspeed-megatron-toolkit\nVersion: 1\n")
    monkeypatch.setattr(gallery, "__file__", str(package / "toolkit" / "config" / "gallery.py"))
    monkeypatch.setattr(sys, "path", [str(package)])
    assert gallery.find_recipes() == recipes
    (recipes / "train.py").unlink()
    with pytest.raises(RunError, match="Install the toolkit again"):
        gallery.find_recipes()


def test_dstk_train_ends_all_ranks_when_one_dies(
    environment: dict[str, str], small_recipe: Path, tmp_path: Path
) -> None:
    command = ["dstk", "train", str(small_recipe), "--nproc", "2", "train.steps=100000", f"run_dir={tmp_path / 'run'}"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as launcher:
        ranks = started(launcher, tmp_path / "run")
        os.kill(ranks[-1], signal.SIGKILL)
        assert launcher.wait(timeout=60) == 137
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


@pytest.mark.daily
def test_a_stopped_dstk_train_saves_and_takes_its_ranks_with_it(
    environment: dict[str, str], small_recipe: Path, tmp_path: Path
) -> None:
    command = ["dstk", "train", str(small_recipe), "--nproc", "2", "train.steps=100000", f"run_dir={tmp_path / 'run'}"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as launcher:
        ranks = started(launcher, tmp_path / "run")
        launcher.terminate()
        assert launcher.wait(timeout=150) == 75
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert verify(tmp_path / "run" / (tmp_path / "run" / "latest").read_text().strip()) == []


def test_dstk_train_refuses_a_bad_recipe_in_one_line_with_exit_code_2(
    environment: dict[str, str], small_recipe: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["dstk", "train", str(small_recipe), "--nproc", "3"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "16 is not a multiple of 4 x 3" in done.stderr


def test_an_error_of_all_ranks_is_printed_once(environment: dict[str, str], small_recipe: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["dstk", "train", str(small_recipe), "--nproc", "2", "data.source=nowhere", f"run_dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert [line.startswith("error: ") for line in done.stderr.splitlines()] == [True]
    assert not (tmp_path / "run").exists()


def started(launcher: subprocess.Popen, run: Path) -> list[int]:
    """The ranks of a launcher, after the first training step."""
    deadline, metrics = time.monotonic() + 120, run / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [int(child) for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


class TestDetect:
    """The environment variables of each launcher."""

    def test_plain_python_is_one_rank(self) -> None:
        found = RankEnvironment.detect({})
        assert (found.rank, found.world_size, found.local_rank) == (0, 1, 0)

    def test_torchrun_and_deepspeed_set_rank_and_world_size(self) -> None:
        env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
        found = RankEnvironment.detect(env)
        assert (found.rank, found.local_rank, found.master_addr, found.master_port) == (5, 1, "node0", 1234)

    def test_srun_ranks_meet_on_the_first_node(self) -> None:
        env = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_STEP_ID": "0"}
        found = RankEnvironment.detect(env | {"SLURM_STEP_NODELIST": "gpu[07-08,11]", "SLURM_JOB_ID": "4711"})
        assert (found.rank, found.world_size, found.master_addr) == (9, 16, "gpu07")

    def test_all_tasks_of_a_slurm_job_derive_the_same_port(self) -> None:
        env = {"SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "99"}
        ports = {RankEnvironment.detect(env | {"SLURM_PROCID": str(task)}).master_port for task in (0, 1)}
        assert len(ports) == 1

    def test_python_inside_an_allocation_is_one_rank(self) -> None:
        assert RankEnvironment.detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}).world_size == 1

    def test_mpirun_sets_its_own_names(self) -> None:
        env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        found = RankEnvironment.detect(env)
        assert (found.rank, found.world_size, found.local_rank) == (3, 4, 1)

    def test_mpirun_on_several_machines_is_told_to_name_the_first_one(self) -> None:
        env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        here = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        with pytest.raises(RunError, match=r"2 of 4 ranks on this machine.*mpirun -x MASTER_ADDR=HOST"):
            RankEnvironment.detect(env | here)
        assert RankEnvironment.detect(env | here | {"MASTER_ADDR": "node1"}).master_addr == "node1"
        assert RankEnvironment.detect(env | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).master_addr == "127.0.0.1"

    @pytest.mark.parametrize("env", [{"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "4"}])
    def test_a_contradictory_environment_is_refused(self, env: dict[str, str]) -> None:
        with pytest.raises(RunError, match=r"\. "):
            RankEnvironment.detect(env)
