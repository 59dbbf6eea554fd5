"""A run that DeepSpeed saved in its own format resumes here bit for bit."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.checkpoint.select import summarize_checkpoints
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.convert.import_run import import_run
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.factory import create_engine
from toolkit.engines.optimizer import learning_rate
from toolkit.errors import CheckpointError
from toolkit.training.preflight import check_model, deepspeed_config

Train = Callable[..., str]
SAVED_STEP, STEPS = 4, 7
CHANGES: dict[str, Any] = {"train__steps": STEPS, "data__packing": "padded", "overrides__vocab_size": 321}


def save_in_deepspeeds_format(recipe: Recipe, folder: str) -> None:
    """SAVED_STEP steps of the recipe, then DeepSpeed's own save_checkpoint."""
    cpu = torch.device("cpu")
    rank, job = dist.get_rank(), Job.of(recipe, dist.get_world_size())
    corpus = prepare(recipe.data, progress=False)
    config = deepspeed_config(job, check_model(recipe, cpu), cpu)
    engine = create_engine(job, cpu, config, eos_id=corpus.eos_id)
    loader, rate = MicroBatchLoader.open(job, corpus, rank=rank), learning_rate(recipe)
    with loader.prefetch() as ahead:
        for step in range(SAVED_STEP):
            micro_batches, tokens = loader.micro_batches(step, ahead), loader.target_tokens(step)
            engine.train_step(micro_batches, target_tokens=tokens, learning_rate=rate(step))
    engine.engine.save_checkpoint(folder)  # type: ignore[attr-defined]


def timeless(run: Path, *, after: int = 0) -> list[dict[str, Any]]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    hidden = ("seconds", "memory_bytes", "slow_ranks")
    return [{k: v for k, v in step.items() if k not in hidden} for step in steps if step["step"] > after]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_imported_run_resumes_bit_for_bit(
    train: Train,
    make_recipe: Callable[..., Recipe],
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    stage: int,
    precision: str,
) -> None:
    changes = CHANGES | {"parallel": {"zero_stage": stage}, "precision": precision}
    recipe = make_recipe(**changes)
    train("run_dir=uninterrupted", world_size=2, **changes)
    ranks(save_in_deepspeeds_format, 2, recipe, str(tmp_path / "theirs"))
    imported = import_run(tmp_path / "theirs", tmp_path / "ours", recipe)
    assert imported.notices[0].startswith(f"the data of the recipe continues at step {SAVED_STEP}")
    (one,) = summarize_checkpoints(tmp_path / "ours", hashes=True)
    assert (one.step, one.problems, one.state["updates"]) == (SAVED_STEP, (), SAVED_STEP)
    # `auto` finds the imported checkpoint in run_dir.
    resumed = ("--resume", "ours") if precision == "bf16" else ("run_dir=ours", "--resume", "auto")
    output = train(*resumed, world_size=2, **changes)
    assert f"step {SAVED_STEP}, same layout" in output
    assert timeless(tmp_path / "ours") == timeless(tmp_path / "uninterrupted", after=SAVED_STEP)


@pytest.fixture
def theirs(make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], tmp_path: Path) -> Path:
    ranks(save_in_deepspeeds_format, 1, make_recipe(**CHANGES), str(tmp_path / "theirs"))
    return tmp_path / "theirs"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides__n_embd": 32}, r"transformer\.wte\.weight is \[321, 48\] there, and \[321, 32\] by its config"),
        ({"overrides__n_layer": 3}, r"it has no transformer\.h\.2\."),
        (
            {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
            r"it has no momentum_buffer, and optimizer\.name=sgd",
        ),
        ({"train__steps": SAVED_STEP}, r"^train\.steps="),
    ],
)
def test_a_recipe_that_does_not_fit_is_rejected_before_anything_is_written(
    make_recipe: Callable[..., Recipe], theirs: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_run(theirs, tmp_path / "ours", make_recipe(**(CHANGES | changes)))
    assert sorted(os.listdir(tmp_path)) == ["theirs"]
