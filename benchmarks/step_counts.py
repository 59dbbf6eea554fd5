"""What one training step asks of a device, counted: operations, host reads, bytes, allocations, casts, collectives.

    python benchmarks/step_counts.py                    # all models and layouts: about forty minutes
    python benchmarks/step_counts.py --models llama --layouts dp2-z1 tp2-z1-sp-recompute
    python benchmarks/step_counts.py --save             # also writes benchmarks/results/step_counts.md

No time is measured: benchmarks/measure/step_counter.py says what is counted, and why it says more about a GPU than the
seconds of a CPU. Every layout trains with the loop of recipes/train.py on gloo ranks that are forked on this machine,
in bf16 with four micro-batches a step and rank; the fourth step is counted, on rank 0, in a pipeline on its last stage.
The loss is in chunks, as a recipe has it by default, but for the reference, which is plain PyTorch. Each layout also
trains with recomputation of every decoder layer (`-recompute`) and with the loss from full logits (`-plain`).

Beside them are peers with the same model, tokens and optimizer:

    plain PyTorch        autocast, backward, clip_grad_norm_, AdamW.step, loss.item() in every micro-batch, one process
    Trainer              transformers.Trainer with the toolkit's DeepSpeed config of the same stage
    DistributedConfig    transformers.Trainer with a model that transformers shards as it loads it: FSDP2 over dp, its
                         own tensor parallelism over tp, and its own expert parallelism over ep. GPT-2 has no
                         `base_model_tp_plan`, and so no tensor parallelism.

Each model has five tables: all counts; the bytes of the update, and the collectives, beside their closed forms
(docs/step-counts.md derives them); the lines of code that make the host wait; and what train.compile compiles. Layouts
whose rows are the same share them. Graphs and graph breaks are what Dynamo finds while it traces, so nothing is
generated from the graphs (backend `eager`).
"""

import argparse
import importlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from measure.closed_forms import StepFacts, collective_rows, update_row
from measure.our_run import CPU, make_recipe
from measure.rounds import silently
from measure.step_counter import BACKWARD, FORWARD, PHASES, UPDATE, CountedStep, StepCounts
from measure.table import Sheet, publish_all
from measure.trainer_run import Tokens, sharded_run, trainer_run
from rich.console import Console
from transformers import Trainer
from transformers.distributed import DistributedConfig
from typing_extensions import override

from toolkit import Callback, Job, TrainOptions, train
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines import compiled_layers
from toolkit.engines.optimizer import parameter_groups
from toolkit.launch.local_ranks import preload, run_ranks
from toolkit.launch.output import quiet
from toolkit.model_init.build_model import build_model
from toolkit.step_metrics import StepMetrics
from toolkit.training.loop import TrainingRun

MICRO_BATCHES = 4
STEPS = 5
SEQ_LEN = 64
# Wide enough beside the vocabulary that both stages of a pipeline have decoder layers.
_VOCABULARY = {"vocab_size": 4096}
_DECODER = _VOCABULARY | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "name_or_path": "gpt2-tiny",
        "overrides": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 1024} | _VOCABULARY,
    },
    "llama": {
        "name_or_path": "llama-tiny",
        "overrides": _DECODER | {"intermediate_size": 1024},
    },
    "qwen3_moe": {
        "name_or_path": "qwen3-30b-a3b",
        "overrides": _DECODER
        | {
            "moe_intermediate_size": 512,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    },
}
LAYOUTS = (
    *("reference", "dp2-ddp", "dp2-z0", "dp2-z1", "dp2-z2", "dp2-z3", "dp2-z1-lora"),
    *("tp2-z1", "tp2-z1-sp", "pp2-z1", "tp2-pp2-dp2-z1"),
)
OF_SEQUENCES = ("u2-z3",)
OF_EXPERTS = ("dp2-ep2-z2",)
VARIANTS = ("recompute", "plain")
PEERS = ("plain PyTorch", "Trainer dp2-z1", "Trainer dp2-z2", "Trainer dp2-z3")
SHARDED_PEERS = ("DistributedConfig dp2", "DistributedConfig tp2", "DistributedConfig dp2-tp2")
HEADINGS = (
    *("side", "operations", "forward", "backward", "update", "host reads", "counter reads", "KiB moved", "in update"),
    *("allocations", "MiB allocated", "copies", "casts", "repeated", "norm calls", "collectives"),
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to train, as the first column of the tables names it."""

    text: str

    @property
    def peer(self) -> str:
        """Who trains; empty for the toolkit."""
        return next((peer for peer in ("plain PyTorch", "Trainer", "DistributedConfig") if peer in self.text), "")

    @property
    def parts(self) -> list[str]:
        """The parts of the layout's name."""
        return [part for part in self.text.removeprefix(self.peer).strip().split("-") if part]

    @property
    def strategy(self) -> Strategy:
        """Return the layout. One process is the reference."""
        parts = [part for part in self.parts if part not in ("lora", "plain")]
        return Strategy.parse("-".join(parts) or "reference")

    @property
    def closed_form_strategy(self) -> Strategy | None:
        """Return the layout if its closed forms are derived, which are those of the toolkit's and DeepSpeed's."""
        return None if self.peer == "DistributedConfig" else self.strategy


Rows = list[list[str]]
Counted = dict[Side, tuple[StepCounts, StepFacts]]
Compiled = dict[Side, dict[str, Any]]


def sides_of(model: str) -> list[Side]:
    """All sides of a model, layouts before peers."""
    # DeepSpeed-Ulysses is refused for Qwen3-MoE (`dstk families`).
    layouts = [*LAYOUTS, *(OF_EXPERTS if model == "qwen3_moe" else OF_SEQUENCES)]
    texts = []
    for layout in layouts:
        # The reference has no other loss.
        texts += [layout, *(f"{layout}-{each}" for each in VARIANTS if (layout, each) != ("reference", "plain"))]
    texts += [*PEERS, *(peer for peer in SHARDED_PEERS if model != "gpt2" or "tp" not in peer)]
    if model == "qwen3_moe":
        texts.append("DistributedConfig dp2-ep2")
    return [Side(text=text) for text in texts]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=None, help="sides, as the table names them")
    parser.add_argument("--quick", action="store_true", help="one model and three sides")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/step_counts.md")
    options = parser.parse_args()
    quiet(debug=False)
    import_all()
    sheets: list[Sheet] = []
    with tempfile.TemporaryDirectory() as name:
        for model in ["llama"] if options.quick else options.models:
            texts = ["dp2-z1", "tp2-z1-sp", "plain PyTorch"] if options.quick else options.layouts
            sides = [Side(text=text) for text in texts] if texts else sides_of(model)
            sheets += sheets_of(model, *count_all(Path(name), model, sides))
    note = (
        f"bf16, 4 layers x 64, {SEQ_LEN} tokens a sample, one sample a micro-batch, {MICRO_BATCHES} micro-batches; "
        "rank 0, in a pipeline its last stage. The reference is fp32."
    )
    command = " ".join(["python benchmarks/step_counts.py", *map(shlex.quote, sys.argv[1:])])
    publish_all("step_counts", sheets=sheets, notes=[note], save=options.save, command=command)


def count_all(folder: Path, model: str, sides: list[Side]) -> tuple[Counted, Compiled]:
    """Train all sides of a model, and those that have compiled layers once more with these."""
    counted: Counted = {}
    compiled: Compiled = {}
    progress = Console(stderr=True, highlight=False)
    for side in sides:
        progress.print(f"{model}: {side.text}", style="dim")
        counted[side] = count(folder, model, side)
        if not side.peer and side.strategy.engine != "reference" and not set(VARIANTS) & set(side.parts):
            compiled[side] = compile_facts(folder, model, side)
    return counted, compiled


def sheets_of(model: str, counted: Counted, compiled: Compiled) -> list[Sheet]:
    """Return the tables of a model."""
    collectives: dict[str, list[Rows]] = {}
    updates: dict[str, list[Rows]] = {}
    reads: dict[str, list[Rows]] = {}
    for side, (counts, facts) in counted.items():
        collectives[side.text] = [list(collective_rows(side.closed_form_strategy, counts, facts))]
        updates[side.text] = [[update_row(side.closed_form_strategy, counts, facts)]]
        reads[side.text] = [[row] for row in read_lines(counts)]
    return [
        Sheet(
            title=f"One step of a rank, counted: {model}",
            headings=HEADINGS,
            rows=[[side.text, *figures(counts)] for side, (counts, _) in counted.items()],
        ),
        Sheet(
            title=f"Bytes of the update for each element that the rank updates: {model}",
            headings=("side", "largest operations", "elements", "bytes an element", "closed form", "ratio"),
            rows=shared_rows(updates),
            text_columns=2,
        ),
        Sheet(
            title=f"Collectives of a step: {model}",
            headings=(
                "side",
                "collective",
                "ranks",
                "calls",
                "async",
                "operations meanwhile",
                "MFLOP meanwhile",
                "KiB",
                "closed form, KiB",
                "ratio",
            ),
            rows=shared_rows(collectives),
            text_columns=2,
        ),
        Sheet(
            title=f"Where the host waits for the device: {model}",
            headings=("side", "phase", "line", "operation", "a step"),
            rows=shared_rows(reads),
            text_columns=4,
        ),
        Sheet(
            title=f"Graphs of train.compile: {model}",
            headings=("side", "reasons", "compiled layers", "graphs", "graph breaks"),
            rows=shared_rows({side.text: [[compile_row(facts)]] for side, facts in compiled.items()}),
            text_columns=2,
        ),
    ]


def shared_rows(tables: dict[str, list[Rows]]) -> Rows:
    """Rows of all sides, with the sides in the first column. Sides with the same block of rows share it."""
    sides: dict[str, list[str]] = {}
    for side, blocks in tables.items():
        for rows in blocks:
            sides.setdefault(json.dumps(rows), []).append(side)
    layouts = [side for side in tables if not Side(text=side).peer]
    return [[joined(names, layouts), *row] for text, names in sides.items() for row in json.loads(text)]


def joined(names: list[str], layouts: list[str]) -> str:
    """The names of sides, where a variant follows its layout as a suffix: `dp2-z1 (-plain), dp2-z2`."""
    if len(layouts) > 1 and set(layouts) <= set(names):
        return ", ".join(["all layouts", *(name for name in names if name not in layouts)])
    groups: dict[str, list[str]] = {}
    for name in names:
        layout, _, variant = name.rpartition("-")
        if layout in groups and variant in VARIANTS:
            groups[layout].append(f"-{variant}")
        else:
            groups[name] = []
    return ", ".join(f"{layout} ({', '.join(also)})" if also else layout for layout, also in groups.items())


def import_all() -> None:
    """Import once what the ranks need, which are forked from this process."""
    importlib.import_module("toolkit.engines.pipeline_engine")
    importlib.import_module("toolkit.engines.ulysses_engine")
    importlib.import_module("toolkit.engines.accelerate_engine")
    preload(*MODELS)


def count(folder: Path, model: str, side: Side) -> tuple[StepCounts, StepFacts]:
    """Train a side on fresh ranks; return the counts of the fourth step, and the model's sizes."""
    alone, recipe, ranks = place(folder, model, side)
    function: Callable[[], Any]
    if side.peer == "plain PyTorch":
        function = partial(plain_pytorch, recipe)
    elif side.peer == "Trainer":
        function = partial(trainer_counts, recipe, Tokens(alone), folder)
    elif side.peer == "DistributedConfig":
        function = partial(sharded_counts, recipe, Tokens(alone), folder, side.strategy)
    else:
        function = partial(our_counts, recipe)
    results: list[tuple[StepCounts, StepFacts]] = run_ranks(silently, ranks, function, timeout_seconds=1800)
    return results[-1] if side.strategy.pp > 1 else results[0]


def compile_facts(folder: Path, model: str, side: Side) -> dict[str, Any]:
    """Train a layout with train.compile; return what came out, on the rank whose step is counted."""
    _, recipe, ranks = place(folder, model, side)
    recipe = recipe.changed({"train": {"compile": True, "steps": 2}})
    results: list[dict[str, Any]] = run_ranks(silently, ranks, partial(our_graphs, recipe), timeout_seconds=1800)
    return results[-1] if side.strategy.pp > 1 else results[0]


def place(folder: Path, model: str, side: Side) -> tuple[Recipe, Recipe, int]:
    """Return the recipe of one process, that of a side, and the side's number of ranks."""
    strategy = side.strategy
    ranks = strategy.world_size(1)
    section = dict(MODELS[model])
    if "lora" in side.parts or side.peer == "DistributedConfig":
        section = {"name_or_path": saved(folder, model), "init": "pretrained"}
    if "lora" in side.parts:
        # Experts take no adapters.
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if model == "qwen3_moe" else ["all-linear"]
        section["lora"] = {"r": 4, "alpha": 16, "targets": targets}
    if "plain" in side.parts:
        section["loss"] = "plain"
    replicas = ranks // strategy.model_size
    recipe = make_recipe(
        folder,
        model=section,
        seq_len=SEQ_LEN,
        precision="fp32" if strategy.engine == "reference" and not side.peer else "bf16",
        batch={"global_batch_size": MICRO_BATCHES * replicas, "micro_batch_size": 1},
        train={"steps": STEPS, "engine": "deepspeed"},
    )
    if side.peer == "plain PyTorch":
        return recipe, recipe, 1
    return recipe, strategy.apply(recipe, ranks), ranks


def saved(folder: Path, model: str) -> str:
    """Save a model with random weights, which adapters need: they are for published ones."""
    path = folder / f"weights-{model}"
    if not path.exists():
        recipe = make_recipe(
            folder, model=MODELS[model], seq_len=SEQ_LEN, batch={"global_batch_size": 1}, train={"steps": 1}
        )
        build_model(recipe, eos_id=prepare(recipe.data, progress=False).eos_id).save_pretrained(path)
    return str(path)


def our_counts(recipe: Recipe) -> tuple[StepCounts, StepFacts]:
    """Count a step of the toolkit's loop on this rank."""
    step = CountedStep()
    train(Job.of(recipe, dist.get_world_size()), [step], TrainOptions(overwrite=True))
    return step.outcome


def our_graphs(recipe: Recipe) -> dict[str, Any]:
    """Train with compiled layers on this rank; return how many graphs there are, and what broke them."""
    facts: dict[str, Any] = {}

    class Compiled(Callback):
        @override
        def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
            assert run.engine.compiled is not None
            facts.update(run.engine.compiled.facts())

    with mock.patch.object(compiled_layers, "_OPTIONS", {"backend": "eager"}):
        train(Job.of(recipe, dist.get_world_size()), [Compiled()], TrainOptions(overwrite=True))
    return facts


def trainer_counts(recipe: Recipe, tokens: Tokens, folder: Path) -> tuple[StepCounts, StepFacts]:
    """Count a step of the Trainer on this rank. Its update is what DeepSpeed's `step` does."""
    step = CountedStep()
    kind = deepspeed.DeepSpeedEngine

    def updating(engine: Any, *arguments: Any, **keywords: Any) -> Any:
        step.facts = facts_of(recipe, engine.module)
        return counted_update(engine, *arguments, **keywords)

    backward = mock.patch.object(kind, "backward", in_phase(step, kind.backward, BACKWARD))
    counted_update = in_phase(step, kind.step, UPDATE)
    with backward, mock.patch.object(kind, "step", updating):
        trainer_run(recipe, tokens, folder / f"trainer-{dist.get_rank()}", CPU, log=step.step_ended)
    return step.outcome


def sharded_counts(recipe: Recipe, tokens: Tokens, folder: Path, strategy: Strategy) -> tuple[StepCounts, StepFacts]:
    """Count a step of the Trainer on this rank, with a model that transformers shards."""
    step = CountedStep()
    config = DistributedConfig(
        tp_size=strategy.tp,
        fsdp_size=strategy.dp or strategy.ep,
        ep_size=strategy.ep,
        fsdp_mixed_precision=True,
    )

    def clipping(trainer: Any, model: Any) -> Any:
        step.facts = facts_of(recipe, model)
        return counted_clip(trainer, model)

    counted_clip = in_phase(step, Trainer._clip_grad_norm, UPDATE)
    clip = mock.patch.object(Trainer, "_clip_grad_norm", clipping)
    update = mock.patch.object(AcceleratedOptimizer, "step", in_phase(step, AcceleratedOptimizer.step, UPDATE))
    with clip, update:
        sharded_run(recipe, tokens, folder / f"trainer-{dist.get_rank()}", CPU, config, log=step.step_ended)
    return step.outcome


def in_phase(step: CountedStep, method: Any, phase: str) -> Any:
    """Return a method whose operations are of a phase."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        step.counter.part = phase
        try:
            return method(*arguments, **keywords)
        finally:
            step.counter.part = FORWARD

    return call


def facts_of(recipe: Recipe, model: Any) -> StepFacts:
    """The sizes of a peer's model, which has all layers."""
    return StepFacts.of(recipe, model, layers=model.config.num_hidden_layers, micro_batches=MICRO_BATCHES)


def plain_pytorch(recipe: Recipe) -> tuple[StepCounts, StepFacts]:
    """Count a step of the loop that everybody writes, in one process."""
    tokens = prepare(recipe.data, progress=False)
    model: Any = build_model(recipe, eos_id=tokens.eos_id).train()
    section = recipe.optimizer
    groups = parameter_groups(model.named_parameters(), section)
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
    loader = MicroBatchLoader.open(Job.of(recipe, 1), tokens, rank=0)
    step = CountedStep()
    step.facts = facts_of(recipe, model)
    with loader.prefetch() as ahead:
        for number in range(STEPS):
            total = 0.0
            step.counter.part = FORWARD
            for batch in loader.micro_batches(number, ahead):
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(
                        input_ids=batch.input_ids, labels=batch.labels, shift_labels=batch.labels, use_cache=False
                    )
                (output.loss / MICRO_BATCHES).backward()
                total += output.loss.item()
            step.counter.part = UPDATE
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            step.step_ended(total)
    return step.outcome


def figures(counts: StepCounts) -> list[str]:
    """One row of the first table."""
    phases = [counts.operations[phase] for phase in PHASES]
    moved = sum(counts.bytes_moved.values())
    numbers = [counts.total_operations, *phases, sum(counts.host_reads.values()), counts.counter_reads]
    numbers += [moved // 1024, counts.bytes_moved[UPDATE] // 1024, counts.allocations]
    last = [counts.copies, counts.casts, counts.repeated_casts, counts.norm_calls, sum(counts.collectives.values())]
    mebibytes = f"{counts.allocated_bytes / 2**20:,.1f}"
    return [*(f"{number:,}" for number in numbers), mebibytes, *(f"{number:,}" for number in last)]


def compile_row(facts: dict[str, Any]) -> list[str]:
    """One row of the table of graphs."""
    breaks: dict[str, int] = facts["graph_breaks"]
    reasons = "; ".join(f"{reason} ({times}x)" for reason, times in breaks.items())
    return [reasons, str(facts["layers"]), str(facts["graphs"]), str(sum(breaks.values()))]


def read_lines(counts: StepCounts) -> list[list[str]]:
    """One row for each line that reads, most frequent first."""
    return [
        [read.phase, f"`{read.place}`", read.operation, str(times)] for read, times in counts.host_reads.most_common()
    ]


if __name__ == "__main__":
    main()
