"""Sections of a DeepSpeed config that no recipe has: schedulers, monitors, profiler, files, checkpointing."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from toolkit.config.job import Job
from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.buckets import largest_partition
from toolkit.dsconfig.options import ConfigOptions, MonitorName
from toolkit.errors import ModelError

Section = dict[str, Any]
SECTIONS: dict[str, Section] = json.loads(Path(__file__).with_name("sections.json").read_text(encoding="utf-8"))
"""Sections of which most is the same in every config; null is filled in."""
NVME_SUB_GROUP = 100_000_000
"""Elements that are read from NVMe and updated at once: 0.4 GB a buffer, enough for a drive's full bandwidth."""


def extra_sections(options: ConfigOptions, recipe: Recipe, layout: Layout) -> Section:
    """Return top-level sections by name; empty without options."""
    sections: Section = {}
    if options.scheduler is not None:
        sections["scheduler"] = _scheduler(options, recipe)
    if options.activation_checkpointing:
        # The checkpoint of a layer is the same on all tensor-parallel ranks: each keeps a partition.
        sections["activation_checkpointing"] = SECTIONS["activation_checkpointing"] | {
            "partition_activations": layout.tp > 1,
            "cpu_checkpointing": options.cpu_checkpointing,
        }
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        sections["aio"] = dict(SECTIONS["aio"])
    for monitor in options.monitors:
        sections["csv_monitor" if monitor == "csv" else monitor] = _monitor(monitor, options)
    if options.profile_step is not None:
        sections["flops_profiler"] = SECTIONS["flops_profiler"] | {"profile_step": options.profile_step}
    return sections


def offload_section(job: Job, *, of: Literal["optimizer", "params"], pin_memory: bool) -> Section:
    """Return `offload_optimizer` or `offload_param` of the ZeRO section. Raises ModelError for an unknown shape."""
    device = getattr(job.layout, f"offload_{of}")
    section: Section = {"device": device, "pin_memory": pin_memory}
    if device != "nvme":
        return section
    section["nvme_path"] = os.path.expanduser(str(job.recipe.parallel.nvme_path))
    if of == "optimizer":
        # Adam keeps four tensors a parameter: weight, gradient and two moments.
        return section | {"buffer_count": 4, "pipeline_read": False, "pipeline_write": False, "fast_init": False}
    if job.shape is None:
        field = "model.name_or_path"
        reason = "the buffers of weights on NVMe have the size of its largest matrix"
        advice = "take a family that dstk families lists"
        on_cpu = ("parallel.offload_params", "cpu")
        raise ModelError.of(field, job.recipe.model.name_or_path, reason, advice, on_cpu)
    # DeepSpeed's default, 1e9, would leave the weights of most models in host memory.
    size = largest_partition(job.shape, job.layout.replicas)
    return section | {"buffer_count": 5, "buffer_size": size, "max_in_cpu": 0}


def _scheduler(options: ConfigOptions, recipe: Recipe) -> Section:
    lr = recipe.optimizer.lr
    steps = recipe.train.steps
    warmup_steps = max(2, recipe.schedule.warmup_steps)  # DeepSpeed rejects 0, and reads 1 as 2
    final = recipe.schedule.min_lr_ratio
    warmup: Section = {"warmup_num_steps": warmup_steps, "warmup_type": "linear"}
    rates: Section = {"warmup_min_lr": 0.0, "warmup_max_lr": lr}
    params: Section
    match options.scheduler:
        case "WarmupLR":
            params = rates | warmup
        case "WarmupDecayLR":
            params = {"total_num_steps": steps} | rates | warmup
        case "WarmupCosineLR":
            params = {"total_num_steps": steps, "warmup_min_ratio": 0.0} | warmup | {"cos_min_ratio": final}
        case "OneCycle":
            half = max(1, steps // 2)
            params = {
                "cycle_min_lr": lr * max(final, 0.1),
                "cycle_max_lr": lr,
                "cycle_first_step_size": half,
                "cycle_second_step_size": max(1, steps - half),
                "decay_step_size": 0,
                # It would also change Adam's first beta, which the recipe decides.
                "cycle_momentum": False,
            }
        case _:
            params = {
                "lr_range_test_min_lr": lr / 100,
                "lr_range_test_step_size": max(1, steps // 10),
                "lr_range_test_step_rate": 10.0,
                "lr_range_test_staircase": False,
            }
    return {"type": options.scheduler, "params": params}


def _monitor(monitor: MonitorName, options: ConfigOptions) -> Section:
    if monitor == "wandb":
        return {"enabled": True, "project": options.run_name, "group": None, "team": None}
    if monitor == "comet":
        return {"enabled": True, "project": options.run_name, "samples_log_interval": 100}
    return {"enabled": True, "output_path": options.log_dir, "job_name": options.run_name}
