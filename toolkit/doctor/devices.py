"""GPUs, the links between them, and communication backends."""

from collections import Counter
from collections.abc import Iterator

from toolkit.doctor.check import MachineCheck, note, ok, problem
from toolkit.doctor.facts import KNOWN, MachineFacts
from toolkit.hardware import find_gpu
from toolkit.units import plural

_MOST_USED = 0.1
"""Fraction of a GPU's memory above which it counts as used by another process."""


def checks(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Check driver, GPUs, links and backends."""
    yield from _gpus(facts)
    yield from _visible(facts)
    if len(facts.gpus) > 1:
        yield _links(facts)
    yield from _backends(facts)


def _gpus(facts: MachineFacts) -> Iterator[MachineCheck]:
    smi = facts.nvidia_smi
    if smi.missing:
        devices = facts.torch.facts.get("devices", [])
        by_torch = f"{len(devices)} x {devices[0]['name']}, by torch" if devices else None
        yield ok("GPUs", by_torch or "none: ranks run on the CPU (gloo)")
        return
    if smi.error or not facts.gpus:
        causes = "The driver may not be loaded, or not match its library"
        fix = f"{causes}: reboot, or give the container its GPUs (`docker run --gpus all`)."
        yield problem("nvidia-smi", smi.error or "it lists no GPU", f"Check `dmesg | grep -i nvrm`. {fix}")
        return
    for name, count in Counter(gpu.name for gpu in facts.gpus).items():
        memory = next(gpu.memory_mib for gpu in facts.gpus if gpu.name == name) / 1024
        known = "" if find_gpu(name) else ", unknown to dstk: no utilization (MFU) is shown"
        driver = facts.gpus[0].driver
        yield ok("GPUs", f"{count} x {name}, {memory:.0f} GiB each, driver {driver}{known}")
    taken = [gpu for gpu in facts.gpus if gpu.free_mib < (1 - _MOST_USED) * gpu.memory_mib]
    if taken:
        fact = ", ".join(f"GPU {gpu.index}: {gpu.free_mib / 1024:.0f} GiB free" for gpu in taken)
        fix = "Another process uses it: see `nvidia-smi`, and select free GPUs with CUDA_VISIBLE_DEVICES."
        yield note("memory", fact, fix)


def _visible(facts: MachineFacts) -> Iterator[MachineCheck]:
    torch = facts.torch.facts
    if facts.gpus and torch.get("cuda") and not torch.get("cuda_available"):
        fix = "Check CUDA_VISIBLE_DEVICES, and that the driver is as new as torch's CUDA (above)."
        yield problem("GPUs in torch", "torch sees none of them", fix)
    architectures = set(torch.get("architectures", ()))
    for device in torch.get("devices", ()):
        major, minor = device["capability"].split(".")
        if architectures and not any(_covers(name, int(major), int(minor)) for name in architectures):
            fact = f"{device['name']} is sm_{major}{minor}, and torch was built for {', '.join(sorted(architectures))}"
            yield problem("architecture", fact, "Install a build of torch for this GPU.")
            break
    if torch.get("devices") and torch.get("bf16") is False:
        yield note("bf16", "these GPUs have no tensor cores for it", "Use precision=fp16, with its loss scale.")


def _covers(name: str, major: int, minor: int) -> bool:
    """Whether code runs on a GPU: a cubin on its major version from its minor version on, PTX on anything newer."""
    kind, _, digits = name.partition("_")
    digits = digits.rstrip("af")
    if not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    if kind == "compute":
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def _links(facts: MachineFacts) -> MachineCheck:
    if not facts.links:
        fix = "Run it by hand. NCCL detects links itself (NCCL_DEBUG=INFO shows them)."
        return note("links", "unknown: `nvidia-smi topo -m` prints none", fix)
    kinds = Counter(facts.links.values())
    nvlink = sum(count for kind, count in kinds.items() if kind.startswith("NV"))
    known = KNOWN["links"]
    spelled = {kind: f"NVLink ({kind})" if kind.startswith("NV") else f"{kind} ({known[kind]})" for kind in kinds}
    pairs = [f"{plural(count, 'pair')} by {spelled[kind]}" for kind, count in kinds.most_common()]
    fact = ", ".join(pairs)
    if nvlink == len(facts.links):
        return ok("links", fact)
    fix = "Prefer ZeRO-1 or 2 and pipelines"
    if nvlink:
        rest = ", and keep tp within pairs that have NVLink."
        return note("links", f"{fact}: only some pairs have NVLink", fix + rest)
    return note("links", f"{fact}: tensor parallelism will be slow", f"{fix} over tensor parallelism.")


def _backends(facts: MachineFacts) -> Iterator[MachineCheck]:
    torch = facts.torch.facts
    if not torch:
        return
    if torch.get("nccl"):
        yield ok("NCCL", torch["nccl"])
    elif facts.gpus:
        yield problem("NCCL", "torch has none", "Install a build of torch for CUDA: GPUs communicate with NCCL.")
    if not torch.get("gloo"):
        fix = "Install another build of torch: CPU ranks, and checks before training, communicate with gloo."
        yield problem("gloo", "torch has none", fix)
