"""Surroundings of a process: processors, memory, disks and limits; and variables that change what a run does."""

from collections.abc import Iterator

from toolkit.doctor.check import MachineCheck, note, ok, problem
from toolkit.doctor.facts import VARIABLES, MachineFacts
from toolkit.units import format_bytes

_GIB = 1 << 30
_SHM_BYTES = _GIB
_DISK_LITTLE = 10 * _GIB
_DISK_NOTHING = _GIB
_FILES = 4096
_ON = ("1", "true", "yes", "on")
_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def resources(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Check processors, memory, disks and limits."""
    of_all = f" of {facts.cpus_of_machine}" if facts.cpus != facts.cpus_of_machine else ""
    yield ok("processors", f"{facts.cpus}{of_all}")
    yield ok("memory", format_bytes(facts.memory_bytes))
    yield _shared_memory(facts)
    for purpose, free in facts.disks.items():
        yield from _disk(facts, purpose, free)
    yield from _limits(facts)


def _shared_memory(facts: MachineFacts) -> MachineCheck:
    name = "shared memory"
    if facts.shm_bytes is None:
        fix = "Mount it: mount -t tmpfs -o size=8g tmpfs /dev/shm. NCCL and data workers exchange data there."
        return problem(name, "there is no /dev/shm", fix)
    free = facts.shm_free_bytes or 0
    fact = f"{format_bytes(free)} free of {format_bytes(facts.shm_bytes)}"
    if facts.shm_bytes < _SHM_BYTES:
        fix = "Start the container with --shm-size=8g (or --ipc=host): NCCL and data workers exchange data there."
        return (problem if len(facts.gpus) > 1 else note)(name, fact, fix)
    if free < _SHM_BYTES // 4:
        return note(name, fact, "Remove the files of ended runs: ls -la /dev/shm.")
    return ok(name, fact)


def _disk(facts: MachineFacts, purpose: str, free: int | None) -> Iterator[MachineCheck]:
    name = f"disk: {purpose}"
    folder = facts.folders[purpose]
    variable = VARIABLES["of_folders"].get(purpose)
    if purpose in facts.unwritable:
        remedy = f"set {variable} to another folder" if variable else "start from another folder"
        yield problem(name, f"{folder} cannot be written", f"Change its owner, or {remedy}.")
    elif free is not None:
        fact = f"{format_bytes(free)} free ({folder})"
        if free >= _DISK_LITTLE:
            yield ok(name, fact)
        else:
            remedy = f"set {variable} to a larger disk" if variable else "run elsewhere"
            yield (problem if free < _DISK_NOTHING else note)(name, fact, f"Free some space, or {remedy}.")


def _limits(facts: MachineFacts) -> Iterator[MachineCheck]:
    locked = facts.limits.get("memlock")
    shown = "unlimited" if locked is None else format_bytes(locked)
    if locked is not None and locked < _GIB and facts.gpus:
        fix = "Pinned offload buffers and InfiniBand need more: ulimit -l unlimited (docker: --ulimit memlock=-1)."
        yield note("locked memory", shown, fix)
    else:
        yield ok("locked memory", shown)
    files = facts.limits.get("nofile")
    if files is not None and files < _FILES:
        yield note("open files", str(files), "Many ranks and data workers need more: ulimit -n 65536.")
    else:
        yield ok("open files", "unlimited" if files is None else str(files))


def variables(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Check every variable that is set."""
    checked: dict[str, MachineCheck] = {}
    for check in (*_devices(facts), *_names_and_values(facts), *_launcher(facts), *_network_and_threads(facts)):
        checked.setdefault(check.name, check)
    for name, value in facts.environment.items():
        yield checked.pop(name) if name in checked else ok(name, value or "(empty)")
    yield from checked.values()


def _devices(facts: MachineFacts) -> Iterator[MachineCheck]:
    env = facts.environment
    gpus = facts.gpus
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and gpus:
        ids = [part.strip() for part in visible.split(",")]
        wrong = [part for part in ids if part.isdigit() and int(part) >= len(gpus)]
        if visible.strip() in ("", "-1"):
            yield problem("CUDA_VISIBLE_DEVICES", f"{visible!r} hides every GPU", "Unset it.")
        elif wrong:
            fact = f"{visible}, but GPUs are numbered 0 to {len(gpus) - 1}"
            fix = "A number that does not exist hides all that follow it. Correct it, or unset it."
            yield problem("CUDA_VISIBLE_DEVICES", fact, fix)
    if env.get("DS_ACCELERATOR") == "cpu" and gpus:
        yield note("DS_ACCELERATOR", "cpu, although there are GPUs", "Unset it to train on them.")
    if env.get("DS_ACCELERATOR") == "cuda" and not gpus and not facts.torch.facts.get("devices"):
        yield problem("DS_ACCELERATOR", "cuda, but there is no GPU", "Unset it, or set it to cpu.")


def _names_and_values(facts: MachineFacts) -> Iterator[MachineCheck]:
    env = facts.environment
    for name, effect in VARIABLES["slow"].items():
        if env.get(name, "").lower() in _ON:
            yield note(name, f"{env[name]}: {effect}", "Unset it, unless it works around something.")
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield note("TORCH_DISTRIBUTED_DEBUG", "DETAIL: every collective is checked", "Unset it for speed.")
    if env.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield note("NCCL_DEBUG", f"{env['NCCL_DEBUG']}: pages of output from every rank", "NCCL_DEBUG=WARN")
    for old, new in VARIABLES["renamed"].items():
        if old in env:
            yield note(old, f"{env[old]} (an old name)", f"Its name is {new} now.")
    for name in facts.missing_paths:
        if name in ("CUDA_HOME", "CUDA_PATH"):
            fix = "Set it to the CUDA toolkit, or unset it."
            yield problem(name, f"{env.get(name, '')} does not exist", fix)


def _launcher(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Check variables of a launcher, which make a single process wait for other ranks."""
    env = facts.environment
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return
    present = [name for name in _RANKS if name in env]
    missing = [name for name in _RANKS if name not in env]
    if missing:
        fix = f"A run would stop or wait. Unset {', '.join(present)}: launchers set all of them."
        yield problem(present[0], f"{env[present[0]]}, without {', '.join(missing)}", fix)
    elif env["WORLD_SIZE"] != "1":
        wait = "A program started here would wait for other ranks."
        fix = f"{wait} Unset {', '.join(present)}, unless a launcher started this shell."
        yield note("WORLD_SIZE", f"{env['WORLD_SIZE']}, without a launcher", fix)


def _network_and_threads(facts: MachineFacts) -> Iterator[MachineCheck]:
    env = facts.environment
    interfaces = env.get("NCCL_SOCKET_IFNAME", "")
    wanted = [name.split(":")[0] for name in interfaces.split(",") if name and name[0] not in "^="]
    if wanted and not any(have.startswith(name) for name in wanted for have in facts.interfaces):
        fact = f"{interfaces}, but the networks are {', '.join(facts.interfaces)}"
        yield problem("NCCL_SOCKET_IFNAME", fact, "Name one of them, or unset it.")
    threads = env.get("OMP_NUM_THREADS")
    cpus = facts.cpus
    if threads is None and facts.nvidia_smi.missing and cpus > 1:
        fix = f"Ranks would share {cpus} processors badly. Set it to processors / ranks, as `dstk train` does."
        yield note("OMP_NUM_THREADS", "not set", fix)
    elif threads is not None and threads.isdigit() and int(threads) > cpus:
        yield note("OMP_NUM_THREADS", f"{threads} on {cpus} processors", f"Set it to {cpus} or less.")
    if env.get("HF_HUB_OFFLINE", "").lower() in _ON:
        yield ok("HF_HUB_OFFLINE", f"{env['HF_HUB_OFFLINE']}: nothing is downloaded")
