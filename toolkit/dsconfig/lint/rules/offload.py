"""DS50: offload of the optimizer and of parameters to the host and to NVMe."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import ERROR, INFO, WARNING, Edit, Found, Path, Rule
from toolkit.dsconfig.lint.values import as_number
from toolkit.dsconfig.lint.view import View

_Z = "zero_optimization"

RULES = (
    Rule(
        id="DS501",
        severity=WARNING,
        title="Parameters offloaded without ZeRO-3",
        effect="DeepSpeed ignores it: the parameters stay on the GPU. Only ZeRO-3 shards them, and so can move them.",
        mend="Set zero_optimization.stage to 3, or remove offload_param.",
        example={_Z: {"stage": 2, "offload_param": {"device": "cpu"}}},
        sources=("https://github.com/wenet-e2e/wenet/pull/2499",),
        fixable=True,
    ),
    Rule(
        id="DS502",
        severity=WARNING,
        title="The optimizer offloaded without ZeRO",
        effect="DeepSpeed ignores it: the optimizer's states stay on the GPU.",
        mend="Set zero_optimization.stage to 1, 2 or 3, or remove offload_optimizer.",
        example={_Z: {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/1403",),
        fixable=True,
    ),
    Rule(
        id="DS503",
        severity=ERROR,
        title="NVMe without a path",
        effect="DeepSpeed raises when it builds the engine: nvme_path cannot be None.",
        mend="Write nvme_path: a folder on a local NVMe disk.",
        example={_Z: {"stage": 3, "offload_param": {"device": "nvme"}}},
    ),
    Rule(
        id="DS504",
        severity=WARNING,
        title="The optimizer on NVMe without ZeRO-3",
        effect="ZeRO-1 and ZeRO-2 know only host memory: DeepSpeed offloads to it, and says nothing.",
        mend="Set zero_optimization.stage to 3, or the device to cpu.",
        example={_Z: {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
        fixable=True,
    ),
    Rule(
        id="DS505",
        severity=ERROR,
        title="A part of the optimizer offloaded without ZeRO-3",
        effect="DeepSpeed asserts that offload_optimizer.ratio below 1 goes with ZeRO-3.",
        mend="Set zero_optimization.stage to 3, or remove ratio.",
        example={_Z: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        fixable=True,
    ),
    Rule(
        id="DS506",
        severity=WARNING,
        title="super_offload without ZeRO-3",
        effect="DeepSpeed ignores it.",
        mend="Set zero_optimization.stage to 3, or remove super_offload.",
        example={_Z: {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        fixable=True,
    ),
    Rule(
        id="DS519",
        severity=ERROR,
        title="Partial offload with torch_adam",
        effect="DeepSpeed asserts that ratio below 1 goes with its own CPU Adam.",
        mend="Remove torch_adam.",
        example={
            _Z: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        },
        fixable=True,
    ),
    Rule(
        id="DS520",
        severity=INFO,
        title="Offload without an optimizer in the config",
        effect="A script that passes an optimizer of PyTorch stops with ZeRORuntimeException, as"
        " zero_force_ds_cpu_optimizer is on by default.",
        mend="Pass DeepSpeedCPUAdam, write an optimizer section, or set zero_force_ds_cpu_optimizer to false.",
        example={_Z: {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    ),
)


def check(view: View) -> Iterator[Found]:
    """Where it is ignored, where it is refused, and what it lacks."""
    stage, optimizer_on, param_on = view.stage, view.offload("optimizer"), view.offload("param")
    section = (_Z, "offload_optimizer")
    if param_on != "none" and stage != 3:
        path: Path = (_Z, "offload_param") if view.has(f"{_Z}.offload_param") else (_Z, "cpu_offload_param")
        message = f"parameters are to be offloaded to {param_on}, with zero_optimization.stage={stage}"
        yield Found("DS501", path, message, edits=(Edit("remove", path),))
    if optimizer_on != "none" and stage == 0:
        path = section if view.has(".".join(section)) else (_Z, "cpu_offload")
        message = f"the optimizer is to be offloaded to {optimizer_on}, with zero_optimization.stage=0"
        yield Found("DS502", path, message, edits=(Edit("remove", path),))
    for what, device in (("optimizer", optimizer_on), ("param", param_on)):
        path = (_Z, f"offload_{what}", "nvme_path")
        if device == "nvme" and stage == 3 and not view.get(".".join(path)):
            yield Found("DS503", path[:-1], f"{_Z}.offload_{what}.device=nvme without nvme_path")
    if optimizer_on == "nvme" and stage in (1, 2):
        path = (*section, "device")
        message = f"the optimizer is to be offloaded to nvme, with zero_optimization.stage={stage}"
        yield Found("DS504", path, message, edits=(Edit("set", path, "cpu"),))
    written = view.get(".".join((*section, "ratio")), 1)
    ratio = as_number(written) if isinstance(written, str) else written
    if not isinstance(ratio, (int, float)):
        ratio = 1  # another rule says so
    if ratio < 1 and stage != 3:
        path = (*section, "ratio")
        message = f"offload_optimizer.ratio={ratio} with zero_optimization.stage={stage}"
        yield Found("DS505", path, message, edits=(Edit("remove", path),))
    elif ratio < 1 and optimizer_on != "none" and view.get("optimizer.params.torch_adam") is True:
        edits = (Edit("remove", ("optimizer", "params", "torch_adam")),)
        yield Found("DS519", (*section, "ratio"), f"offload_optimizer.ratio={ratio} with torch_adam", edits=edits)
    if view.is_on(".".join((*section, "super_offload"))) and stage != 3:
        path = (*section, "super_offload")
        message = f"super_offload with zero_optimization.stage={stage}"
        yield Found("DS506", path, message, edits=(Edit("remove", path),))
    runner = view.facts.runner
    forces = runner == "deepspeed" and view.get("zero_force_ds_cpu_optimizer", True)
    if optimizer_on != "none" and stage and not view.has("optimizer") and forces:
        message = f"the optimizer is offloaded to {optimizer_on}, and there is no optimizer section"
        yield Found("DS520", section, message)
