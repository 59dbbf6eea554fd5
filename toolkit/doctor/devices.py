"""GPUs, the links between them, and what carries collectives."""

from collections import Counter
from collections.abc import Iterator

from toolkit.doctor.check import Check
from toolkit.doctor.facts import Facts
from toolkit.hardware import find_gpu

_TOPIC = "GPUs and links"
_MOST_USED = 0.1
"""Of a GPU's memory, before it counts as taken by somebody else."""
_MEANING = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe root",
    "NODE": "PCIe roots of one socket",
    "SYS": "the link between sockets",
}


def checks(facts: Facts) -> Iterator[Check]:
    """Driver, GPUs, links, backends."""
    yield from _gpus(facts)
    yield from _visible(facts)
    if len(facts.gpus) > 1:
        yield _links(facts)
    yield from _backends(facts)


def _gpus(facts: Facts) -> Iterator[Check]:
    smi = facts.nvidia_smi
    if smi.missing:
        devices = facts.torch.facts.get("devices", [])
        if devices:
            yield Check(topic=_TOPIC, name="GPUs", found=f"{len(devices)} x {devices[0]['name']}, by torch")
        else:
            yield Check(topic=_TOPIC, name="GPUs", found="none: ranks run on the CPU (gloo)")
        return
    if smi.error or not facts.gpus:
        yield Check(
            topic=_TOPIC,
            name="nvidia-smi",
            found=smi.error or "it lists no GPU",
            state="problem",
            mend="Look at `dmesg | grep -i nvrm`. The driver may not be loaded, or not match its library: reboot, or "
            "give the container its GPUs (`docker run --gpus all`).",
        )
        return
    for name, count in Counter(gpu.name for gpu in facts.gpus).items():
        memory = next(gpu.memory_mib for gpu in facts.gpus if gpu.name == name) / 1024
        known = "" if find_gpu(name) else ", not in the catalogue of dstk: no utilisation (MFU) is shown"
        driver = facts.gpus[0].driver
        yield Check(topic=_TOPIC, name="GPUs", found=f"{count} x {name}, {memory:.0f} GiB each, driver {driver}{known}")
    taken = [gpu for gpu in facts.gpus if gpu.free_mib < (1 - _MOST_USED) * gpu.memory_mib]
    if taken:
        yield Check(
            topic=_TOPIC,
            name="memory",
            found=", ".join(f"GPU {gpu.index}: {gpu.free_mib / 1024:.0f} GiB free" for gpu in taken),
            state="note",
            mend="Another process uses it: see `nvidia-smi`, and choose free ones with CUDA_VISIBLE_DEVICES.",
        )


def _visible(facts: Facts) -> Iterator[Check]:
    torch = facts.torch.facts
    if facts.gpus and torch.get("cuda") and not torch.get("cuda_available"):
        yield Check(
            topic=_TOPIC,
            name="GPUs in torch",
            found="torch sees none of them",
            state="problem",
            mend="Check CUDA_VISIBLE_DEVICES, and that the driver is as new as torch's CUDA (above).",
        )
    architectures = set(torch.get("architectures", ()))
    for device in torch.get("devices", ()):
        major, minor = device["capability"].split(".")
        if architectures and not any(_covers(name, int(major), int(minor)) for name in architectures):
            yield Check(
                topic=_TOPIC,
                name="architecture",
                found=f"{device['name']} is sm_{major}{minor}, and torch was built for "
                f"{', '.join(sorted(architectures))}",
                state="problem",
                mend="Install a build of torch for this GPU.",
            )
            break
    if torch.get("devices") and torch.get("bf16") is False:
        yield Check(
            topic=_TOPIC,
            name="bf16",
            found="these GPUs have no matrix units for it",
            state="note",
            mend="Use precision=fp16, with its loss scale.",
        )


def _covers(name: str, major: int, minor: int) -> bool:
    """A cubin runs on its own major version from its minor version on; PTX on everything newer."""
    kind, _, digits = name.partition("_")
    digits = digits.rstrip("af")
    if not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    if kind == "compute":
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def _links(facts: Facts) -> Check:
    if not facts.links:
        return Check(
            topic=_TOPIC,
            name="links",
            found="unknown: `nvidia-smi topo -m` says nothing",
            state="note",
            mend="Run it by hand. NCCL finds links by itself (NCCL_DEBUG=INFO shows them).",
        )
    kinds = Counter(facts.links.values())
    nvlink = sum(count for kind, count in kinds.items() if kind.startswith("NV"))
    found = ", ".join(
        f"{count} pair{'' if count == 1 else 's'} by {_spelled(kind)}" for kind, count in kinds.most_common()
    )
    if nvlink == len(facts.links):
        return Check(topic=_TOPIC, name="links", found=found)
    slow = "tensor parallelism will be slow" if not nvlink else "only some pairs have NVLink"
    return Check(
        topic=_TOPIC,
        name="links",
        found=f"{found}: {slow}",
        state="note",
        mend="Prefer ZeRO-1 or 2 and pipelines"
        + (" over tensor parallelism." if not nvlink else ", and keep tp within pairs that have NVLink."),
    )


def _spelled(kind: str) -> str:
    return f"NVLink ({kind})" if kind.startswith("NV") else f"{kind} ({_MEANING[kind]})"


def _backends(facts: Facts) -> Iterator[Check]:
    torch = facts.torch.facts
    if not torch:
        return
    if torch.get("nccl"):
        yield Check(topic=_TOPIC, name="NCCL", found=torch["nccl"])
    elif facts.gpus:
        yield Check(
            topic=_TOPIC,
            name="NCCL",
            found="torch has none",
            state="problem",
            mend="Install a build of torch for CUDA: GPUs talk through NCCL.",
        )
    if not torch.get("gloo"):
        yield Check(
            topic=_TOPIC,
            name="gloo",
            found="torch has none",
            state="problem",
            mend="Install another build of torch: CPU ranks, and checks before training, talk through gloo.",
        )
