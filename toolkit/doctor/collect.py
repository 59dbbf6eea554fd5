"""Read the facts of this machine. Nothing here raises: a value that cannot be read is a fact too."""

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from toolkit.doctor.facts import KNOWN, MARK, VARIABLES, Answer, GpuFacts, MachineFacts, Probe
from toolkit.hardware import host_memory_bytes

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")

_SMI = ("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")


def gather(environment: Mapping[str, str] | None = None, *, timeout_seconds: float = 90.0) -> MachineFacts:
    """Gather the facts of this machine in a few seconds; each program may take up to `timeout_seconds`."""
    start = time.monotonic()
    env = dict(os.environ if environment is None else environment)
    quick = min(timeout_seconds, 20.0)
    with ThreadPoolExecutor() as pool:
        torch = pool.submit(_probe, "torch", env, timeout_seconds)
        deepspeed = pool.submit(_probe, "deepspeed", env, timeout_seconds)
        smi = pool.submit(ask, _SMI, env, quick)
        header = pool.submit(ask, ("nvidia-smi",), env, quick)
        topology = pool.submit(ask, ("nvidia-smi", "topo", "-m"), env, quick)
        names = ("gcc", "g++", "nvcc", "ninja")
        compilers = {name: pool.submit(ask, (name, "--version"), env, quick) for name in names}
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", header.result().text)
    folders = _folders(env)
    shm = _usage("/dev/shm")
    return MachineFacts(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages={name: _version(name) for name in (*KNOWN["tested"], *KNOWN["other_packages"])},
        torch=torch.result(),
        deepspeed=deepspeed.result(),
        nvidia_smi=smi.result(),
        gpus=_gpus(smi.result().text),
        driver_cuda=cuda[1] if cuda else None,
        links=_links(topology.result().text),
        compilers={name: answer.result() for name, answer in compilers.items()},
        libaio=_has_libaio(),
        locks=_locks(Path(folders["compiled ops"]).expanduser()),
        cpus=len(os.sched_getaffinity(0)),
        cpus_of_machine=os.cpu_count() or 1,
        memory_bytes=host_memory_bytes(),
        shm_bytes=shm and shm.total,
        shm_free_bytes=shm and shm.free,
        disks={purpose: _free(folder) for purpose, folder in folders.items()},
        folders=folders,
        unwritable=[purpose for purpose, folder in folders.items() if not os.access(_existing(folder), os.W_OK)],
        limits={"memlock": _limit(resource.RLIMIT_MEMLOCK), "nofile": _limit(resource.RLIMIT_NOFILE)},
        interfaces=[name for _, name in socket.if_nameindex()],
        environment=_relevant(env),
        missing_paths=[name for name in VARIABLES["paths"] if not Path(env.get(name) or "/").expanduser().exists()],
        seconds=time.monotonic() - start,
    )


def ask(command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float) -> Answer:
    """Run a program and return its output."""
    path = shutil.which(command[0], path=environment.get("PATH", os.defpath))
    if path is None:
        return Answer(error=f"{command[0]} is not on the PATH", missing=True)
    try:
        done = _run([path, *command[1:]], environment, timeout_seconds)
    except subprocess.TimeoutExpired:
        return Answer(error=f"{command[0]} did not answer within {timeout_seconds:.0f} s")
    except OSError as error:
        return Answer(error=f"{command[0]} cannot be run: {error.strerror}")
    if done.returncode:
        message = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
        return Answer(text=done.stdout, error=f"{command[0]} failed with code {done.returncode}: {message}")
    return Answer(text=done.stdout)


def _run(command: list[str], env: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
    )


def _probe(package: str, environment: Mapping[str, str], timeout_seconds: float) -> Probe:
    env = dict(environment) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = _run([sys.executable, "-m", "toolkit.doctor.probe", package], env, timeout_seconds)
    except subprocess.TimeoutExpired:
        return Probe(error=f"importing it took more than {timeout_seconds:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Probe(facts=json.loads(line.removeprefix(MARK)))
    message = done.stderr.strip().splitlines()
    return Probe(error=message[-1] if message else f"importing it ended with code {done.returncode}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus(text: str) -> list[GpuFacts]:
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and all(cells[column].isdigit() for column in (0, 2, 3)):
            index, name, total, free, driver = cells
            sizes = {"index": int(index), "memory_mib": int(total), "free_mib": int(free)}
            gpus.append(GpuFacts(name=name, driver=driver, **sizes))
    return gpus


def _links(text: str) -> dict[tuple[int, int], str]:
    """Parse the upper half of the matrix of `nvidia-smi topo -m`."""
    rows: dict[int, list[str]] = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        cells = line.split()
        match = re.fullmatch(r"GPU(\d+)", cells[0]) if cells else None
        if match and len(cells) > 1 and not cells[1].startswith("GPU"):
            rows[int(match[1])] = cells[1:]
    pairs = [(a, b) for a in rows for b in rows if a < b < len(rows[a])]
    return {(a, b): rows[a][b] for a, b in pairs if _LINK.fullmatch(rows[a][b])}


def _has_libaio() -> bool:
    """Whether the header and the library that DeepSpeed links for NVMe exist; the runtime library is not enough."""
    folders = ("/usr/lib", "/usr/lib64", "/usr/local/lib", f"/usr/lib/{platform.machine()}-linux-gnu")
    header = any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    return header and any(Path(folder, "libaio.so").exists() for folder in folders)


def _locks(folder: Path) -> dict[str, float]:
    ages: dict[str, float] = {}
    for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock")):
        with contextlib.suppress(OSError):  # it was released meanwhile
            ages[str(path)] = max(0.0, time.time() - path.stat().st_mtime)
    return ages


def _folders(env: Mapping[str, str]) -> dict[str, str]:
    home = env.get("HOME", "~")
    cache = env.get("XDG_CACHE_HOME", f"{home}/.cache")
    hub = env.get("HF_HUB_CACHE") or f"{env.get('HF_HOME') or f'{cache}/huggingface'}/hub"
    return {
        "runs": str(Path.cwd()),
        "models (Hugging Face)": hub,
        "tokens": env.get("DSTK_CACHE") or f"{home}/.cache/dstk",
        "compiled ops": env.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions",
        "temporary files": env.get("TMPDIR") or "/tmp",
    }


def _existing(folder: str) -> Path:
    """Return the folder, or its nearest existing parent."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _usage(folder: str) -> "shutil._ntuple_diskusage | None":
    try:
        return shutil.disk_usage(folder)
    except OSError:
        return None


def _free(folder: str) -> int | None:
    usage = _usage(str(_existing(folder)))
    return usage and usage.free


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _relevant(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect training, without the values of secrets."""
    prefixes = tuple(VARIABLES["shown_prefixes"])
    relevant = {name: value for name, value in env.items() if name.startswith(prefixes) or name in VARIABLES["shown"]}
    return {name: "(hidden)" if _SECRET.search(name) else value for name, value in sorted(relevant.items())}
