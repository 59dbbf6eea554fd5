"""Environment variables that change what a run does."""

from collections.abc import Iterator

from toolkit.doctor.check import Check, State
from toolkit.doctor.facts import Facts

_TOPIC = "environment"
_ON = ("1", "true", "yes", "on")

# Variable -> what it does when it is on.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "NCCL_P2P_DISABLE": "GPUs of one machine talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs of one machine talk through the network",
    "NCCL_IB_DISABLE": "machines talk through TCP although there may be InfiniBand",
}
_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "TRANSFORMERS_CACHE": "HF_HOME",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "HF_HUB_ENABLE_HF_TRANSFER": "HF_XET_HIGH_PERFORMANCE",
}
_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def checks(facts: Facts) -> Iterator[Check]:
    """Each variable that is set, and what is wrong with it."""
    env = facts.environment
    judged: dict[str, Check] = {}
    for check in (*_devices(facts), *_slow(facts), *_renamed(facts), *_paths(facts), *_launcher(facts), *_rest(facts)):
        judged.setdefault(check.name, check)
    for name, value in env.items():
        if name in judged:
            yield judged.pop(name)
        else:
            yield Check(topic=_TOPIC, name=name, found=value or "(empty)")
    yield from judged.values()


def _check(name: str, found: str, mend: str, *, state: State = "note") -> Check:
    return Check(topic=_TOPIC, name=name, found=found, state=state, mend=mend)


def _devices(facts: Facts) -> Iterator[Check]:
    env, gpus = facts.environment, facts.gpus
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and gpus:
        ids = [part.strip() for part in visible.split(",")]
        wrong = [part for part in ids if part.isdigit() and int(part) >= len(gpus)]
        if visible.strip() in ("", "-1"):
            yield _check("CUDA_VISIBLE_DEVICES", f"{visible!r} hides every GPU", "Unset it.", state="problem")
        elif wrong:
            yield _check(
                "CUDA_VISIBLE_DEVICES",
                f"{visible}, but GPUs are numbered 0 to {len(gpus) - 1}",
                "A number that does not exist hides all that follow it. Correct it, or unset it.",
                state="problem",
            )
    if env.get("DS_ACCELERATOR") == "cpu" and gpus:
        yield _check("DS_ACCELERATOR", "cpu, although there are GPUs", "Unset it to train on them.")


def _slow(facts: Facts) -> Iterator[Check]:
    env = facts.environment
    for name, effect in _SLOW.items():
        if env.get(name, "").lower() in _ON:
            yield _check(name, f"{env[name]}: {effect}", "Unset it, unless it works around something.")
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield _check("TORCH_DISTRIBUTED_DEBUG", "DETAIL: every collective is checked", "Unset it for speed.")
    if env.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield _check("NCCL_DEBUG", f"{env['NCCL_DEBUG']}: pages of output from every rank", "NCCL_DEBUG=WARN")


def _renamed(facts: Facts) -> Iterator[Check]:
    for old, new in _RENAMED.items():
        if old in facts.environment:
            yield _check(old, f"{facts.environment[old]} (an old name)", f"Its name is {new} now.")


def _paths(facts: Facts) -> Iterator[Check]:
    for name in facts.missing_paths:
        value = facts.environment.get(name, "")
        if name in ("CUDA_HOME", "CUDA_PATH"):
            yield _check(name, f"{value} does not exist", "Set it to the CUDA toolkit, or unset it.", state="problem")


def _launcher(facts: Facts) -> Iterator[Check]:
    """Left over from a launcher, these make a single process wait for others."""
    env = facts.environment
    present = [name for name in _RANKS if name in env]
    if "RANK" in env or "WORLD_SIZE" in env:
        missing = [name for name in _RANKS if name not in env]
        if missing:
            yield _check(
                present[0],
                f"{env[present[0]]}, without {', '.join(missing)}",
                f"A run would stop or wait. Unset {', '.join(present)}: launchers set all of them.",
                state="problem",
            )
        elif env.get("WORLD_SIZE") not in (None, "1"):
            yield _check(
                "WORLD_SIZE",
                f"{env['WORLD_SIZE']}, outside of a launcher",
                f"A program started here by hand would wait for the other ranks. Unset {', '.join(present)}, unless a "
                "launcher started this shell.",
            )


def _rest(facts: Facts) -> Iterator[Check]:
    env = facts.environment
    interfaces = env.get("NCCL_SOCKET_IFNAME", "")
    wanted = [name.split(":")[0] for name in interfaces.split(",") if name and name[0] not in "^="]
    if wanted and not any(have.startswith(name) for name in wanted for have in facts.interfaces):
        yield _check(
            "NCCL_SOCKET_IFNAME",
            f"{interfaces}, but the networks are {', '.join(facts.interfaces)}",
            "Name one of them, or unset it.",
            state="problem",
        )
    threads = env.get("OMP_NUM_THREADS")
    if threads is None and facts.nvidia_smi.missing and facts.cpus > 1:
        yield _check(
            "OMP_NUM_THREADS",
            "not set",
            f"Ranks would share {facts.cpus} processors badly. Set it to processors / ranks, as `dstk train` does.",
        )
    elif threads is not None and threads.isdigit() and int(threads) > facts.cpus:
        yield _check("OMP_NUM_THREADS", f"{threads}, for {facts.cpus} processors", f"Set it to {facts.cpus} or less.")
    if env.get("HF_HUB_OFFLINE", "").lower() in _ON:
        yield Check(topic=_TOPIC, name="HF_HUB_OFFLINE", found=f"{env['HF_HUB_OFFLINE']}: nothing is downloaded")
