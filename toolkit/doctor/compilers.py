"""Compilers, and which of DeepSpeed's ops are built or can be."""

import re
from collections.abc import Iterator

from toolkit.doctor.check import Check
from toolkit.doctor.facts import Facts
from toolkit.doctor.versions import parts

_TOPIC = "compilers and ops"

# What this toolkit or a generated config may ask for, and for what.
_WANTED = {
    "cpu_adam": "offload of AdamW",
    "cpu_lion": "offload of Lion",
    "async_io": "offload to NVMe",
    "fused_adam": "DeepSpeed's FusedAdam",
    "fused_lamb": "LAMB",
    "quantizer": "ZeRO++ (qwZ, qgZ)",
}
_GPU_ONLY = ("fused_lamb", "quantizer")


def checks(facts: Facts) -> Iterator[Check]:
    """gcc, ninja, nvcc, libaio, ops."""
    yield _compiler(facts)
    yield _ninja(facts)
    if facts.gpus:
        yield _nvcc(facts)
    yield _libaio(facts)
    yield from _ops(facts)


def _compiler(facts: Facts) -> Check:
    answer = facts.compilers.get("g++")
    if answer is None or answer.error:
        return Check(
            topic=_TOPIC,
            name="g++",
            found=(answer.error if answer else None) or "not found",
            state="note",
            mend="Needed for offload and DeepSpeed's own kernels only: apt install g++.",
        )
    return Check(topic=_TOPIC, name="g++", found=answer.text.splitlines()[0].strip())


def _ninja(facts: Facts) -> Check:
    answer = facts.compilers.get("ninja")
    if answer is None or answer.error:
        return Check(
            topic=_TOPIC,
            name="ninja",
            found=(answer.error if answer else None) or "not found",
            state="note",
            mend="Needed to compile ops: pip install ninja, and activate the environment so that it is on the PATH.",
        )
    return Check(topic=_TOPIC, name="ninja", found=answer.text.strip())


def _nvcc(facts: Facts) -> Check:
    answer, built = facts.compilers.get("nvcc"), facts.torch.facts.get("cuda")
    if answer is None or answer.error:
        return Check(
            topic=_TOPIC,
            name="nvcc",
            found=(answer.error if answer else None) or "not found",
            state="note",
            mend="Needed to compile CUDA ops (ZeRO++, LAMB, FusedAdam) only: install the CUDA toolkit"
            + (f" {built}, and set CUDA_HOME." if built else ", and set CUDA_HOME."),
        )
    release = re.search(r"release (\d+\.\d+)", answer.text)
    found = release[1] if release else answer.text.strip().splitlines()[-1]
    if release and built and parts(release[1])[0] != parts(built)[0]:
        return Check(
            topic=_TOPIC,
            name="nvcc",
            found=f"{found}, but torch was built with CUDA {built}",
            state="problem",
            mend=f"DeepSpeed refuses to compile ops with it. Install the CUDA toolkit {built}, or set CUDA_HOME to it.",
        )
    return Check(topic=_TOPIC, name="nvcc", found=found)


def _libaio(facts: Facts) -> Check:
    if facts.libaio:
        return Check(topic=_TOPIC, name="libaio", found="header and library")
    return Check(
        topic=_TOPIC,
        name="libaio",
        found="no header and library",
        state="note",
        mend="Needed for offload to NVMe only: apt install libaio-dev.",
    )


def _ops(facts: Facts) -> Iterator[Check]:
    ops = facts.deepspeed.facts.get("ops", {})
    if not ops:
        return
    built = sorted(name for name, op in ops.items() if op["built"])
    possible = sorted(name for name, op in ops.items() if op["can_be_built"] and not op["built"])
    found = f"{len(built)} built, {len(possible)} can be compiled when first used, of {len(ops)}"
    yield Check(topic=_TOPIC, name="ops of DeepSpeed", found=found)
    for name, purpose in _WANTED.items():
        if name in _GPU_ONLY and not facts.gpus:
            continue
        op = ops.get(name)
        if op is None:
            continue
        if op["built"] or op["can_be_built"]:
            yield Check(topic=_TOPIC, name=name, found=f"{'built' if op['built'] else 'can be compiled'}: {purpose}")
        else:
            yield Check(
                topic=_TOPIC,
                name=name,
                found=f"cannot be compiled here: {purpose}",
                state="note",
                mend="`ds_report` says what it misses; the lines above name compilers and libraries.",
            )
