"""Whether the versions fit together: the stack, and the driver under it."""

import re
from collections.abc import Iterator

from toolkit.doctor.check import Check
from toolkit.doctor.facts import Facts, Probe

TESTED = {
    "torch": ("2.9", "2.13"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "transformers": ("5.23", "5.23"),
    "accelerate": ("1.15", "1.15"),
    "datasets": ("4.0", "5.2"),
    "tokenizers": ("0.22", "0.23"),
    "safetensors": ("0.6", "0.8"),
}
"""Oldest that is allowed, and newest that the tests ran with."""

_TOPIC = "versions"
_PYTHON = (3, 11)


def checks(facts: Facts) -> Iterator[Check]:
    """Python, the packages, and CUDA."""
    yield _python(facts)
    for package in TESTED:
        yield _package(facts, package)
    for package in ("torch", "deepspeed"):
        probe: Probe = getattr(facts, package)
        if facts.packages.get(package) and probe.error:
            yield Check(
                topic=_TOPIC,
                name=f"import {package}",
                found=probe.error,
                state="problem",
                mend=f"Run `python -c 'import {package}'` to see all of it; reinstall with `pip install "
                f"--force-reinstall {package}`.",
            )
    if facts.torch.facts:
        yield _cuda(facts)


def parts(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _python(facts: Facts) -> Check:
    old = parts(facts.python) < _PYTHON
    return Check(
        topic=_TOPIC,
        name="python",
        found=facts.python,
        state="problem" if old else "ok",
        mend="Use Python 3.11 or newer." if old else None,
    )


def _package(facts: Facts, package: str) -> Check:
    version = facts.packages.get(package)
    oldest, newest = TESTED[package]
    if version is None:
        return Check(
            topic=_TOPIC,
            name=package,
            found="not installed",
            state="problem",
            mend=f"pip install '{package}>={oldest}'",
        )
    if parts(version) < parts(oldest):
        return Check(
            topic=_TOPIC,
            name=package,
            found=f"{version}, older than {oldest}",
            state="problem",
            mend=f"pip install --upgrade '{package}>={oldest}'",
        )
    limit = parts(newest)
    if parts(version)[: len(limit)] > limit:
        return Check(
            topic=_TOPIC,
            name=package,
            found=f"{version}, newer than the {newest} of the tests",
            state="note",
            mend=f"If something breaks, try `pip install '{package}=={newest}.*'`."
            if len(limit) < 3
            else f"If something breaks, try `pip install {package}=={newest}`.",
        )
    return Check(topic=_TOPIC, name=package, found=version)


def _cuda(facts: Facts) -> Check:
    """PyTorch's CUDA against the driver's: a driver runs every CUDA of its major version, and older ones."""
    built, hip = facts.torch.facts.get("cuda"), facts.torch.facts.get("hip")
    driver = facts.driver_cuda
    if hip:
        return Check(topic=_TOPIC, name="ROCm of torch", found=hip)
    if built is None:
        if not facts.gpus:
            return Check(topic=_TOPIC, name="CUDA of torch", found="none (a build for CPUs), and there is no GPU")
        return Check(
            topic=_TOPIC,
            name="CUDA of torch",
            found=f"none, but there are {len(facts.gpus)} GPUs" if len(facts.gpus) > 1 else "none, but there is a GPU",
            state="problem",
            mend="Install a build for CUDA: https://pytorch.org/get-started/locally",
        )
    if driver is None:
        return Check(topic=_TOPIC, name="CUDA of torch", found=built)
    found = f"{built}, and the driver runs up to {driver}"
    if parts(driver)[0] < parts(built)[0]:
        return Check(
            topic=_TOPIC,
            name="CUDA of torch",
            found=found,
            state="problem",
            mend=f"Update the driver, or install a build of torch for CUDA {parts(driver)[0]}.",
        )
    if parts(driver) < parts(built):
        return Check(
            topic=_TOPIC,
            name="CUDA of torch",
            found=found,
            state="note",
            mend="It runs, but kernels compiled at run time may not: update the driver where one fails.",
        )
    return Check(topic=_TOPIC, name="CUDA of torch", found=found)
