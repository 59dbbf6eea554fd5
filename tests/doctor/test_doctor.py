"""`dstk doctor`: what it says about machines of every kind, and that no machine can keep it from answering."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nonempty import nonempty

from toolkit.cli.main import main
from toolkit.doctor import MachineFacts, examine
from toolkit.doctor.collect import ask, gather
from toolkit.doctor.facts import KNOWN, Answer, GpuFacts, Probe

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
TESTED = KNOWN["tested"]
MATRIX = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV12\tSYS\tPIX\t0-31
GPU1\tNV12\t X \tNODE\tSYS\t0-31
GPU2\tSYS\tNODE\t X \tSYS\t0-31
NIC0\tPIX\tSYS\tSYS\t X
"""


NO_CUDA = {"cuda": None, "hip": None, "nccl": None, "gloo": True, "cuda_available": False, "devices": []}


def gpus(count: int, *, name: str = "NVIDIA H100 80GB HBM3", free_mib: int = 81_000) -> list[GpuFacts]:
    return [
        GpuFacts(index=index, name=name, memory_mib=81_559, free_mib=free_mib, driver="570.86")
        for index in range(count)
    ]


def healthy(count: int = 2, **changes: Any) -> MachineFacts:
    """A machine with GPUs and nothing to complain about."""
    devices = [{"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "memory_bytes": 80 * GIB}] * count
    torch = {"version": "2.13.0+cu128", "cuda": "12.8", "hip": None, "nccl": "2.27.3", "gloo": True}
    torch |= {"cuda_available": True, "devices": devices, "architectures": ["sm_80", "sm_90"], "bf16": True}
    ops = {"cpu_adam": {"built": False, "can_be_built": True}, "async_io": {"built": False, "can_be_built": True}}
    facts = MachineFacts(
        python="3.11.7",
        packages={name: newest + ".0" if newest.count(".") == 1 else newest for name, (_, newest) in TESTED.items()},
        torch=Probe(facts=torch),
        deepspeed=Probe(facts={"version": "0.19.8", "accelerator": "cuda", "ops": ops}),
        nvidia_smi=Answer(text="…"),
        gpus=gpus(count),
        driver_cuda="12.8",
        links={(a, b): "NV18" for a in range(count) for b in range(a + 1, count)},
        compilers={
            "g++": Answer(text="g++ 13.2.0\n"),
            "ninja": Answer(text="1.11.1\n"),
            "nvcc": Answer(text="Cuda compilation tools, release 12.8, V12.8.61\n"),
        },
        libaio=True,
        cpus=64,
        cpus_of_machine=64,
        memory_bytes=512 * GIB,
        shm_bytes=256 * GIB,
        shm_free_bytes=256 * GIB,
        disks={"runs": 900 * GIB},
        folders={"runs": "/data"},
        limits={"memlock": None, "nofile": 65536},
        interfaces=["lo", "eth0", "ib0"],
    )
    return replace(facts, **changes)


def without_gpus() -> MachineFacts:
    missing = Answer(error="x", missing=True)
    return healthy(0, torch=Probe(facts=NO_CUDA), gpus=(), nvidia_smi=missing, driver_cuda=None)


def found_states(facts: MachineFacts) -> dict[str, str]:
    return {check.name: check.state for check in examine(facts) if check.state != "ok"}


def probe(facts: MachineFacts, **changes: Any) -> Probe:
    return Probe(facts={**facts.torch.facts, **changes})


def env(**variables: str) -> dict[str, Any]:
    return {"environment": variables}


def test_a_good_machine_has_nothing_to_fix() -> None:
    assert found_states(healthy()) == {}
    assert found_states(healthy(1)) == {}


CASES: list[tuple[str, Callable[[], MachineFacts], Mapping[str, str]]] = [
    ("old python", lambda: healthy(python="3.9.2"), {"python": "problem"}),
    (
        "missing package",
        lambda: healthy(packages={**healthy().packages, "accelerate": None}),
        {"accelerate": "problem"},
    ),
    (
        "old package",
        lambda: healthy(packages={**healthy().packages, "deepspeed": "0.18.3"}),
        {"deepspeed": "problem"},
    ),
    ("new package", lambda: healthy(packages={**healthy().packages, "torch": "2.14.0"}), {"torch": "note"}),
    ("broken deepspeed", lambda: healthy(deepspeed=Probe(error="ImportError: x")), {"import deepspeed": "problem"}),
    ("old driver", lambda: healthy(driver_cuda="11.8"), {"CUDA of torch": "problem"}),
    ("older driver of the same major version", lambda: healthy(driver_cuda="12.4"), {"CUDA of torch": "note"}),
    (
        "torch for CPUs beside a GPU",
        lambda: healthy(torch=probe(healthy(), cuda=None, nccl=None, cuda_available=False, devices=[])),
        {"CUDA of torch": "problem", "NCCL": "problem"},
    ),
    (
        "torch that sees no GPU",
        lambda: healthy(torch=probe(healthy(), cuda_available=False, devices=[])),
        {"GPUs in torch": "problem"},
    ),
    ("a GPU too new", lambda: healthy(torch=probe(healthy(), architectures=["sm_80"])), {"architecture": "problem"}),
    ("PTX runs on a newer GPU", lambda: healthy(torch=probe(healthy(), architectures=["compute_80"])), {}),
    ("no bf16", lambda: healthy(torch=probe(healthy(), bf16=False)), {"bf16": "note"}),
    (
        "a driver that does not answer",
        lambda: healthy(gpus=(), nvidia_smi=Answer(error="nvidia-smi did not answer within 20 s")),
        {"nvidia-smi": "problem"},
    ),
    ("somebody else's job", lambda: healthy(gpus=gpus(2, free_mib=9_000)), {"memory": "note"}),
    ("PCIe only", lambda: healthy(links={(0, 1): "PHB"}), {"links": "note"}),
    (
        "wrong nvcc",
        lambda: healthy(compilers={**healthy().compilers, "nvcc": Answer(text="release 11.8, V")}),
        {"nvcc": "problem"},
    ),
    (
        "no nvcc",
        lambda: healthy(compilers={**healthy().compilers, "nvcc": Answer(error="x", missing=True)}),
        {"nvcc": "note"},
    ),
    (
        "no compiler",
        lambda: healthy(compilers={**healthy().compilers, "g++": Answer(error="x", missing=True)}),
        {"g++": "note"},
    ),
    ("no libaio", lambda: healthy(libaio=False), {"libaio": "note"}),
    ("small shm, two GPUs", lambda: healthy(shm_bytes=64 << 20, shm_free_bytes=64 << 20), {"shared memory": "problem"}),
    ("small shm, one GPU", lambda: healthy(1, shm_bytes=64 << 20, shm_free_bytes=64 << 20), {"shared memory": "note"}),
    ("no shm", lambda: healthy(shm_bytes=None, shm_free_bytes=None), {"shared memory": "problem"}),
    ("little disk", lambda: healthy(disks={"runs": 5 * GIB}), {"disk: runs": "note"}),
    ("full disk", lambda: healthy(disks={"runs": 5 << 20}), {"disk: runs": "problem"}),
    ("read-only folder", lambda: healthy(unwritable=["runs"]), {"disk: runs": "problem"}),
    ("locked memory", lambda: healthy(limits={"memlock": 8 << 20, "nofile": 65536}), {"locked memory": "note"}),
    ("few files", lambda: healthy(limits={"memlock": None, "nofile": 1024}), {"open files": "note"}),
    ("hidden GPUs", lambda: healthy(**env(CUDA_VISIBLE_DEVICES="")), {"CUDA_VISIBLE_DEVICES": "problem"}),
    (
        "a GPU that is not there",
        lambda: healthy(**env(CUDA_VISIBLE_DEVICES="0,2")),
        {"CUDA_VISIBLE_DEVICES": "problem"},
    ),
    ("some GPUs", lambda: healthy(**env(CUDA_VISIBLE_DEVICES="1")), {}),
    ("left-over rank", lambda: healthy(**env(RANK="0")), {"RANK": "problem"}),
    (
        "a launcher's shell",
        lambda: healthy(**env(RANK="0", WORLD_SIZE="8", MASTER_ADDR="a", MASTER_PORT="1")),
        {"WORLD_SIZE": "note"},
    ),
    ("no such network", lambda: healthy(**env(NCCL_SOCKET_IFNAME="eno1")), {"NCCL_SOCKET_IFNAME": "problem"}),
    ("a network by its prefix", lambda: healthy(**env(NCCL_SOCKET_IFNAME="eth")), {}),
    ("all networks but one", lambda: healthy(**env(NCCL_SOCKET_IFNAME="^docker0")), {}),
    ("no peer to peer", lambda: healthy(**env(NCCL_P2P_DISABLE="1")), {"NCCL_P2P_DISABLE": "note"}),
    ("an old name", lambda: healthy(**env(TRANSFORMERS_CACHE="/x")), {"TRANSFORMERS_CACHE": "note"}),
    ("CPU accelerator", lambda: healthy(**env(DS_ACCELERATOR="cpu")), {"DS_ACCELERATOR": "note"}),
    (
        "CUDA without a GPU",
        lambda: replace(without_gpus(), **env(DS_ACCELERATOR="cuda", OMP_NUM_THREADS="1")),
        {"DS_ACCELERATOR": "problem"},
    ),
    ("an op that compiles", lambda: healthy(locks={"/x/cpu_adam/lock": 60.0}), {"lock of an op": "note"}),
    ("a lock left over", lambda: healthy(locks={"/x/cpu_adam/lock": 86400.0}), {"lock of an op": "problem"}),
    (
        "no CUDA there",
        lambda: healthy(**env(CUDA_HOME="/gone"), missing_paths=["CUDA_HOME"]),
        {"CUDA_HOME": "problem"},
    ),
    ("too many threads", lambda: healthy(**env(OMP_NUM_THREADS="128")), {"OMP_NUM_THREADS": "note"}),
]


@pytest.mark.parametrize(("facts", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_wrong_is_found_and_nothing_else(
    facts: Callable[[], MachineFacts], expected: Mapping[str, str]
) -> None:
    assert found_states(facts()) == expected


def test_a_machine_without_gpus_is_no_problem() -> None:
    assert set(found_states(without_gpus()).values()) <= {"note"}


def test_everything_missing_is_told() -> None:
    nothing = MachineFacts(packages=dict.fromkeys(TESTED))
    found = found_states(nothing)
    assert {name for name in TESTED if found.get(name) != "problem"} == set()


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    required = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    for package, (oldest, newest) in nonempty(TESTED.items()):
        assert required[package] == oldest
        assert (pinned[package] + ".").startswith(newest + ".")


class TestGather:
    """The real reading, with programs of our own on the PATH."""

    @staticmethod
    def put(folder: Path, name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    @pytest.fixture
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A PATH with nothing on it, and Python packages that fail at once."""
        monkeypatch.setattr(sys, "executable", "/bin/false")
        return tmp_path

    def facts(self, machine: Path, **variables: str) -> MachineFacts:
        return gather({"PATH": str(machine), "HOME": str(machine), **variables}, timeout_seconds=1)

    def test_nothing_is_there(self, machine: Path) -> None:
        facts = self.facts(machine)
        assert facts.nvidia_smi.missing
        assert all(answer.missing for answer in facts.compilers.values())
        assert "code 1" in (facts.torch.error or "")

    def test_gpus_and_links_are_read(self, machine: Path) -> None:
        (machine / "matrix").write_text(MATRIX)
        self.put(
            machine,
            "nvidia-smi",
            'case "$1" in\n'
            '  --query*) for i in 0 1 2; do echo "$i, NVIDIA A100-SXM4-80GB, 81920, 81000, 550.54.15"; done ;;\n'
            f"  topo) while read -r line; do printf '%s\\n' \"$line\"; done < {machine}/matrix ;;\n"
            '  *) echo "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |" ;;\n'
            "esac",
        )
        facts = self.facts(machine)
        assert [gpu.index for gpu in facts.gpus] == [0, 1, 2]
        assert (facts.gpus[0].name, facts.gpus[0].memory_mib) == ("NVIDIA A100-SXM4-80GB", 81920)
        assert facts.driver_cuda == "12.4"
        assert facts.links == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "NODE"}

    def test_locks_of_ops_are_found(self, machine: Path) -> None:
        for lock in ("py311_cpu/cpu_adam/lock", "fused_adam/lock"):
            (machine / lock).parent.mkdir(parents=True)
            (machine / lock).touch()
        locks = self.facts(machine, TORCH_EXTENSIONS_DIR=str(machine)).locks
        assert {Path(path).parent.name for path in locks} == {"cpu_adam", "fused_adam"}
        assert min(locks.values()) >= 0

    def test_a_program_that_hangs_is_given_up(self, machine: Path) -> None:
        self.put(machine, "nvidia-smi", "exec /bin/sleep 600")
        assert "did not answer" in (self.facts(machine).nvidia_smi.error or "")

    def test_a_driver_that_fails_says_why(self, machine: Path) -> None:
        self.put(machine, "nvidia-smi", "echo 'NVIDIA-SMI has failed: no driver'; exit 9")
        assert "failed with code 9: NVIDIA-SMI has failed" in (self.facts(machine).nvidia_smi.error or "")

    def test_noise_is_no_gpu(self, machine: Path) -> None:
        self.put(machine, "nvidia-smi", "echo 'No devices were found'; echo 'a, b, [N/A], c, d'")
        assert self.facts(machine).gpus == []

    def test_secrets_are_not_shown(self, machine: Path) -> None:
        facts = self.facts(machine, HF_TOKEN="hf_secret", NCCL_DEBUG="WARN", UNRELATED="x")
        assert dict(facts.environment) == {"HF_TOKEN": "(hidden)", "NCCL_DEBUG": "WARN"}

    def test_a_program_that_cannot_be_run_is_a_fact(self, machine: Path) -> None:
        (machine / "gcc").write_text("no program")
        (machine / "gcc").chmod(0o755)
        answer = ask(("gcc", "--version"), {"PATH": str(machine)}, 1)
        assert answer.error


def test_a_broken_package_does_not_break_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    (tmp_path / "deepspeed.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    facts = gather({"PATH": "/nowhere", "HOME": str(tmp_path)}, timeout_seconds=60)
    assert facts.torch.error == "ImportError: libcudart.so.12: cannot open shared object file"
    assert facts.deepspeed.error == "importing it ended with code 3"
    assert {"import torch", "import deepspeed"} <= found_states(facts).keys()


class TestCommand:
    @staticmethod
    def run(monkeypatch: pytest.MonkeyPatch, facts: MachineFacts, *words: str) -> int:
        monkeypatch.setattr("toolkit.cli.doctor.gather", lambda **_: facts)
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *words])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def test_a_good_machine_ends_with_0(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(monkeypatch, healthy()) == 0
        assert "0 problems, 0 notes" in capsys.readouterr().out

    def test_a_note_ends_with_0(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run(monkeypatch, healthy(libaio=False)) == 0

    def test_a_problem_ends_with_1_and_says_how_to_fix_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(monkeypatch, healthy(driver_cuda="11.8"), "--only-problems") == 1
        told = capsys.readouterr().out
        assert "Update the driver" in told
        assert "accelerate" not in told

    def test_a_wrong_option_ends_with_2(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run(monkeypatch, healthy(), "--timeout", "0") == 2

    def test_json_has_every_check(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        facts = healthy(libaio=False)
        assert self.run(monkeypatch, facts, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert len(told["checks"]) == len(examine(facts))
        assert (told["problems"], told["notes"]) == (0, 1)


def test_the_real_probes_answer_here() -> None:
    facts = gather(os.environ, timeout_seconds=300)
    import torch

    assert facts.torch.facts["version"] == torch.__version__
    assert facts.torch.facts["gloo"]
    assert facts.deepspeed.facts["version"] == "0.19.8"
    assert "cpu_adam" in facts.deepspeed.facts["ops"]
