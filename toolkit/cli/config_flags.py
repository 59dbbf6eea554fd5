"""The options of `dstk config`, in groups: what is trained, what is added, where it runs."""

from collections.abc import Callable
from typing import Any, get_args

import click

from toolkit.dsconfig.options import REMOVED_OPTIMIZERS, MonitorName, OtherOptimizer, SchedulerName
from toolkit.recipe import OptimizerName, Precision, ScheduleName

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

OPTIMIZERS = (*get_args(OptimizerName), *get_args(OtherOptimizer), *REMOVED_OPTIMIZERS)
_POSITIVE = click.IntRange(min=1)
_FRACTION = click.FloatRange(min=0, max=1, max_open=True)
_DTYPE = click.Choice(["fp32", "bf16", "fp16"])

_TRAINED: list[Decorator] = [
    click.option("--model", metavar="NAME", help="A known shape (gpt2-xl), or a directory with a config.json."),
    click.option("--layout", metavar="LAYOUT", help="For instance dp8-tp2-z1; what is left out is 1, dp what is left."),
    click.option("--global-batch", type=_POSITIVE, metavar="N", help="Samples in one optimizer step, over all ranks."),
    click.option("--micro", type=_POSITIVE, metavar="N", help="Samples in one forward pass of a rank."),
    click.option("--precision", type=click.Choice(get_args(Precision)), help="Of weights and activations."),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), metavar="NAME", help=f"{', '.join(OPTIMIZERS[:8])}."),
    click.option("--lr", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Peak learning rate."),
    click.option("--betas", type=(_FRACTION, _FRACTION), metavar="B1 B2", help="Decay rates of the moments."),
    click.option("--weight-decay", type=click.FloatRange(min=0), metavar="X", help="Weight decay."),
    click.option(
        "--grad-clip", type=click.FloatRange(min=0), metavar="X", help="Largest gradient norm; 0: no clipping."
    ),
    click.option("--schedule", type=click.Choice(get_args(ScheduleName)), metavar="NAME", help="Of the learning rate."),
    click.option("--steps", type=_POSITIVE, metavar="N", help="Optimizer steps of the run."),
    click.option("--warmup-steps", type=click.IntRange(min=0), metavar="N", help="Steps of linear warm-up."),
    click.option(
        "--recompute",
        type=click.Choice(["none", "selective", "full"]),
        help="The model's own activation checkpointing; selective: of attention alone, by this toolkit.",
    ),
    click.option("--offload-optimizer", type=click.Choice(["none", "cpu", "nvme"]), help="Where its states are kept."),
    click.option("--offload-params", type=click.Choice(["none", "cpu", "nvme"]), help="Where parameters are kept."),
]
_ADDED: list[Decorator] = [
    click.option("--nvme-path", metavar="DIR", help="Where the NVMe drive is mounted."),
    click.option("--hpz", type=_POSITIVE, default=1, metavar="N", help="ZeRO++: parameters kept whole in N ranks."),
    click.option("--quantized-weights", is_flag=True, help="ZeRO++ qwZ: gather parameters in 8 bits."),
    click.option("--quantized-gradients", is_flag=True, help="ZeRO++ qgZ: send gradients between nodes in 4 bits."),
    click.option("--grad-accum-dtype", type=_DTYPE, default="fp32", help="In which gradients are summed [fp32]."),
    click.option("--communication-dtype", type=_DTYPE, default="fp32", help="In which they are reduced [fp32]."),
    click.option("--activation-checkpointing", is_flag=True, help="DeepSpeed's own, for models that call it."),
    click.option("--cpu-checkpointing", is_flag=True, help="Keep those activations in host memory."),
    click.option("--scheduler", type=click.Choice(get_args(SchedulerName)), help="DeepSpeed's own schedule."),
    click.option("--monitor", "monitors", type=click.Choice(get_args(MonitorName)), multiple=True, help="Log there."),
    click.option("--log-dir", metavar="DIR", default="logs", help="Of tensorboard and csv [logs]."),
    click.option("--run-name", metavar="NAME", default="run", help="Job or project of a monitor, and of Slurm [run]."),
    click.option("--profile-step", type=_POSITIVE, metavar="N", help="Let DeepSpeed count FLOPs after N steps."),
    click.option("--wall-clock-breakdown", is_flag=True, help="Let DeepSpeed time the parts of a step."),
]
_PLACED: list[Decorator] = [
    click.option("--world-size", type=_POSITIVE, metavar="N", help="Ranks of the job; default: those of the layout."),
    click.option("--nodes", type=_POSITIVE, metavar="N", help="Machines [1]."),
    click.option("--gpus-per-node", type=_POSITIVE, metavar="N", help="Ranks of each."),
    click.option("--host", "hosts", multiple=True, metavar="NAME", help="A node's name, one for each [node1 …]."),
    click.option("--gpu", metavar="NAME", help="Size buckets for its links, for instance H100-SXM-80GB."),
    click.option(
        "--network-gbit",
        type=click.FloatRange(min=0, min_open=True),
        default=100.0,
        metavar="X",
        help="Of one GPU's network [100].",
    ),
    click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="Where it runs [cuda]."),
    click.option(
        "--port", type=click.IntRange(1024, 65535), default=29501, metavar="N", help="Where ranks meet [29501]."
    ),
]


def trained(command: Callable[..., Any]) -> Callable[..., Any]:
    """Fields of a recipe: each overrides it, or takes its place."""
    return _all(_TRAINED, command)


def added(command: Callable[..., Any]) -> Callable[..., Any]:
    """What no recipe has."""
    return _all(_ADDED, command)


def placed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Machines and ranks."""
    return _all(_PLACED, command)


def _all(options: list[Decorator], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
