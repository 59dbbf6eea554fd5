"""Versions of Python, the packages, CUDA and the driver; compilers; DeepSpeed's ops: built, or possible to build."""

import re
import shlex
from collections.abc import Iterator

from toolkit.doctor.check import MachineCheck, note, ok, problem
from toolkit.doctor.facts import KNOWN, MachineFacts, Probe

_PYTHON = (3, 11)
_LONG_COMPILATION_SECONDS = 1800


def versions(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Check Python, the packages, and CUDA."""
    if _parts(facts.python) < _PYTHON:
        yield problem("python", facts.python, "Use Python 3.11 or newer.")
    else:
        yield ok("python", facts.python)
    for package in KNOWN["tested"]:
        yield _package(facts, package)
    for package in ("torch", "deepspeed"):
        probe: Probe = getattr(facts, package)
        if facts.packages.get(package) and probe.error:
            see = f"Run `python -c 'import {package}'` to see the whole error"
            fix = f"{see}; reinstall with `pip install --force-reinstall {package}`."
            yield problem(f"import {package}", probe.error, fix)
    if facts.torch.facts:
        yield _cuda(facts)


def _parts(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _package(facts: MachineFacts, package: str) -> MachineCheck:
    version = facts.packages.get(package)
    oldest, newest = KNOWN["tested"][package]
    if version is None:
        return problem(package, "not installed", f"pip install '{package}>={oldest}'")
    if _parts(version) < _parts(oldest):
        return problem(package, f"{version}, older than {oldest}", f"pip install --upgrade '{package}>={oldest}'")
    limit = _parts(newest)
    if _parts(version)[: len(limit)] > limit:
        exact = f"{package}=={newest}" if len(limit) == 3 else f"'{package}=={newest}.*'"
        fix = f"If something breaks, try `pip install {exact}`."
        return note(package, f"{version}, newer than {newest}, the newest tested", fix)
    return ok(package, version)


def _cuda(facts: MachineFacts) -> MachineCheck:
    """Compare the CUDA of PyTorch and driver: a driver runs every CUDA of its major version, and older ones."""
    built = facts.torch.facts.get("cuda")
    hip = facts.torch.facts.get("hip")
    driver = facts.driver_cuda
    name = "CUDA of torch"
    if hip:
        return ok("ROCm of torch", hip)
    if built is None:
        if not facts.gpus:
            return ok(name, "none (a build for CPUs), and there is no GPU")
        fact = f"none, but there are {len(facts.gpus)} GPUs" if len(facts.gpus) > 1 else "none, but there is a GPU"
        return problem(name, fact, "Install a build for CUDA: https://pytorch.org/get-started/locally")
    if driver is None:
        return ok(name, built)
    fact = f"{built}, and the driver runs up to {driver}"
    major = _parts(driver)[0]
    if major < _parts(built)[0]:
        return problem(name, fact, f"Update the driver, or install a build of torch for CUDA {major}.")
    if _parts(driver) < _parts(built):
        fix = "It runs, but kernels compiled at run time may not: update the driver where one fails."
        return note(name, fact, fix)
    return ok(name, fact)


def compilers(facts: MachineFacts) -> Iterator[MachineCheck]:
    """Check g++, ninja, nvcc, libaio and the ops."""
    yield from (_program(facts, name, fix) for name, fix in KNOWN["programs"].items())
    if facts.gpus:
        yield _nvcc(facts)
    if facts.libaio:
        yield ok("libaio", "header and library")
    else:
        yield note("libaio", "no header and library", "Needed for offload to NVMe only: apt install libaio-dev.")
    yield from _ops(facts)
    for path, seconds in facts.locks.items():
        fact = f"{path}, {seconds / 60:.0f} minutes old"
        fix = (
            f"If nothing is compiling, its compilation was killed, and all wait for it forever: rm {shlex.quote(path)}"
        )
        yield (problem if seconds > _LONG_COMPILATION_SECONDS else note)("lock of an op", fact, fix)


def _program(facts: MachineFacts, name: str, fix: str) -> MachineCheck:
    answer = facts.compilers.get(name)
    if answer is None or answer.error:
        return note(name, (answer.error if answer else None) or "not found", fix)
    return ok(name, answer.text.strip().splitlines()[0])


def _nvcc(facts: MachineFacts) -> MachineCheck:
    answer = facts.compilers.get("nvcc")
    built = facts.torch.facts.get("cuda")
    if answer is None or answer.error:
        version = f" {built}" if built else ""
        fix = f"Needed to compile CUDA ops (ZeRO++, LAMB, FusedAdam) only: install the CUDA toolkit{version}, "
        return _program(facts, "nvcc", f"{fix}and set CUDA_HOME.")
    release = re.search(r"release (\d+\.\d+)", answer.text)
    fact = release[1] if release else answer.text.strip().splitlines()[-1]
    if release and built and _parts(release[1])[0] != _parts(built)[0]:
        fix = f"DeepSpeed refuses to compile ops with it. Install the CUDA toolkit {built}, or set CUDA_HOME to it."
        return problem("nvcc", f"{fact}, but torch was built with CUDA {built}", fix)
    return ok("nvcc", fact)


def _ops(facts: MachineFacts) -> Iterator[MachineCheck]:
    ops = facts.deepspeed.facts.get("ops", {})
    if not ops:
        return
    built = sum(op["built"] for op in ops.values())
    possible = sum(op["can_be_built"] and not op["built"] for op in ops.values())
    yield ok("ops of DeepSpeed", f"{built} built, {possible} can be compiled on first use, of {len(ops)}")
    for name, purpose in KNOWN["ops"].items():
        op = ops.get(name)
        if op is None or (name in KNOWN["ops_of_gpus"] and not facts.gpus):
            continue
        if op["built"] or op["can_be_built"]:
            yield ok(name, f"{'built' if op['built'] else 'can be compiled'}: {purpose}")
        else:
            fix = "`ds_report` says what is missing; the lines above list compilers and libraries."
            yield note(name, f"cannot be compiled here: {purpose}", fix)
