"""The Python API: what docs/python-api.md shows runs, and a callback sees what the metrics say."""

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

import toolkit
import toolkit.errors
from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
EVENTS = ("run_begin", "step_begin", "before_update", "after_update", "step_end", "evaluate", "checkpoint", "run_end")

MakeRecipe = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]


def run_script(folder: str, script: str) -> str:
    """Run a script of the page in `folder`; what it printed last."""
    os.chdir(folder)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    return output.getvalue().splitlines()[-1]


def test_the_first_script_of_the_page_trains(make_recipe: MakeRecipe, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(dump_recipe(make_recipe()))
    script = SCRIPTS[0].replace("recipes/demo.yaml", "small.yaml").replace("train.steps=200", "train.steps=12")
    assert len(script.strip().splitlines()) <= 20
    loss, path = ranks(run_script, 2, str(tmp_path), script, joined=False)[0].split()
    assert (tmp_path / path / "model" / "model.safetensors").exists()
    assert 0 < float(loss) < 7


class Recording(toolkit.Callback):
    """Every hook that is called, with the step at which it is."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        for event in EVENTS:
            setattr(self, f"on_{event}", lambda run, *_, event=event: self.calls.append((event, run.step)))


def hooks_and_accuracy(recipe: Recipe) -> tuple[list[tuple[str, int]], float, list[float]]:
    scope: dict[str, Any] = {}
    exec(SCRIPTS[1], scope)
    recording, accuracy = Recording(), scope["Accuracy"]()
    job = toolkit.Job.of(recipe, torch.distributed.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):
        run = toolkit.train(job, [recording, accuracy])
    return recording.calls, accuracy.accuracy, [metrics.loss for metrics in run.history]


def test_hooks_are_called_in_order_on_every_rank(make_recipe: MakeRecipe, ranks: Ranks, tmp_path: Path) -> None:
    recipe = make_recipe(
        train__steps=4, train__eval_every=2, checkpoint={"every": 3}, run_dir=str(tmp_path / "run"), parallel={"dp": 2}
    )
    results = ranks(hooks_and_accuracy, 2, recipe)
    assert results[0] == results[1]
    calls, accuracy, losses = results[0]
    assert len(losses) == 4
    assert 0 <= accuracy <= 1
    step = [("step_begin", 0), ("before_update", 0), ("after_update", 0)]
    expected = [("run_begin", 0)]
    for done in range(4):
        expected += [(event, done) for event, _ in step]
        expected += [("evaluate", done + 1)] * (done % 2)
        expected += [("checkpoint", done + 1)] * (done in (2, 3))
        expected += [("step_end", done + 1)]
    assert calls == [*expected, ("run_end", 4)]


def test_a_callback_may_end_the_run_with_a_checkpoint(make_recipe: MakeRecipe, ranks: Ranks, tmp_path: Path) -> None:
    recipe = make_recipe(run_dir=str(tmp_path / "run"))
    with pytest.raises(toolkit.errors.PreemptedError, match="after step 2 of 30"):
        ranks(stop_at_two, 2, recipe)
    assert (tmp_path / "run" / "step-00000002").is_dir()


class StopOnOneRank(toolkit.Callback):
    def on_step_begin(self, run: Any) -> None:
        if run.step == 1 and torch.distributed.get_rank() == 1:
            run.request_stop()


def stop_at_two(recipe: Recipe) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        toolkit.train(toolkit.Job.of(recipe, torch.distributed.get_world_size()), [StopOnOneRank()])


def test_a_job_for_another_number_of_ranks_is_refused(make_recipe: MakeRecipe, ranks: Ranks) -> None:
    with refused(toolkit.errors.RunError, "world_size", remedy="start 4 ranks"):
        ranks(train_for_four, 1, make_recipe())


def train_for_four(recipe: Recipe) -> None:
    toolkit.train(toolkit.Job.of(recipe, 4), in_memory=True)
