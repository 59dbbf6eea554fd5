"""The memory of DPO: the toolkit beside TRL's DPOTrainer, under the same ZeRO stage.

    python benchmarks/preference_memory.py           # four sides under ZeRO-1 and ZeRO-3: some minutes
    python benchmarks/preference_memory.py --quick   # does it run? The figures mean nothing.
    python benchmarks/preference_memory.py --save    # also writes benchmarks/results/preference_memory.md

All sides train all parameters of the same Llama from the same weights on the same pairs, in fp32, with AdamW, under the
toolkit's DeepSpeed config, on two forked gloo ranks with one thread each. A sequence has 128 tokens, so that nothing is
padding: TRL's batches have 8 sequences of 4 pairs, the toolkit's 4 samples with the two sequences of a pair.

    TRL, reference in memory     the default of DPOTrainer
    TRL, reference computed      `precompute_ref_log_probs`
    toolkit, reference computed  `reference: initial`, the default
    toolkit, reference online    `reference: online`

    peak     largest resident memory of a rank, above what it had before it built the model; least of the rounds
    ratio    peak over that of the side of TRL with the reference in the same place
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from measure.our_run import CPU, our_run
from measure.peak import with_peak
from measure.table import publish
from measure.trainer_run import training_arguments
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from toolkit import Job
from toolkit.config.objective_section import ObjectiveSection
from toolkit.config.recipe import Recipe
from toolkit.data.tokens.token_cache import prepare
from toolkit.launch.local_ranks import preload, run_ranks
from toolkit.launch.output import quiet
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.training.preflight import check_model, deepspeed_config

RANKS = 2
STAGES = (1, 3)
WORDS = 8192
PROMPT_TOKENS = 32
COMPLETION_TOKENS = 96
MICRO_BATCH = 4
ACCUMULATION = 2
STEPS = 3
_THEIRS = "TRL, reference"
_OURS = "toolkit, reference"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="one round of a tiny model")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/preference_memory.md")
    options = parser.parse_args()
    quiet(debug=False)
    preload("llama")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = make_pairs_recipe(folder, hidden=64 if options.quick else 512, layers=2 if options.quick else 6)
        parameters = sum(weight.numel() for weight in LlamaForCausalLM(config_of(recipe)).parameters())
        rows = [
            row for stage in STAGES for row in rows_of(folder, recipe, stage, 1 if options.quick else options.rounds)
        ]
    publish(
        "preference_memory",
        title="The memory of DPO, beside TRL's DPOTrainer",
        headings=("ZeRO", "side", "peak MiB", "ratio"),
        rows=rows,
        text_columns=2,
        notes=[
            f"Llama of {parameters / 1e6:.1f}M parameters, vocabulary of {WORDS:,}, fp32, on {RANKS} ranks",
            f"micro-batches of {MICRO_BATCH} pairs of two sequences of {PROMPT_TOKENS + COMPLETION_TOKENS} tokens",
        ],
        save=options.save,
    )


def config_of(recipe: Recipe) -> LlamaConfig:
    """The config of the model."""
    return LlamaConfig.from_pretrained(recipe.model.name_or_path)


def make_pairs_recipe(folder: Path, *, hidden: int, layers: int) -> Recipe:
    """Write a model, a tokenizer and pairs of random words, and return the recipe that trains on them."""
    tokenizer = Tokenizer(WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2", unk_token="w0")
    fast.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    global_batch_size = MICRO_BATCH * ACCUMULATION * RANKS
    lines = map(json.dumps, pairs(global_batch_size * STEPS))
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe: Recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": str(folder / "base"), "init": "pretrained"},
            "data": {
                "source": str(folder / "pairs.jsonl"),
                "format": "preference",
                "tokenizer": str(folder / "base"),
                "seq_len": 2 * (PROMPT_TOKENS + COMPLETION_TOKENS),
                "packing": "padded",
                "eval_fraction": 0.0,
                "workers": 1,
                "cache_dir": str(folder / "cache"),
            },
            "batch": {"global_batch_size": global_batch_size, "micro_batch_size": MICRO_BATCH},
            "precision": "fp32",
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "train": {"steps": STEPS, "objective": {"name": "dpo"}},
            "run_dir": str(folder / "run"),
        }
    )
    prepare(recipe.data, progress=False)
    return recipe


def pairs(count: int) -> Iterator[dict[str, str]]:
    """Yield pairs of random words, each a token; both sides add an end-of-text token to a completion."""
    draw = random.Random(0)

    def words(number: int) -> str:
        return " ".join(f"w{draw.randrange(3, WORDS)}" for _ in range(number))

    for _ in range(count):
        row = {"prompt": words(PROMPT_TOKENS)}
        yield row | {name: f" {words(COMPLETION_TOKENS - 1)}" for name in ("chosen", "rejected")}


def rows_of(folder: Path, recipe: Recipe, stage: int, rounds: int) -> list[list[str]]:
    """Run all sides under a ZeRO stage."""
    staged = recipe.changed({"parallel": {"zero_stage": stage}})
    online = staged.changed({"train": {"objective": ObjectiveSection(name="dpo", reference="online")}})
    sides: dict[str, Callable[[], Any]] = {
        f"{_THEIRS} in memory": partial(their_run, staged, folder, precomputes=False),
        f"{_OURS} online": partial(our_run, online),
        f"{_THEIRS} computed": partial(their_run, staged, folder, precomputes=True),
        f"{_OURS} computed": partial(our_run, staged),
    }
    peaks: dict[str, list[int]] = {side: [] for side in sides}
    for number in range(rounds):
        for side, run in sides.items():
            Console(stderr=True, highlight=False).print(
                f"z{stage}, {side}: round {number + 1} of {rounds}", style="dim"
            )
            ranks = run_ranks(with_peak, RANKS, run, timeout_seconds=1800)
            peaks[side].append(max(peak for _, peak in ranks))
    rows = []
    theirs = 0
    for side in sides:
        peak = min(peaks[side])
        theirs = peak if side.startswith(_THEIRS) else theirs
        rows.append([f"{stage}", side, f"{peak / 2**20:,.0f}", f"{peak / theirs:.2f}"])
    return rows


def their_run(recipe: Recipe, folder: Path, *, precomputes: bool) -> list[float]:
    """Train on this rank with TRL's trainer and the toolkit's DeepSpeed config; return the losses."""
    job = Job.of(recipe, RankEnvironment.detect().world_size)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = training_arguments(
        DPOConfig,
        job,
        folder / "trl",
        CPU,
        deepspeed=deepspeed_config(job, check_model(recipe, CPU), CPU),
        beta=recipe.train.objective.beta,
        max_length=None,
        precompute_ref_log_probs=precomputes,
        gradient_checkpointing=False,
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_json(str(recipe.data.source), cache_dir=str(folder / "datasets")),
        processing_class=AutoTokenizer.from_pretrained(recipe.model.name_or_path),
    )
    trainer.train()
    assert trainer.model_wrapped.zero_optimization_stage() == recipe.parallel.zero_stage
    assert (trainer.ref_model is None) == precomputes
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == recipe.train.steps
    return losses


if __name__ == "__main__":
    main()
