"""DS9: bugs of DeepSpeed that a config runs into, by version."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import INFO, WARNING, Found, Rule
from toolkit.dsconfig.lint.view import View
from toolkit.layout import Layout

_BF16 = {"bf16": {"enabled": True}}
_DS = "https://github.com/deepspeedai/DeepSpeed"

RULES = (
    Rule(
        id="DS901",
        severity=WARNING,
        title="A pipeline with accumulation before 0.19.3",
        effect="Gradients of earlier stages are scaled again in each micro-batch.",
        mend="Upgrade to 0.19.3.",
        example={"gradient_accumulation_steps": 8},
        given={"layout": Layout(pp=2), "deepspeed": (0, 19, 2)},
        sources=(f"{_DS}/issues/7773", f"{_DS}/pull/8154"),
    ),
    Rule(
        id="DS902",
        severity=WARNING,
        title="bf16 without ZeRO before 0.18.6",
        effect="Gradients are divided by 65536, and not cleared between steps.",
        mend="Upgrade to 0.18.6, or set zero_optimization.stage to 1.",
        example={**_BF16, "zero_optimization": {"stage": 0}},
        given={"deepspeed": (0, 18, 5)},
        sources=(f"{_DS}/issues/7837", f"{_DS}/pull/7839"),
    ),
    Rule(
        id="DS903",
        severity=WARNING,
        title="ZeRO-1 in bf16 with fp32 sums before 0.19.0",
        effect="The last micro-batch's gradients are added after the ranks were summed: each rank steps with its own.",
        mend="Upgrade to 0.19.0.",
        example={**_BF16, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}},
        given={"deepspeed": (0, 18, 9)},
        sources=(f"{_DS}/pull/7985",),
    ),
    Rule(
        id="DS904",
        severity=WARNING,
        title="ZeRO-2 in bf16 from 0.18.3 to 0.19.3",
        effect="Gradients are wrong where a module is used twice in one step.",
        mend="Upgrade, or set zero_optimization.stage to 1, if the model uses a module twice.",
        example={**_BF16, "zero_optimization": {"stage": 2}},
        given={"deepspeed": (0, 19, 0)},
        sources=(f"{_DS}/issues/8224",),
    ),
    Rule(
        id="DS905",
        severity=WARNING,
        title="overlap_comm under ZeRO-1 and ZeRO-2 before 0.19.0",
        effect="Buffers are used again before they were sent: losses become NaN.",
        mend="Upgrade to 0.19.0, or set overlap_comm to false.",
        example={"zero_optimization": {"stage": 2, "overlap_comm": True}},
        given={"deepspeed": (0, 18, 9)},
        sources=(f"{_DS}/pull/7965", f"{_DS}/issues/7188"),
    ),
    Rule(
        id="DS906",
        severity=WARNING,
        title="WarmupLR without warmup_max_lr before 0.19.4",
        effect="Every parameter group warms up to the rate of the first group.",
        mend="Upgrade to 0.19.4, or write warmup_max_lr as a list with one rate a group.",
        example={
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
        },
        given={"deepspeed": (0, 19, 3)},
        sources=(f"{_DS}/pull/8171",),
    ),
    Rule(
        id="DS907",
        severity=INFO,
        title="overlap_comm that overlaps little",
        effect="Under ZeRO-1 and ZeRO-2 each bucket still waits for the one before it: the backward pass stops in"
        " between.",
        mend="Compare ZeRO-3, or larger buckets, where communication takes long.",
        example={"zero_optimization": {"stage": 2, "overlap_comm": True}},
        given={"gpus": 16},
        sources=(f"{_DS}/issues/8364",),
    ),
    Rule(
        id="DS908",
        severity=WARNING,
        title="Muon with a warm-up scheduler",
        effect="warmup_max_lr overwrites muon_lr and adam_lr: both halves train with one rate.",
        mend="Leave warmup_max_lr out, or pass a scheduler of your own.",
        example={
            "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 2e-2, "adam_lr": 1e-4}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10, "warmup_type": "linear"},
            },
        },
        sources=(f"{_DS}/issues/7713",),
    ),
)


def check(view: View) -> Iterator[Found]:
    """Each bug where its conditions hold and the version has it."""
    version, stage, zero = view.facts.deepspeed, view.stage, ("zero_optimization", "stage")
    steps = view.number("gradient_accumulation_steps", 1) or 1
    fp32_sums = view.get("data_types.grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32")
    overlap = view.get("zero_optimization.overlap_comm") is True
    bf16 = view.precision == "bf16"
    name = ".".join(map(str, version))
    if version < (0, 19, 3) and view.has_pipeline and steps > 1:
        yield Found(
            "DS901", ("gradient_accumulation_steps",), f"{steps} micro-batches in a pipeline of DeepSpeed {name}"
        )
    if version < (0, 18, 6) and bf16 and stage == 0:
        yield Found("DS902", (view.bf16, "enabled"), f"bf16 without ZeRO in DeepSpeed {name}")
    if version < (0, 19, 0) and bf16 and stage == 1 and fp32_sums:
        path = ("data_types", "grad_accum_dtype")
        yield Found("DS903", path, f"ZeRO-1 in bf16 with fp32 sums in DeepSpeed {name}")
    if (0, 18, 3) <= version <= (0, 19, 3) and bf16 and stage == 2:
        yield Found("DS904", zero, f"ZeRO-2 in bf16 in DeepSpeed {name}")
    if version < (0, 19, 0) and overlap and stage in (1, 2):
        path = ("zero_optimization", "overlap_comm")
        yield Found("DS905", path, f"overlap_comm under ZeRO-{stage} in DeepSpeed {name}")
    warmup = view.get("scheduler.type") == "WarmupLR" and not view.has("scheduler.params.warmup_max_lr")
    if version < (0, 19, 4) and warmup:
        yield Found("DS906", ("scheduler", "params"), f"WarmupLR without warmup_max_lr in DeepSpeed {name}")
    if overlap and stage in (1, 2) and (view.facts.gpus or 0) > 8 and view.facts.runner != "toolkit":
        path = ("zero_optimization", "overlap_comm")
        yield Found("DS907", path, f"overlap_comm under ZeRO-{stage} on {view.facts.gpus} GPUs")
    halves = {"muon_lr", "adam_lr"} & view.section("optimizer.params").keys()
    top = view.has("scheduler.params.warmup_max_lr")
    if str(view.get("optimizer.type")).lower() == "muon" and halves and top:
        yield Found("DS908", ("scheduler", "params", "warmup_max_lr"), "warmup_max_lr with muon_lr and adam_lr")
