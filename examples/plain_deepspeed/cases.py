"""The known bugs as runs: which script with which config, on which model, against which reference.

docs/generate_known_bugs.py writes their numbers into docs/known-bugs.md; tests/parity/test_known_bugs.py says what the
page says about them.
"""

import io
import json
import random
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from auto_tensor_parallel import AutoTensorParallelScript
from data_parallel import DataParallelScript
from empty_sample import masked_mean, with_empty_sample
from native_experts import NativeExpertsScript
from pipeline import PipelineScript
from tensor_parallel import TensorParallelScript
from transformers import get_constant_schedule_with_warmup
from ulysses import UlyssesScript

from toolkit.config.recipe import Recipe
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.parity import ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

# DeepSpeed would compile a shared-memory collective for CPU ranks, which takes minutes; gloo's own does.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

GPT2 = {
    "name_or_path": "gpt2-tiny",
    "overrides": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320},
}
LLAMA = {
    "name_or_path": "llama-tiny",
    "overrides": {
        "hidden_size": 48,
        "head_dim": 12,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 320,
    },
}
MIXTRAL = {
    "name_or_path": "mixtral-8x7b",
    "overrides": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    },
}
GLOBAL_BATCH = 16
WARMUP_STEPS = 3
ADAMW_STEPS = 20

Factory = Callable[..., Engine]


def same(factory: Factory) -> Factory:
    """No change."""
    return factory


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler of transformers, for deepspeed.initialize."""
    return get_constant_schedule_with_warmup(optimizer, WARMUP_STEPS)


@dataclass(frozen=True, kw_only=True)
class KnownBug:
    """One script that trains something else than the reference, and the change that fixes it."""

    name: str
    script: Factory
    ranks: int = 2
    mathematics: Mapping[str, Any] = field(default_factory=dict)
    """What decides what is computed: the reference runs with it too. `section__field`, as in the tests."""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 4
    config: Mapping[str, Any]
    """The ds_config.json of the script, beside the sizes of batches."""
    repair: Mapping[str, Any] = field(default_factory=lambda: {"repaired": True})
    """Arguments of the script that fix it."""
    batches: Callable[[Factory], Factory] = same
    """A change of all engines' batches."""
    is_hidden_by_adam: bool = False
    """Whether it is a matter of the gradient's length alone, by which Adam divides."""

    def with_adamw(self) -> "KnownBug":
        """The same for more steps of AdamW."""
        adamw = {"optimizer": {"name": "adamw", "lr": 3e-4}, "train__steps": ADAMW_STEPS}
        return replace(self, mathematics={**self.mathematics, **adamw})


BUGS = (
    KnownBug(
        name="pipeline-clipping",
        script=PipelineScript,
        mathematics={"train__grad_clip": 1.0},
        parallel={"pp": 2, "zero_stage": 0},
        config={"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0},
        is_hidden_by_adam=True,
    ),
    KnownBug(
        name="tensor-parallel-marks",
        script=TensorParallelScript,
        mathematics={"model": LLAMA, "train__grad_clip": 0.5},
        parallel={"tp": 2, "zero_stage": 1},
        config={"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5},
        is_hidden_by_adam=True,
    ),
    KnownBug(
        name="experts-clipping",
        script=NativeExpertsScript,
        mathematics={"model": MIXTRAL, "train__grad_clip": 0.5},
        parallel={"ep": 2, "zero_stage": 0},
        config={"zero_optimization": {"stage": 0}, "gradient_clipping": 0.5},
        is_hidden_by_adam=True,
    ),
    KnownBug(
        name="ulysses-zero-2",
        script=UlyssesScript,
        mathematics={"model": LLAMA},
        parallel={"ulysses": 2, "zero_stage": 2},
        config={"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0},
        is_hidden_by_adam=True,
    ),
    KnownBug(
        name="autotp-batch",
        script=AutoTensorParallelScript,
        mathematics={"model": LLAMA},
        parallel={"tp": 2, "zero_stage": 1},
        config={"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0},
    ),
    KnownBug(
        name="mean-of-means",
        script=DataParallelScript,
        mathematics={"data__packing": "padded"},
        parallel={"zero_stage": 1},
        micro_batch_size=2,
        config={"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0},
    ),
    KnownBug(
        name="mean-of-means-pipeline",
        script=PipelineScript,
        mathematics={"data__packing": "padded"},
        parallel={"pp": 2, "zero_stage": 1},
        micro_batch_size=2,
        config={"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0},
    ),
    KnownBug(
        name="empty-micro-batch-zero-0",
        script=partial(DataParallelScript, loss_fn=masked_mean),
        parallel={"zero_stage": 0},
        micro_batch_size=1,
        config={"zero_optimization": {"stage": 0}, "gradient_clipping": 0.0},
        batches=with_empty_sample,
    ),
    KnownBug(
        name="empty-micro-batch-zero-1",
        script=partial(DataParallelScript, loss_fn=masked_mean),
        parallel={"zero_stage": 1},
        micro_batch_size=1,
        config={"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0},
        batches=with_empty_sample,
    ),
    KnownBug(
        name="default-clipping",
        script=DataParallelScript,
        parallel={"zero_stage": 1},
        config={"zero_optimization": {"stage": 1}},
        repair={"config": {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}},
        is_hidden_by_adam=True,
    ),
    KnownBug(
        name="warmup",
        script=DataParallelScript,
        mathematics={"schedule": {"name": "constant_with_warmup", "warmup_steps": WARMUP_STEPS}},
        parallel={"zero_stage": 1},
        config={
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 0.0,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": WARMUP_STEPS}},
        },
        repair={
            "config": {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0},
            "lr_scheduler": warmup,
        },
    ),
)


class Runs:
    """Runs of known bugs, on ranks that `run_ranks` forks. `folder` takes the corpus and its tokens."""

    def __init__(self, folder: Path, run_ranks: Callable[..., list[Any]]) -> None:
        self._folder, self._run_ranks = folder, run_ranks
        self._references: dict[str, ParityRun] = {}

    def reference(self, bug: KnownBug) -> ParityRun:
        """One plain PyTorch process. Bugs with the same mathematics share it."""
        key = repr((bug.mathematics, bug.batches))
        if key not in self._references:
            samples = bug.mathematics.get("batch__global_batch_size", GLOBAL_BATCH)
            recipe = self._recipe(**bug.mathematics, train__engine="reference", batch__micro_batch_size=samples)
            self._references[key] = self._run(1, recipe, bug.batches(create_engine))
        return self._references[key]

    def plain(self, bug: KnownBug, *, repaired: bool = False) -> ParityRun:
        """The script, as a user has written it, or fixed."""
        options = {"config": bug.config} | (dict(bug.repair) if repaired else {})
        return self._run(bug.ranks, self._layout(bug), bug.batches(partial(bug.script, **options)))

    def toolkit(self, bug: KnownBug) -> ParityRun:
        """The toolkit's own engine in the same layout."""
        return self._run(bug.ranks, self._layout(bug), bug.batches(create_engine))

    def _layout(self, bug: KnownBug) -> Recipe:
        return self._recipe(**bug.mathematics, parallel=bug.parallel, batch__micro_batch_size=bug.micro_batch_size)

    def _run(self, ranks: int, recipe: Recipe, factory: Factory) -> ParityRun:
        trained: ParityRun = self._run_ranks(_train, ranks, recipe, factory)[0]
        return trained

    def _recipe(self, **changes: Any) -> Recipe:
        """A small recipe of five steps; SGD, because Adam hides a gradient's length."""
        sections: dict[str, Any] = {
            "model": GPT2,
            "data": {
                "source": str(self._corpus()),
                "tokenizer": "bpe-300",
                "seq_len": 32,
                "eval_fraction": 0.1,
                "workers": 1,
                "cache_dir": str(self._folder / "cache"),
            },
            "batch": {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 4},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "schedule": {"name": "constant"},
            "train": {"steps": 5, "seed": 1, "grad_clip": 0.0},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            sections[section] = {**sections[section], name: value} if name else value
        return Recipe.model_validate_json(json.dumps(sections))

    def _corpus(self) -> Path:
        """400 documents of 2 to 90 words: in padded samples, anything between a few targets and a full row."""
        path = self._folder / "documents.jsonl"
        if not path.exists():
            chance = random.Random(7)
            words = [f"{a}{b}" for a in ("la", "to", "mi", "ru", "ne") for b in ("ba", "di", "ko", "su", "ve")]
            lines = (" ".join(chance.choices(words, k=chance.choice((2, 5, 20, 90)))) for _ in range(400))
            path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        return path


def _train(recipe: Recipe, factory: Factory) -> ParityRun:
    # What PipelineModule prints about its layers is of no interest here.
    with redirect_stdout(io.StringIO()):
        return train_in_memory(recipe, engine_factory=factory)
