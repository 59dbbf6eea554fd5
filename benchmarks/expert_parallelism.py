"""What sharing out experts costs and saves: steps of a mixture with ep against the same ranks without it.

    python benchmarks/expert_parallelism.py             # five rounds: about ten minutes
    python benchmarks/expert_parallelism.py --quick     # does it run? The figures mean nothing.
    python benchmarks/expert_parallelism.py --save      # also writes benchmarks/results/expert_parallelism.md

Two CPU ranks in fp32 train the same Qwen3-MoE from the same weights on the same samples: plain ZeRO-2, where every rank
has all experts and averages all their gradients; ep2, where each has half, exchanges tokens, and averages none of them;
tensor parallelism with whole and with inner experts; and transformers' own: FSDP2 without and with its expert
parallelism (`DistributedConfig`), in a loop that does nothing but the step, with neither loader, metrics nor progress.

The second table has a DeepSeek-V2 with a shared expert as wide as two others, which runs while rows are on their way,
against the same without that. gloo's threads compute on the cores of the ranks, so little can be hidden here.

All sides of a table agree in loss within 1e-4, which is checked. A round forks the ranks for each side in turn.
Prints medians of all counted steps, and of the ratios to the first side in the same round the median, the smallest
and the largest.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
from measure.our_run import Stamps, make_recipe, our_run
from measure.rounds import Side, alternate
from measure.table import Sheet, publish_all
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.optimization import get_cosine_schedule_with_warmup

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.optimizer import parameter_groups
from toolkit.launch.output import quiet
from toolkit.model_init.build_model import build_model
from toolkit.model_init.freed_memory import keep_freed_memory
from toolkit.parallel.experts import sharding

LAYOUTS = ("dp2-z2", "dp2-ep2-z2", "tp2-z2", "tp2-z2-inner")
STEPS, WARMUP = 20, 4
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
PLAIN = ("qwen3-30b-a3b", SIZES | {"num_experts": 32})
SHARED = ("deepseek-v2-lite", SIZES | {"n_routed_experts": 32, "intermediate_size": 512, "kv_lora_rank": 64})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/expert_parallelism.md")
    options = parser.parse_args()
    quiet(debug=False)
    rounds, steps = (1, WARMUP + 3) if options.quick else (options.rounds, STEPS)
    with tempfile.TemporaryDirectory() as name:
        plain, shared = (make_mixture_recipe(Path(name), steps, *model) for model in (PLAIN, SHARED))
        build_model(plain, eos_id=prepare(plain.data, progress=False).eos_id).save_pretrained(Path(name) / "model")
        sides: dict[str, Side] = {layout: partial(our_run, _placed(plain, layout)) for layout in LAYOUTS}
        for label, ep in (("transformers, FSDP2", 1), ("transformers, FSDP2 and ep2", 2)):
            sides[label] = partial(transformers_run, _placed(plain, "dp2-z2"), Path(name) / "model", ep=ep)
        first = _sheet("Two ranks, fp32: a mixture of 32 experts, 4 of each token", sides, rounds)
        ours = _placed(shared, "dp2-ep2-z2")
        sides = {"dp2-ep2-z2, one after the other": partial(sequential_run, ours), "dp2-ep2-z2": partial(our_run, ours)}
        second = _sheet("With a shared expert, during the exchange and beside it", sides, rounds)
    note = "Models of 4 layers x 256, experts of width 256, samples of 128 tokens, 4 in a step."
    publish_all("expert_parallelism", sheets=[first, second], notes=[note], save=options.save)


def _sheet(title: str, sides: Mapping[str, Side], rounds: int) -> Sheet:
    times = alternate(sides, ranks=2, rounds=rounds, warmup=WARMUP)
    first = next(iter(times.values()))
    rows = []
    for side, measured in times.items():
        assert abs(measured.losses[-1] / first.losses[-1] - 1) < 1e-4, (side, measured.losses[-1])
        ratios = measured.over(first)
        three = (statistics.median(ratios), ratios[0], ratios[-1])
        rows.append(
            [
                side,
                f"{measured.median * 1e3:.0f}",
                *(f"{ratio:.2f}x" for ratio in three),
                f"{measured.losses[-1]:.5f}",
            ]
        )
    return Sheet(title=title, headings=("side", "ms a step", "ratio", "smallest", "largest", "last loss"), rows=rows)


def sequential_run(recipe: Recipe) -> Stamps:
    """Train with a shared expert that waits for the exchange."""
    vars(sharding)["overlap_shared_expert"] = lambda block, experts: None
    return our_run(recipe)


def transformers_run(recipe: Recipe, weights: Path, *, ep: int) -> Stamps:
    """Train on this rank with transformers' FSDP2, and its expert parallelism, the same samples in the same order."""
    keep_freed_memory()
    job = Job.of(recipe, dist.get_world_size())
    config = DistributedConfig(fsdp_size=job.layout.dp, ep_size=ep)
    model: Any = AutoModelForCausalLM.from_pretrained(weights, distributed_config=config, dtype=torch.float32).train()
    fields = recipe.optimizer
    groups = parameter_groups(model.named_parameters(), fields)
    optimizer = torch.optim.AdamW(groups, lr=fields.lr, betas=fields.betas, eps=fields.eps)
    schedule = get_cosine_schedule_with_warmup(optimizer, recipe.schedule.warmup_steps, recipe.train.steps)
    stamps = Stamps()
    loader = MicroBatchLoader.open(job, prepare(recipe.data, progress=False), rank=dist.get_rank())
    with loader.prefetch() as ahead:
        batches = [(batch.input_ids, batch.labels) for batch in ahead]
    for tokens, targets in batches[: recipe.train.steps]:
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        _clip(model, recipe.train.grad_clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        stamps.add(float(mean) / dist.get_world_size())
    return stamps


def _clip(model: Any, most: float) -> None:
    """Clip by the norm of all gradients: PyTorch's function takes one mesh, and experts have their own."""
    groups: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    totals: list[Any] = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups.values()]
    norms = [total.full_tensor() for total in totals]
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, most, torch.linalg.vector_norm(torch.stack(norms)))


def _placed(recipe: Recipe, layout: str) -> Recipe:
    return Strategy.parse(layout).apply(recipe, 2)


def make_mixture_recipe(folder: Path, steps: int, model: str, sizes: Mapping[str, Any]) -> Recipe:
    """All sides start from it."""
    return make_recipe(
        folder,
        model={"name_or_path": model, "overrides": dict(sizes)},
        seq_len=128,
        batch={"global_batch_size": 4, "micro_batch_size": 2},
        train={"steps": steps},
    )


if __name__ == "__main__":
    main()
