"""The planner's order of pipeline schedules beside the order that was measured, in published settings.

    python benchmarks/published_schedules.py

Measured, in samples a second and GPU: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), Tables 3
and 4, on A100s of nodes of eight; one row for each model. The paper's ZB-1p is ZB-H1's memory with an order that is
searched for. In tokens a second and GPU: torchtitan (Liang et al. 2024, arXiv 2410.06511), Llama 3.1 405B on 512 H100.
Predicted: the toolkit's own step of the same layout and batch, with the schedule alone changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config.layout import Batch, Layout
from toolkit.hardware import gpu
from toolkit.models.shape import find_config
from toolkit.planner.cluster import Cluster
from toolkit.planner.request import PlanRequest
from toolkit.planner.search import scheduled


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A published run in several schedules."""

    name: str
    config: Mapping[str, Any]
    gpu: str
    layout: Layout
    micro_batch_size: int
    micro_batches: int
    seq_len: int
    measured: Mapping[str, float]
    """Throughput, by the schedule's part of a layout."""


def _gpt(layers: int, heads: int, hidden: int) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": hidden, "n_positions": 1024, "vocab_size": 50304}
    return {"model_type": "gpt2", "tie_word_embeddings": False, **sizes}


def _zero_bubble(name: str, shape: tuple[int, int, int], pp: int, size: int, micro: int, *rates: float) -> Setting:
    names = (f"pp{pp}", f"pp{pp}x2", f"pp{pp}-zbh1")
    return Setting(
        name=f"{name}, pp{pp}, {micro} micro-batches",
        config=_gpt(*shape),
        gpu="A100-SXM-80GB",
        layout=Layout(pp=pp, zero_stage=1),
        micro_batch_size=size,
        micro_batches=micro,
        seq_len=1024,
        measured=dict(zip(names, rates, strict=True)),
    )


SETTINGS = (
    _zero_bubble("1.5B", (22, 24, 2304), 8, 6, 24, 11.8, 13.1, 12.9),
    _zero_bubble("6.2B", (30, 32, 4096), 8, 3, 24, 3.50, 4.01, 3.88),
    _zero_bubble("14.6B", (46, 40, 5120), 16, 1, 48, 1.40, 1.54, 1.61),
    _zero_bubble("28.3B", (62, 48, 6144), 32, 1, 96, 0.76, 0.82, 0.87),
    Setting(
        name="Llama 3.1 405B, tp8, pp8, 32 micro-batches",
        config=find_config("llama-3.1-405b") or {},
        gpu="H100-80",
        layout=Layout(dp=8, tp=8, pp=8, zero_stage=1, sequence_parallel=True, recompute="full"),
        micro_batch_size=1,
        micro_batches=32,
        seq_len=8192,
        measured={"pp8": 100, "pp8x2": 128},
    ),
)


def predicted(setting: Setting) -> dict[str, float]:
    """Return the seconds of a step in each schedule that the model has layers for, by its part of a layout."""
    batch = Batch(
        global_batch_size=setting.micro_batch_size * setting.micro_batches * setting.layout.dp,
        micro_batch_size=setting.micro_batch_size,
        dp=setting.layout.dp,
    )
    request = PlanRequest.of(
        setting.name,
        setting.config,
        cluster=Cluster.of(gpu(setting.gpu)),
        gpus=setting.layout.world_size,
        seq_len=setting.seq_len,
        global_batch_size=batch.global_batch_size,
        schedules=True,
    )
    every = scheduled(request, setting.layout)
    return {layout.pipeline_text: request.step(layout, batch).seconds for layout in every}


def main() -> None:
    """Print a row for each setting."""
    print("| setting | measured, against 1F1B | predicted, against 1F1B | predicted fastest |")
    print("|---|---|---|---|")
    for setting in SETTINGS:
        plain = f"pp{setting.layout.pp}"
        seconds = predicted(setting)
        rates = setting.measured
        measured = ", ".join(f"{name} {rates[name] / rates[plain]:.2f}x" for name in rates if name != plain)
        ratios = {name: seconds[plain] / own for name, own in seconds.items() if name != plain}
        shown = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        print(f"| {setting.name} | {measured} | {shown} | {max(ratios, key=lambda name: ratios[name])} |")


if __name__ == "__main__":
    main()
