"""The planner's order of pipeline schedules beside the order that was measured, in twelve published settings.

    python benchmarks/published_schedules.py

Measured, in samples a second and GPU: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), on A100s
of nodes of eight: models of Table 3 with the fewest and the most micro-batches of Table 4, and those of Table 6, which
has ZB-V, with the fewest. The paper's ZB-1p is ZB-H1's memory with an order that is searched for; its interleaved 1F1B
has a layer in each chunk. In tokens a second and GPU: torchtitan (Liang et al. 2024, arXiv 2410.06511), Llama 3.1 405B
on 512 H100.

Predicted: the toolkit's own step of the same layout and batch, with the schedule alone changed. Of interleaved 1F1B it
is the fastest that the planner tries and the model has layers for. The order is that of two schedules at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from toolkit.config.layout import Batch, Layout
from toolkit.hardware import gpu
from toolkit.models.shape import find_config
from toolkit.planner.cluster import Cluster
from toolkit.planner.layout_candidates import scheduled
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.schedule_choice import fastest_schedule


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
    """Throughput, by schedule."""


_MODELS = {"1.5B": (22, 24, 2304), "6.2B": (30, 32, 4096), "14.6B": (46, 40, 5120), "28.3B": (62, 48, 6144)}
"""Layers, heads and hidden size of the zero-bubble paper's models."""


def _zero_bubble(
    model: str, pp: int, size: int, micro_batches: int, *, more_layers: int = 0, **measured: float
) -> Setting:
    layers, heads, hidden = _MODELS[model]
    return Setting(
        name=f"{model}, pp{pp}, {micro_batches} micro-batches of {size}",
        config={
            "model_type": "gpt2",
            "n_layer": layers + more_layers,
            "n_head": heads,
            "n_embd": hidden,
            "n_positions": 1024,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        gpu="A100-SXM-80GB",
        layout=Layout(pp=pp, zero_stage=1),
        micro_batch_size=size,
        micro_batches=micro_batches,
        seq_len=1024,
        measured={name.replace("_", "-"): rate for name, rate in measured.items()},
    )


SETTINGS = (
    # Table 4
    _zero_bubble("1.5B", 8, 6, 24, f1b=11.8, interleaved=13.1, zb_h1=12.9),
    _zero_bubble("1.5B", 8, 6, 64, f1b=13.6, interleaved=13.9, zb_h1=14.2),
    _zero_bubble("6.2B", 8, 3, 24, f1b=3.50, interleaved=4.01, zb_h1=3.88),
    _zero_bubble("6.2B", 8, 3, 64, f1b=4.03, interleaved=4.19, zb_h1=4.20),
    _zero_bubble("14.6B", 16, 1, 48, f1b=1.40, interleaved=1.54, zb_h1=1.61),
    _zero_bubble("14.6B", 16, 1, 128, f1b=1.64, interleaved=1.66, zb_h1=1.76),
    _zero_bubble("28.3B", 32, 1, 96, f1b=0.76, interleaved=0.82, zb_h1=0.87),
    _zero_bubble("28.3B", 32, 1, 256, f1b=0.88, interleaved=0.90, zb_h1=0.96),
    # Table 6, whose ends have chunks without a layer: predicted with one more for each
    _zero_bubble("6.2B", 16, 6, 48, more_layers=2, f1b=3.38, zb_h1=3.87, zb_v=4.15),
    _zero_bubble("14.6B", 24, 2, 72, more_layers=2, f1b=1.52, zb_h1=1.72, zb_v=1.85),
    _zero_bubble("28.3B", 32, 2, 96, more_layers=2, f1b=0.82, zb_h1=0.94, zb_v=1.01),
    Setting(
        name="Llama 3.1 405B, tp8-pp8, 32 micro-batches of 1",
        config=find_config("llama-3.1-405b") or {},
        gpu="H100-80",
        layout=Layout(dp=8, tp=8, pp=8, zero_stage=1, sequence_parallel=True, recompute="full"),
        micro_batch_size=1,
        micro_batches=32,
        seq_len=8192,
        measured={"f1b": 100, "interleaved": 128},
    ),
)


def predicted(setting: Setting) -> list[Plan]:
    """Return a plan for each schedule that the model has layers for; the first is DeepSpeed's own 1F1B."""
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
    return [request.estimated(layout, batch, request.step(layout, batch)) for layout in every]


def gains(plans: Sequence[Plan]) -> dict[str, float]:
    """Return the throughput of each schedule over that of DeepSpeed's own 1F1B; of chunks, the fastest number."""
    plain = plans[0].step.seconds
    ratios: dict[str, float] = {}
    for plan in plans[1:]:
        name = str(plan.layout.schedule)
        ratios[name] = max(ratios.get(name, 0.0), plain / plan.step.seconds)
    return ratios


def pairs_in_order(measured: Mapping[str, float], expected: Mapping[str, float]) -> tuple[int, int]:
    """Return how many pairs of schedules are predicted in the measured order, and how many there are."""
    both = [name for name in measured if name in expected]
    pairs = list(combinations(both, 2))
    agreeing = [
        (one, other) for one, other in pairs if (measured[one] > measured[other]) == (expected[one] > expected[other])
    ]
    return len(agreeing), len(pairs)


def main() -> None:
    """Print a row for each setting."""
    print("| setting | measured, over 1F1B | predicted | pairs in order | `auto` takes |")
    print("|---|---|---|---|---|")
    agreeing = 0
    pairs = 0
    for setting in SETTINGS:
        plans = predicted(setting)
        rates = {name: rate / setting.measured["f1b"] for name, rate in setting.measured.items()}
        expected = gains(plans)
        right, of = pairs_in_order(rates, {**expected, "f1b": 1.0})
        agreeing += right
        pairs += of
        taken = fastest_schedule(plans)
        taken_text = taken.layout.pipeline_text if taken.fits else "none fits surely"
        row = (setting.name, _listed(rates), _listed(expected), f"{right} of {of}", taken_text)
        print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{agreeing} of {pairs} pairs are predicted in the measured order")


def _listed(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name not in ("f1b", "1f1b"))


if __name__ == "__main__":
    main()
