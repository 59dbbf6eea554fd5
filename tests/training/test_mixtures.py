"""Runs over a mixture: the same samples and the same losses of every source, whatever the layout and the restarts."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from interrupted_runs import timeless
from small_chats import write_chats, write_tokenizer

from toolkit.checkpoint.trainer_state import changed_fields
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.corpora import prepare_all
from toolkit.engines.factory import create_engine
from toolkit.parallel.loss import IGNORE
from toolkit.step_metrics import StepMetrics
from toolkit.training.train import train as train_job

Ranks = Callable[..., list[Any]]
LARGEST_DIFFERENCE = 1e-6
"""Of a loss, over the loss of one process."""
STEPS = 5
MODEL = {
    "name_or_path": "llama-tiny",
    "overrides": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 321,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "z0": {"dp": 2, "zero_stage": 0},
    "z1": {"dp": 2, "zero_stage": 1},
    "z2": {"dp": 2, "zero_stage": 2},
    "z3": {"dp": 2, "zero_stage": 3},
    "tp2-z1": {"tp": 2, "zero_stage": 1},
    "tp2-pp2": {"tp": 2, "pp": 2, "zero_stage": 1},
    "pp2-dp2": {"dp": 2, "pp": 2, "zero_stage": 0},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    """Two texts of unequal sizes and chats, of which only some tokens are targets, with a set for validation."""
    folder = tmp_path_factory.mktemp("mixture")
    chats = write_chats(folder / "chats.jsonl", count=60)
    notes = folder / "notes.txt"
    notes.write_text("what is the sum of these numbers\n" * 120)
    return {
        "sources": [
            {"path": str(corpus), "name": "words", "weight": 3},
            {"path": str(notes), "name": "notes", "weight": 1},
            {"path": str(chats), "name": "chats", "format": "chat", "weight": 2},
        ],
        "validation": [
            {"path": str(notes), "name": "notes"},
            {"path": str(chats), "name": "chats", "format": "chat"},
        ],
        "tokenizer": str(write_tokenizer(folder / "tokenizer")),
        "seq_len": 64,
        "workers": 1,
        "cache_dir": str(folder / "cache"),
    }


@pytest.fixture(scope="module")
def mixed(make_recipe: Callable[..., Recipe], data: dict[str, Any]) -> Callable[..., Recipe]:
    """A small recipe of them."""

    def make(**changes: Any) -> Recipe:
        fields = {
            "model": MODEL,
            "data": {**data},
            "batch": {"global_batch_size": 12, "micro_batch_size": 2},
            "train__steps": STEPS,
            "train__eval_every": STEPS,
            "train__eval_samples": 7,
        }
        return make_recipe(**{**fields, **changes})

    return make


def trained(recipe: Recipe) -> list[StepMetrics]:
    """The metrics of a run on these ranks."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return train_job(Job.of(recipe, world_size), in_memory=True).history


class ByHand(NamedTuple):
    """What a plain forward pass says of the first step: losses and targets of each source."""

    loss: dict[str, float]
    tokens: dict[str, int]


def by_hand(recipe: Recipe) -> ByHand:
    job, corpora = Job.of(recipe, 1), prepare_all(recipe.data, progress=False)
    loader = MicroBatchLoader.open(job, corpora, rank=0)
    model = create_engine(job, torch.device("cpu"), eos_id=corpora.eos_id).model.eval()
    sums = dict.fromkeys(recipe.data.labels, 0.0)
    tokens = dict.fromkeys(recipe.data.labels, 0)
    with torch.no_grad():
        for sample in loader.first_batch():
            assert sample.sources is not None
            name = recipe.data.labels[int(sample.sources)]
            scores = model(**sample.inputs(), use_cache=False).logits[0].log_softmax(-1)
            for place, label in enumerate(sample.labels[0].tolist()):
                if label != IGNORE:
                    sums[name] -= float(scores[place, label])
                    tokens[name] += 1
    return ByHand({name: sums[name] / tokens[name] for name in sums}, tokens)


def assert_same_losses(run: list[StepMetrics], baseline: list[StepMetrics]) -> None:
    assert [step.batch for step in run] == [step.batch for step in baseline]
    assert [step.source_tokens for step in run] == [step.source_tokens for step in baseline]
    for one, other in zip(run, baseline, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=LARGEST_DIFFERENCE)
        assert one.source_loss == pytest.approx(other.source_loss, rel=LARGEST_DIFFERENCE)
    assert run[-1].eval_loss == pytest.approx(baseline[-1].eval_loss, rel=LARGEST_DIFFERENCE)
    assert run[-1].eval_losses == pytest.approx(baseline[-1].eval_losses, rel=LARGEST_DIFFERENCE)


def check(mixed: Callable[..., Recipe], ranks: Ranks, **changes: Any) -> list[StepMetrics]:
    section = changes.get("parallel", {})
    size = section.get("dp", 1) * section.get("tp", 1) * section.get("pp", 1) * section.get("ulysses", 1)
    alone = {key: value for key, value in changes.items() if key not in ("parallel", "train__engine")}
    baseline = ranks(trained, 1, mixed(**alone, train__engine="reference"))[0]
    run: list[StepMetrics] = ranks(trained, size, mixed(**changes))[0]
    assert_same_losses(run, baseline)
    return run


@pytest.mark.parametrize(
    "layout",
    [name if name in ("z3", "tp2-pp2") else pytest.param(name, marks=pytest.mark.whole) for name in LAYOUTS],
)
def test_a_mixture_of_texts_and_chats_trains_what_one_process_trains(
    mixed: Callable[..., Recipe], ranks: Ranks, layout: str
) -> None:
    run = check(mixed, ranks, parallel=LAYOUTS[layout])
    expected = ranks(by_hand, 1, mixed(train__engine="reference"))[0]
    assert run[0].source_loss == pytest.approx(expected.loss, rel=LARGEST_DIFFERENCE)
    assert run[0].source_tokens == expected.tokens
    total = sum(expected.loss[name] * expected.tokens[name] for name in expected.loss)
    assert run[0].loss == pytest.approx(total / sum(expected.tokens.values()), rel=LARGEST_DIFFERENCE)


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "ulysses"])
def test_mixtures_train_the_same_with_every_engine(mixed: Callable[..., Recipe], ranks: Ranks, engine: str) -> None:
    choice = {"parallel": {"ulysses": 2, "zero_stage": 2}} if engine == "ulysses" else {"train__engine": engine}
    check(mixed, ranks, **{"parallel": {"dp": 2}} | choice)


EPOCHS = {"weight": None, "epochs": 2.0}
RESUMED = ["z1", "tp2-pp2", "z3", "z0", "tp2-z1", "pp2-dp2", "z2"]


def interrupted(train: Callable[..., str], tmp_path: Path, data: dict[str, Any], *, steps: int, times: int) -> None:
    changes: dict[str, Any] = {
        "model": MODEL,
        "data": {name: value for name, value in data.items() if name != "validation"} | {"eval_fraction": 0.0},
        "batch": {"global_batch_size": 12, "micro_batch_size": 2},
        "schedule": {"name": "constant"},
    }
    train("run_dir=whole", f"train.steps={steps}", **changes, parallel={"zero_stage": 0})
    rng = random.Random(times)
    stops = sorted(rng.sample(range(1, steps), times))
    before = ""
    for number, stop in enumerate([*stops, steps]):
        layout = LAYOUTS[RESUMED[number % len(RESUMED)]]
        size = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
        resume = ("--resume", before) if before else ()
        until = (f"train.steps={stop}", "checkpoint.every=1")
        train(f"run_dir=part{number}", *until, *resume, **changes, parallel=layout, world_size=size)
        before = f"part{number}/step-{stop:08d}"
    read = [step for number in range(times + 1) for step in timeless(tmp_path / f"part{number}")]
    whole = timeless(tmp_path / "whole")
    assert [step["step"] for step in read] == [*range(1, steps + 1)]
    for field in ("batch", "source_tokens"):
        assert [step[field] for step in read] == [step[field] for step in whole]
    assert [step["loss"] for step in read] == pytest.approx([step["loss"] for step in whole], rel=LARGEST_DIFFERENCE)
    assert len({json.dumps(step["source_tokens"]) for step in whole}) > 1


def test_a_run_interrupted_and_resumed_on_another_layout_reads_the_same_samples(
    train: Callable[..., str], tmp_path: Path, data: dict[str, Any]
) -> None:
    interrupted(train, tmp_path, data, steps=4, times=1)


@pytest.mark.whole
def test_a_run_interrupted_at_ten_random_steps_and_resumed_on_other_layouts_reads_the_same_samples(
    train: Callable[..., str], tmp_path: Path, data: dict[str, Any]
) -> None:
    interrupted(train, tmp_path, data, steps=30, times=10)


def fields_that_differ(make_recipe: Callable[..., Recipe], before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What keeps a run from being resumed."""

    def recipe(source: dict[str, Any], steps: int, **fields: Any) -> Recipe:
        sources = [{"path": "a.txt", "weight": 1} | source, {"path": "b.txt", "weight": 2}]
        return make_recipe(data={"seq_len": 8, "sources": sources} | fields, train__steps=steps)

    return [field for field, _, _ in changed_fields(recipe(**after), recipe(**before).model_dump(mode="json"))]


@pytest.mark.parametrize(
    ("before", "after", "fields"),
    [
        ({}, {"source": {"weight": 3}}, ["data.sources[0].weight"]),
        ({}, {"source": {"path": "c.txt"}}, ["data.sources[0].path"]),
        ({}, {"source": {"name": "other"}}, []),
        ({}, {"validation": [{"path": "c.txt"}]}, []),
        ({}, {"steps": 7}, []),
        ({"source": EPOCHS}, {"source": EPOCHS, "steps": 7}, ["train.steps"]),
    ],
    ids=str,
)
def test_a_run_resumes_with_the_same_mixture_only(
    make_recipe: Callable[..., Recipe], before: dict[str, Any], after: dict[str, Any], fields: list[str]
) -> None:
    defaults: dict[str, Any] = {"source": {}, "steps": 5}
    assert fields_that_differ(make_recipe, defaults | before, defaults | after) == fields
