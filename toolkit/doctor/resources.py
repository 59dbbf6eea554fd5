"""Processors, memory, shared memory, disks and limits."""

from collections.abc import Iterator

from toolkit.doctor.check import Check
from toolkit.doctor.facts import Facts
from toolkit.units import format_bytes

_TOPIC = "memory, disks, limits"
_GIB = 1 << 30
_SHM_BYTES = _GIB
_DISK_LITTLE, _DISK_NOTHING = 10 * _GIB, _GIB
_FILES = 4096


def checks(facts: Facts) -> Iterator[Check]:
    """What the machine gives to a process."""
    of_all = f" of {facts.cpus_of_machine}" if facts.cpus != facts.cpus_of_machine else ""
    yield Check(topic=_TOPIC, name="processors", found=f"{facts.cpus}{of_all}")
    yield Check(topic=_TOPIC, name="memory", found=format_bytes(facts.memory_bytes))
    yield _shared_memory(facts)
    yield from _disks(facts)
    yield from _limits(facts)


def _shared_memory(facts: Facts) -> Check:
    name = "shared memory"
    if facts.shm_bytes is None:
        return Check(
            topic=_TOPIC,
            name=name,
            found="there is no /dev/shm",
            state="problem",
            mend="Mount it: mount -t tmpfs -o size=8g tmpfs /dev/shm. NCCL and data workers exchange data there.",
        )
    free = facts.shm_free_bytes or 0
    found = f"{format_bytes(free)} free of {format_bytes(facts.shm_bytes)}"
    if facts.shm_bytes < _SHM_BYTES:
        several = len(facts.gpus) > 1
        return Check(
            topic=_TOPIC,
            name=name,
            found=found,
            state="problem" if several else "note",
            mend="Start the container with --shm-size=8g (or --ipc=host): NCCL and data workers exchange data there.",
        )
    if free < _SHM_BYTES // 4:
        return Check(
            topic=_TOPIC,
            name=name,
            found=found,
            state="note",
            mend="Remove what dead runs left behind: ls -la /dev/shm.",
        )
    return Check(topic=_TOPIC, name=name, found=found)


def _disks(facts: Facts) -> Iterator[Check]:
    for what, free in facts.disks.items():
        folder = facts.folders[what]
        name = f"disk: {what}"
        if what in facts.unwritable:
            yield Check(
                topic=_TOPIC,
                name=name,
                found=f"{folder} cannot be written",
                state="problem",
                mend=f"Change its owner, or set {_variable(what)} to another folder."
                if _variable(what)
                else "Change its owner, or start from another folder.",
            )
            continue
        if free is None:
            continue
        found = f"{format_bytes(free)} free ({folder})"
        if free >= _DISK_LITTLE:
            yield Check(topic=_TOPIC, name=name, found=found)
            continue
        variable = _variable(what)
        yield Check(
            topic=_TOPIC,
            name=name,
            found=found,
            state="problem" if free < _DISK_NOTHING else "note",
            mend="Free some space" + (f", or set {variable} to a larger disk." if variable else ", or run elsewhere."),
        )


def _variable(what: str) -> str | None:
    names = {
        "models (Hugging Face)": "HF_HOME",
        "tokens": "DSTK_CACHE",
        "compiled ops": "TORCH_EXTENSIONS_DIR",
        "temporary files": "TMPDIR",
    }
    return names.get(what)


def _limits(facts: Facts) -> Iterator[Check]:
    locked = facts.limits.get("memlock")
    shown = "unlimited" if locked is None else format_bytes(locked)
    if locked is not None and locked < _GIB and facts.gpus:
        yield Check(
            topic=_TOPIC,
            name="locked memory",
            found=shown,
            state="note",
            mend="Pinned offload buffers and InfiniBand need more: ulimit -l unlimited (docker: --ulimit memlock=-1).",
        )
    else:
        yield Check(topic=_TOPIC, name="locked memory", found=shown)
    files = facts.limits.get("nofile")
    if files is not None and files < _FILES:
        yield Check(
            topic=_TOPIC,
            name="open files",
            found=str(files),
            state="note",
            mend="Many ranks and data workers need more: ulimit -n 65536.",
        )
    else:
        yield Check(topic=_TOPIC, name="open files", found="unlimited" if files is None else str(files))
