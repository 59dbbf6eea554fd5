"""Training on text of known entropy ends at the entropy: above it something is not learned, below it not counted."""

import contextlib
import io
import math
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe
from toolkit.data.documents.markov import END, LETTERS, MarkovSource
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines import full_forward
from toolkit.parallel.loss import IGNORE
from toolkit.parity.run.train_in_memory import train_in_memory

SCRIPT = Path(__file__).parents[2] / "recipes" / "train.py"
STEPS, GLOBAL_BATCH, SEQ_LEN = 200, 16, 64
LAST = 50
"""Steps whose losses are averaged. All samples of the run are new to the model: less than one epoch."""
CLOSE = 1.03
DEVIATION = 1.32
"""Of -ln P of one token, in nats."""
NEVER_BETTER = 1e-3
"""Nats by which chance may lift a model over the chain itself on the same 100,000 tokens. Two models that differ by
D nats on average scatter around that by about sqrt(2 D / n): 0.0006 for the D = 0.02 that is reached here."""

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def markov(make_recipe: MakeRecipe) -> Callable[[str], Recipe]:
    """A GPT-2 of one layer, for an embedding of letters and little more."""

    def make(packing: str) -> Recipe:
        small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": SEQ_LEN, "vocab_size": 257}
        return make_recipe(
            model={"name_or_path": "gpt2-tiny", "overrides": small | {"tie_word_embeddings": False}},
            data__source="markov",
            data__tokenizer="bpe-257",
            data__seq_len=SEQ_LEN,
            data__packing=packing,
            batch={"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH // 2},
            optimizer={"name": "adamw", "lr": 1e-2, "betas": [0.9, 0.95]},
            train={"steps": STEPS, "engine": "reference", "eval_every": STEPS, "eval_samples": 10_000},
        )

    return make


def loss_of_the_chain(recipe: Recipe) -> tuple[float, int]:
    """Nats per token of the held-out targets under the true probabilities, and how many targets there are."""
    corpus = prepare(recipe.data, progress=False)
    packing = recipe.data.packing
    samples = Samples(corpus, seq_len=SEQ_LEN, packing=packing, split="eval", seed=0, global_batch_size=1)
    rows = [samples.tokens(index) for index in range(len(samples))]
    inputs, labels = (np.concatenate(part) for part in zip(*rows, strict=True))
    known = labels != IGNORE
    state = np.full(corpus.tokenizer_vocab_size, -1)
    state[corpus.tokenizer().convert_tokens_to_ids([*LETTERS])] = range(END)
    state[corpus.eos_id] = END
    chances = MarkovSource().transitions()[state[inputs[known]], state[labels[known]]]
    return float(-np.log(chances).mean()), int(known.sum())


def mistakes(recipe: Recipe, ranks: Callable[..., list[Any]]) -> set[str]:
    """What is wrong with the losses of a run, of: training above, training below, held-out above, held-out below."""
    floor = prepare(recipe.data, progress=False).loss_floor(recipe.data)
    assert floor is not None
    best, targets = loss_of_the_chain(recipe)
    assert best == pytest.approx(floor, abs=4 * DEVIATION / math.sqrt(targets))
    run = ranks(train_in_memory, 1, recipe)[0]
    trained = float(np.mean(run.curve.losses[-LAST:]))
    # Half of a padded row at the least are targets.
    chance = 4 * DEVIATION / math.sqrt(LAST * GLOBAL_BATCH * SEQ_LEN / 2)
    held = {
        "training above": trained <= CLOSE * floor + chance,
        "training below": trained >= floor - chance,
        "held-out above": run.eval_loss <= CLOSE * best,
        "held-out below": run.eval_loss >= best - NEVER_BETTER,
    }
    return {name for name, holds in held.items() if not holds}


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_training_approaches_the_entropy_rate_and_never_passes_it(
    markov: Callable[[str], Recipe], ranks: Callable[..., list[Any]], packing: str
) -> None:
    assert mistakes(markov(packing), ranks) == set()


def test_a_mean_over_padded_positions_shows(
    markov: Callable[[str], Recipe], ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatchLoader, "target_tokens", lambda loader, step: GLOBAL_BATCH * SEQ_LEN)
    monkeypatch.setattr(full_forward, "IGNORE", -1)  # no label equals it: validation counts every position
    assert mistakes(markov("padded"), ranks) == {"training below", "held-out below"}


def test_a_loss_reported_twice_shows(
    markov: Callable[[str], Recipe], ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = full_forward.FullForwardEngine._losses
    monkeypatch.setattr(full_forward.FullForwardEngine, "_losses", lambda *arguments: (2 * losses(*arguments)[0], None))
    assert mistakes(markov("packed"), ranks) == {"training above", "held-out above"}


def train_here(folder: str, argv: list[str]) -> str:
    os.chdir(folder)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(SCRIPT))["main"](argv)
    return output.getvalue()


@pytest.mark.parametrize(("packing", "shown"), [("packed", ["1.4869"]), ("padded", ["1.4880"])])
def test_a_run_ends_by_saying_what_the_floor_is(
    markov: Callable[[str], Recipe], ranks: Callable[..., list[Any]], tmp_path: Path, packing: str, shown: list[str]
) -> None:
    (tmp_path / "small.yaml").write_text(dump_recipe(markov(packing)))
    changes = ["train.steps=1", "schedule.warmup_steps=0", "train.eval_every=0", "train.eval_samples=64"]
    argv = ["--config", "small.yaml", "run_dir=here", *changes]
    output = ranks(train_here, 1, str(tmp_path), argv, joined=False)[0]
    assert re.findall(r"^ *floor +([\d.]+), the entropy rate", output, re.MULTILINE) == shown
