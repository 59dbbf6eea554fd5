"""`dstk config --launcher k8s | skypilot | hostfile`: fields, restarts, and what the containers start."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from published_fields import CONFIG_MAP, JOB_SET, SKYPILOT_TASK, misspelled

from toolkit.cli.main import main
from toolkit.cli.train import command as train
from toolkit.config import dump_recipe
from toolkit.dsconfig import kubernetes, skypilot
from toolkit.dsconfig.skypilot import accelerator
from toolkit.errors import PreemptedError, ToolkitError
from toolkit.launch.spawn import free_port
from toolkit.launch.stop_requests import SAVE_SECONDS

RECIPE = "gpt2-xl-pretrain"
TWO_NODES = (RECIPE, "--layout", "z3", "--nodes", "2", "--gpus-per-node", "8")
CONTAINER = ("--image", "registry/me/dstk:1", "--volume", "training", "--run-name", "gpt2-xl")

Output = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["config", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def kubernetes_of(capsys: Output, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the JobSet."""
    assert run(*(words or TWO_NODES), "--launcher", "k8s", *CONTAINER) == 0
    config_map, job_set = yaml.safe_load_all(capsys.readouterr().out)
    return config_map, job_set


def job_of(job_set: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job


def container_of(job_set: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = job_of(job_set)["template"]["spec"]["containers"][0]
    return container


def task_of(capsys: Output, *words: str) -> dict[str, Any]:
    where = (*(words or TWO_NODES), "--launcher", "skypilot", *CONTAINER, "--gpu", "H100-SXM-80GB")
    assert run(*where) == 0
    task: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return task


class TestKubernetes:
    def test_every_field_is_one_of_the_published_schema(self, capsys: Output) -> None:
        config_map, job_set = kubernetes_of(capsys)
        assert [*misspelled(config_map, CONFIG_MAP), *misspelled(job_set, JOB_SET)] == []
        assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")

    def test_a_misspelled_field_would_be_noticed(self, capsys: Output) -> None:
        _, job_set = kubernetes_of(capsys)
        container_of(job_set)["resource"] = {}
        job_of(job_set)["completions"] = "2"
        spec = ".spec.replicatedJobs[0].template.spec"
        assert set(misspelled(job_set, JOB_SET)) == {
            f"{spec}.completions",
            f"{spec}.template.spec.containers[0].resource",
        }

    def test_the_recipe_travels_as_it_is(self, capsys: Output) -> None:
        from toolkit.config.gallery import find_recipe

        config_map, _ = kubernetes_of(capsys)
        assert config_map["data"] == {"recipe.yaml": find_recipe(RECIPE).read_text()}

    def test_pods_are_whole_nodes_with_memory_to_share(self, capsys: Output) -> None:
        _, job_set = kubernetes_of(capsys)
        job = job_of(job_set)
        assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
        resources = container_of(job_set)["resources"]
        assert resources == {"requests": {"cpu": "64"}, "limits": {"nvidia.com/gpu": 8}}
        volumes = {volume.pop("name"): volume for volume in job["template"]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container_of(job_set)["volumeMounts"]}
        assert mounts == {
            "/etc/dstk": {"configMap": {"name": "gpt2-xl-files"}},
            "/workspace": {"persistentVolumeClaim": {"claimName": "training"}},
            "/dev/shm": {"emptyDir": {"medium": "Memory"}},
        }

    def test_amd_gpus_are_those_of_amds_plugin(self, capsys: Output) -> None:
        _, job_set = kubernetes_of(capsys, *TWO_NODES, "--gpu", "MI300X")
        assert container_of(job_set)["resources"]["limits"] == {"amd.com/gpu": 8}

    def test_ranks_meet_at_the_host_name_that_jobset_gives_the_first_pod(self, capsys: Output) -> None:
        _, job_set = kubernetes_of(capsys)
        network, replicated = job_set["spec"]["network"], job_set["spec"]["replicatedJobs"][0]
        # JobSet: <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>
        host = f"{job_set['metadata']['name']}-{replicated['name']}-0-0.{network['subdomain']}"
        words = container_of(job_set)["args"]
        assert words[words.index("--master-addr") + 1] == host
        assert network["enableDNSHostnames"]

    def test_a_pod_has_the_time_in_which_ranks_save(self, capsys: Output) -> None:
        _, job_set = kubernetes_of(capsys)
        assert job_of(job_set)["template"]["spec"]["terminationGracePeriodSeconds"] > SAVE_SECONDS

    def test_a_saved_or_preempted_run_restarts_without_being_counted_and_bad_input_does_not(
        self, capsys: Output
    ) -> None:
        _, job_set = kubernetes_of(capsys)
        job = job_of(job_set)
        assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
        exits, preempted = job["podFailurePolicy"]["rules"]
        assert exits["onExitCodes"]["values"] == [ToolkitError.exit_code, PreemptedError.exit_code]
        assert preempted["onPodConditions"][0]["type"] == "DisruptionTarget"
        bad_input, others = job_set["spec"]["failurePolicy"]["rules"]
        # Kubernetes: "Container train for pod ns/name failed with exit code 2 matching FailJob rule at index 0"
        (pattern,) = bad_input["onJobFailureMessagePatterns"]
        messages = [f"failed with exit code {code} matching FailJob rule at index 0" for code in (2, 75, 20)]
        assert [pattern in message for message in messages] == [True, False, False]
        assert (bad_input["action"], others["action"]) == ("FailJobSet", "RestartJobSetAndIgnoreMaxRestarts")

    def test_dollars_of_a_recipe_reach_dstk(self, capsys: Output) -> None:
        _, job_set = kubernetes_of(capsys, *TWO_NODES, "run_dir=runs/$(HOME)")
        assert "run_dir=runs/$$(HOME)" in container_of(job_set)["args"]

    def test_the_json_travels_where_options_change_it(self, capsys: Output) -> None:
        config_map, job_set = kubernetes_of(capsys, *TWO_NODES, "--gpu", "H100-SXM-80GB")
        words = container_of(job_set)["args"]
        assert words[words.index("--deepspeed-config") + 1] == "/etc/dstk/ds_config.json"
        assert json.loads(config_map["data"]["ds_config.json"])["train_batch_size"] == 512


class TestSkyPilot:
    def test_every_field_is_one_of_the_published_schema(self, capsys: Output) -> None:
        assert list(misspelled(task_of(capsys), SKYPILOT_TASK)) == []

    def test_machines_gpus_and_restarts(self, capsys: Output) -> None:
        task = task_of(capsys)
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PreemptedError.exit_code]
        assert task["volumes"] == {"/workspace": "training"}

    @pytest.mark.parametrize(
        ("name", "theirs"),
        [("A100-SXM-80GB", "A100-80GB"), ("A100-PCIe-40GB", "A100"), ("L40S", "L40S"), ("V100-PCIe-32GB", "V100-32GB")],
    )
    def test_a_gpu_has_the_name_that_skypilot_gives_it(self, name: str, theirs: str) -> None:
        assert accelerator(name) == theirs

    def test_a_recipe_that_holds_the_end_of_its_own_text_arrives_whole(
        self, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from toolkit.config.gallery import find_recipe

        text = find_recipe(RECIPE).read_text() + "# $(touch no) `touch no` \\\n#\\nEND_OF_RECIPE_YAML\n"
        (tmp_path / "r.yaml").write_text(text)
        task = task_of(capsys, str(tmp_path / "r.yaml"), *TWO_NODES[1:])
        assert recorded(task, node=0, folder=tmp_path, monkeypatch=monkeypatch)[0] == text


def recorded(
    task: dict[str, Any], *, node: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[str]]:
    """Run the task's script with a substitute for `dstk`; return the recipe and the words that it gets."""
    stub = folder / "dstk"
    stub.write_text('#!/usr/bin/env bash\ncp "$2" "$RECORD"/recipe\nprintf "%s\\0" "$@" > "$RECORD"/words\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(folder))
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    script = task["run"].replace("/workspace", str(folder)).replace("/tmp/gpt2-xl-files", str(folder / "files"))
    subprocess.run(["bash", "-c", script], env=os.environ | variables, check=True, timeout=60)
    return (folder / "recipe").read_text(), (folder / "words").read_text().rstrip("\0").split("\0")


def options_of(words: list[str]) -> dict[str, Any]:
    """What `dstk train` understands."""
    assert words[0] == "train"
    return train.make_context("train", words[1:]).params


@pytest.mark.parametrize("node", [0, 1])
def test_both_start_the_same_training(
    node: int, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sky_words = recorded(task_of(capsys), node=node, folder=tmp_path, monkeypatch=monkeypatch)
    words = container_of(kubernetes_of(capsys, *TWO_NODES, "--gpu", "H100-SXM-80GB")[1])["args"]
    sky = options_of(sky_words)
    pod = options_of([word.replace("$(JOB_COMPLETION_INDEX)", str(node)) for word in words])
    assert {name for name, value in sky.items() if value != pod[name]} == {
        "recipe",
        "deepspeed_config",
        "master_addr",
    }
    assert (sky["nproc"], sky["nnodes"], sky["node_rank"], sky["resume"]) == (8, 2, node, "auto")
    assert (sky["master_addr"], pod["master_addr"]) == ("10.0.0.1", "gpt2-xl-node-0-0.gpt2-xl")
    assert sky["overrides"] == ("run_dir=runs/gpt2-xl",)


def test_one_node_meets_nowhere(capsys: Output) -> None:
    one = (RECIPE, "--layout", "z3", "--world-size", "8")
    words = container_of(kubernetes_of(capsys, *one)[1])["args"]
    assert options_of(words)["nnodes"] == 1
    assert "--nnodes" not in task_of(capsys, *one)["run"]


def test_their_numbers_are_those_of_the_toolkit() -> None:
    assert kubernetes.SAVED == skypilot.SAVED == PreemptedError.exit_code


def test_a_hostfile_lists_nodes_with_their_slots(tmp_path: Path) -> None:
    assert run(*TWO_NODES, "--launcher", "hostfile", "--host", "a", "--host", "b", "--output", str(tmp_path)) == 0
    assert (tmp_path / "hostfile").read_text() == "a slots=8\nb slots=8\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--launcher", "k8s"), "without --image and --volume"),
        (("--launcher", "k8s", "--image", "i"), "without --volume"),
        (("--launcher", "k8s", *CONTAINER, "--run-name", "My run"), "machines are named by it"),
        (("--launcher", "k8s", *CONTAINER, "--script", "train.py"), "Name a recipe"),
        (("--launcher", "skypilot", *CONTAINER), "Add --gpu NAME"),
    ],
)
def test_a_mistake_is_one_line(capsys: Output, words: tuple[str, ...], message: str) -> None:
    assert run(*TWO_NODES, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.whole
@pytest.mark.parametrize("launcher", ["k8s", "skypilot"])
def test_two_containers_train_save_when_they_are_preempted_and_resume(
    launcher: str, make_recipe: Any, tmp_path: Path
) -> None:
    """The container's command, on this machine: two nodes of one rank each."""
    model = {"name_or_path": "gpt2-tiny"}
    recipe = tmp_path / "small.yaml"
    recipe.write_text(dump_recipe(make_recipe(train__steps=400, schedule={}, parallel={"zero_stage": 2}, model=model)))
    port = str(free_port())
    words = ["config", str(recipe), "--nodes", "2", "--gpus-per-node", "1", "--device", "cpu", "--port", port]
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", *words, "--launcher", launcher, *CONTAINER],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    text = done.stdout.decode()
    metrics = tmp_path / "runs" / "gpt2-xl" / "metrics.jsonl"
    with _started(launcher, text, tmp_path) as containers:
        while not (metrics.exists() and metrics.read_text()):
            assert [container.poll() for container in containers] == [None, None]
            time.sleep(0.2)
        containers[1].send_signal(signal.SIGTERM)  # the pod of one node alone
        assert [container.wait(200) for container in containers] == [PreemptedError.exit_code] * 2
    steps = len(metrics.read_text().splitlines())
    assert 0 < steps < 400
    with _started(launcher, text.replace("steps: 400", f"steps: {steps + 1}"), tmp_path) as containers:
        assert [container.wait(300) for container in containers] == [0, 0]
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, steps + 2))


@contextmanager
def _started(launcher: str, text: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the command of both containers, with the volume and the files of it in `folder`."""
    (folder / "dstk").write_text(f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m toolkit "$@"\n')
    (folder / "dstk").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "DSTK_CACHE": str(folder / "cache")}
    environment |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2", "OMP_NUM_THREADS": "1"}
    command = _pod if launcher == "k8s" else _sky_node
    containers = [
        subprocess.Popen(command(text, node, folder), cwd=folder, env=environment | {"SKYPILOT_NODE_RANK": str(node)})
        for node in (0, 1)
    ]
    try:
        yield containers
    finally:
        for container in containers:
            container.kill()
            container.wait()


def _pod(text: str, node: int, folder: Path) -> list[str]:
    config_map, job_set = yaml.safe_load_all(text)
    files = folder / f"etc-{node}"
    files.mkdir(exist_ok=True)
    for name, content in config_map["data"].items():
        (files / name).write_text(content)
    changes = {"/etc/dstk": str(files), "$(JOB_COMPLETION_INDEX)": str(node), "gpt2-xl-node-0-0.gpt2-xl": "127.0.0.1"}
    container = container_of(job_set)
    return [*container["command"], *(_replaced(word, changes) for word in container["args"])]


def _sky_node(text: str, node: int, folder: Path) -> list[str]:
    changes = {"/tmp/gpt2-xl-files": f"{folder}/etc-{node}", "/workspace": str(folder)}
    return ["bash", "-c", _replaced(yaml.safe_load(text)["run"], changes)]


def _replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text
