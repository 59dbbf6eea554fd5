"""Keys of optimizers, schedulers, monitors, the profiler and activation checkpointing."""

from typing import Any

from toolkit.dsconfig.explain.key import Key
from toolkit.dsconfig.job import ConfigJob

_ADAM: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
# Of the class that DeepSpeed makes for a type: FusedAdam, torch's SGD and Adagrad, FusedLamb, FusedLion.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "SGD": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "Lamb": _ADAM | {"max_coeff": 10.0, "min_coeff": 0.01},
    "Lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "Muon": {"ns_method": "gram"},
}
_WARMUP: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULER_DEFAULTS: dict[str, dict[str, Any]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP | {"warmup_max_lr": 0.001},
    "WarmupCosineLR": {"warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 1e-4, "warmup_type": "log"},
    "OneCycle": {"cycle_first_step_size": 2000, "decay_step_size": 0, "cycle_momentum": True},
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}


def _param(name: str, what: str, why: str) -> Key:
    def default(job: ConfigJob) -> Any:
        return OPTIMIZER_DEFAULTS[job.config["optimizer"]["type"]].get(name)

    return Key(what=what, default=default, why=why)


def _step(name: str, what: str, why: str) -> Key:
    def default(job: ConfigJob) -> Any:
        return SCHEDULER_DEFAULTS[job.config["scheduler"]["type"]].get(name)

    return Key(what=what, default=default, why=why)


OPTIMIZER = {
    "type": Key(what="The optimizer; none: the program brings its own.", why="the recipe's, or asked for"),
    "params.lr": _param("lr", "Peak learning rate.", "the recipe's"),
    "params.weight_decay": _param("weight_decay", "Weight decay.", "the recipe's"),
    "params.betas": _param("betas", "Decay rates of the moments.", "the recipe's"),
    "params.eps": _param("eps", "Added to the root of the second moment.", "the recipe's"),
    "params.momentum": _param("momentum", "Momentum.", "the recipe's; 0.95 for Muon where it has none"),
    "params.max_coeff": _param("max_coeff", "Largest ratio of a tensor's update.", "the default is fine"),
    "params.min_coeff": _param("min_coeff", "Smallest ratio of a tensor's update.", "the default is fine"),
    "params.ns_method": _param("ns_method", "How Muon makes an update orthogonal.", "the default is fine"),
    "params.adam_w_mode": Key(
        what="Decoupled weight decay.",
        default=True,
        why="DeepSpeed decouples the decay of `Adam` too unless this says otherwise",
    ),
    "params.torch_adam": Key(
        what="PyTorch's Adam in place of DeepSpeed's.",
        default=False,
        why=lambda job: (
            "needs no compiler, and its fused kernels are as fast"
            if job.config["optimizer"]["params"]["torch_adam"]
            else "offloaded states are updated by DeepSpeed's CPU kernels"
        ),
    ),
    "params.fused": Key(
        what="PyTorch's fused kernels.",
        why=lambda job: "one kernel for all tensors" if job.device == "cuda" else "for GPUs",
    ),
}

SCHEDULER = {
    "type": Key(what="DeepSpeed's learning-rate schedule; none: the program's own.", why="asked for"),
    "params.total_num_steps": _step("total_num_steps", "Optimizer steps in all.", "train.steps"),
    "params.warmup_min_lr": _step("warmup_min_lr", "Learning rate of the first step.", "warm-up from 0"),
    "params.warmup_max_lr": _step("warmup_max_lr", "Learning rate after warm-up.", "optimizer.lr"),
    "params.warmup_num_steps": _step("warmup_num_steps", "Steps of warm-up.", "schedule.warmup_steps; at least 2"),
    "params.warmup_type": _step("warmup_type", "Shape of the warm-up.", "linear, as in transformers"),
    "params.warmup_min_ratio": _step("warmup_min_ratio", "First learning rate / peak.", "warm-up from 0"),
    "params.cos_min_ratio": _step("cos_min_ratio", "Final learning rate / peak.", "schedule.min_lr_ratio"),
    "params.cycle_min_lr": _step("cycle_min_lr", "Learning rate at both ends.", "schedule.min_lr_ratio, at least 0.1"),
    "params.cycle_max_lr": _step("cycle_max_lr", "Learning rate in the middle.", "optimizer.lr"),
    "params.cycle_first_step_size": _step("cycle_first_step_size", "Steps of the rise.", "half of train.steps"),
    "params.cycle_second_step_size": _step("cycle_second_step_size", "Steps of the fall.", "the other half"),
    "params.decay_step_size": _step("decay_step_size", "Steps between decays after the cycle.", "the run ends there"),
    "params.cycle_momentum": _step("cycle_momentum", "Cycle Adam's first beta too.", "the recipe decides the betas"),
    "params.lr_range_test_min_lr": _step("lr_range_test_min_lr", "First learning rate.", "optimizer.lr / 100"),
    "params.lr_range_test_step_size": _step(
        "lr_range_test_step_size", "Steps between rises of the rate.", "a tenth of train.steps"
    ),
    "params.lr_range_test_step_rate": _step(
        "lr_range_test_step_rate", "Rise, in multiples of the first rate.", "ends at optimizer.lr"
    ),
    "params.lr_range_test_staircase": _step("lr_range_test_staircase", "Rise in stairs.", "a smooth rise"),
}

_FILES = {
    "enabled": Key(what="Switched on.", default=False, why="asked for"),
    "output_path": Key(what="Where files go; empty: beside the program.", default="", why="log_dir"),
    "job_name": Key(what="Folder below.", default="DeepSpeedJobName", why="run_name"),
}
MONITORS = {
    "tensorboard": _FILES,
    "csv_monitor": _FILES,
    "wandb": {
        "enabled": Key(what="Switched on.", default=False, why="asked for"),
        "project": Key(what="Project.", default="deepspeed", why="run_name"),
        "group": Key(what="Group of runs.", why="none is needed"),
        "team": Key(what="Team.", why="your own account"),
    },
    "comet": {
        "enabled": Key(what="Switched on.", default=False, why="asked for"),
        "project": Key(what="Project; none: that of the environment.", why="run_name"),
        "samples_log_interval": Key(what="Samples between points.", default=100, why="the default is fine"),
    },
}

FLOPS_PROFILER = {
    "enabled": Key(what="Count the FLOPs of one step.", default=False, why="asked for"),
    "recompute_fwd_factor": Key(
        what="Forward passes that are recomputed, to be counted.", default=0.0, why="count what the model needs"
    ),
    "profile_step": Key(
        what="Measure the step after so many.", default=1, why="asked for: the first steps are not typical"
    ),
    "module_depth": Key(what="Modules down to this depth; -1: all.", default=-1, why="all"),
    "top_modules": Key(what="Modules listed at each depth.", default=1, why="the default is fine"),
    "detailed": Key(what="Print every module.", default=True, why="that is what it is for"),
    "output_file": Key(what="Where it prints; none: the terminal.", why="the terminal"),
}

ACTIVATION_CHECKPOINTING = {
    "partition_activations": Key(
        what="Tensor-parallel ranks keep a part of each checkpoint.",
        default=False,
        why=lambda job: "tp ranks hold the same one" if job.layout.tp > 1 else "there is no tensor parallelism",
    ),
    "cpu_checkpointing": Key(
        what="Keep checkpoints in host memory.",
        default=False,
        why=lambda job: "asked for" if job.options.cpu_checkpointing else "copies take time",
    ),
    "contiguous_memory_optimization": Key(
        what="One buffer for all checkpoints.", default=False, why="needs the number of checkpoints"
    ),
    "number_checkpoints": Key(what="How many there are.", why="only for the buffer above"),
    "synchronize_checkpoint_boundary": Key(what="Wait for the device at each.", default=False, why="for debugging"),
    "profile": Key(what="Time each.", default=False, why="for debugging"),
}
