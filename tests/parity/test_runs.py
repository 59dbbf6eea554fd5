"""Comparison of finished runs, from their files."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from toolkit.errors import DataError
from toolkit.parity import Cause
from toolkit.parity.comparison import Comparison, StrategyResult
from toolkit.parity.finished_runs import compare_runs, read_runs

STEPS = 12
LOSSES = [5.0 - 0.1 * step for step in range(STEPS)]
RECIPE = """\
model: {{name_or_path: gpt2-tiny}}
data: {{seq_len: 64}}
batch: {{global_batch_size: 8, micro_batch_size: {micro}}}
precision: {precision}
optimizer: {{lr: 1e-3}}
train: {{steps: 12, seed: {seed}}}
"""


class Runs:
    """Writes runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(
        self,
        name: str,
        losses: Sequence[float] = LOSSES,
        *,
        norms: Sequence[float] | None = None,
        rates: Sequence[Any] | None = None,
        batches: Sequence[str] | None = None,
        precision: str | None = None,
        micro: int = 4,
        seed: int = 0,
    ) -> Path:
        path = self._folder / name
        path.mkdir()
        lines = []
        for step, loss in enumerate(losses):
            record: dict[str, Any] = {
                "step": step + 1,
                "loss": loss if math.isfinite(loss) else None,
                "grad_norm": 1.0 if norms is None else norms[step],
                "lr": 1e-3 if rates is None else rates[step],
            }
            lines.append(json.dumps(record | ({} if batches is None else {"batch": batches[step]})))
        (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        if precision is not None:
            (path / "recipe.yaml").write_text(RECIPE.format(precision=precision, micro=micro, seed=seed))
        return path


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def one(found: Comparison) -> StrategyResult:
    (entry,) = found.results
    return entry


def cause(entry: StrategyResult) -> Cause | None:
    return entry.diagnosis and entry.diagnosis.cause


def off(amount: float, *, after: int = 0) -> list[float]:
    return [loss * (1 + (amount if step >= after else 0)) for step, loss in enumerate(LOSSES)]


def test_equal_runs_are_bitwise(runs: Runs) -> None:
    entry = one(compare_runs([runs("a"), runs("b")]))
    assert entry.result is not None
    assert entry.result.agreement == "bitwise"


def test_a_difference_of_rounding_passes(runs: Runs) -> None:
    assert compare_runs([runs("a"), runs("b", off(1e-7))]).passed


def test_a_first_step_beyond_rounding_differs(runs: Runs) -> None:
    entry = one(compare_runs([runs("a"), runs("b", off(1e-3))]))
    assert (entry.outcome, cause(entry)) == ("differs", Cause.FORWARD)


def test_a_jump_differs(runs: Runs) -> None:
    entry = one(compare_runs([runs("a"), runs("b", off(1e-3, after=5))]))
    assert entry.result is not None
    assert (entry.result.curves.first_diverging_step, cause(entry)) == (6, Cause.OPTIMIZER)


def test_smooth_growth_from_rounding_passes(runs: Runs) -> None:
    grown = [loss * (1 + 1e-7 * 2**step) for step, loss in enumerate(LOSSES)]
    assert compare_runs([runs("a"), runs("b", grown)]).passed


def test_growth_beyond_a_percent_needs_a_rerun_that_shows_it(runs: Runs) -> None:
    grown = [loss * (1 + 1e-7 * 3**step) for step, loss in enumerate(LOSSES)]
    assert not compare_runs([runs("a"), runs("b", grown)]).passed


def test_growth_beyond_a_percent_cannot_be_told_from_rounding_unless_a_bound_is_given(runs: Runs) -> None:
    grown = [loss * (1 + 1e-7 * 3**step) for step, loss in enumerate(LOSSES)]
    first, other = runs("a"), runs("b", grown)
    assert one(compare_runs([first, other])).outcome == "cannot tell"
    for options in ({"tolerance": 1e-3}, {"reruns": [runs("c", off(1e-7))]}):
        assert one(compare_runs([first, other], **options)).outcome == "differs"  # type: ignore[arg-type]


def test_a_jump_in_the_norm_alone_differs(runs: Runs) -> None:
    norms = [1.0] * 6 + [1.5] * 6
    entry = one(compare_runs([runs("a"), runs("b", norms=norms)]))
    assert cause(entry) == Cause.OPTIMIZER


def test_another_norm_from_the_first_step_on_is_no_chaos(runs: Runs) -> None:
    assert cause(one(compare_runs([runs("a"), runs("b", norms=[2.0] * STEPS)]))) == Cause.BACKWARD


def test_another_schedule_differs_though_the_curves_agree(runs: Runs) -> None:
    rates = [1e-3] * 3 + [9e-4] * 9
    entry = one(compare_runs([runs("a"), runs("b", rates=rates)]))
    assert (entry.outcome, cause(entry)) == ("differs", Cause.SCHEDULE)


@pytest.mark.parametrize("rates", [[None] * STEPS, ["x"] * STEPS])
def test_unknown_learning_rates_are_not_compared(runs: Runs, rates: list[Any]) -> None:
    assert compare_runs([runs("a"), runs("b", rates=rates)]).passed


def test_other_samples_differ_though_the_curves_agree(runs: Runs) -> None:
    own = [f"{step:016x}" for step in range(STEPS)]
    entry = one(compare_runs([runs("a", batches=own), runs("b", batches=[*own[:4], *own[5:], own[4]])]))
    assert (entry.outcome, cause(entry)) == ("differs", Cause.DATA_ORDER)


def test_a_run_without_fingerprints_is_compared_by_the_rest(runs: Runs) -> None:
    assert compare_runs([runs("a", batches=["a"] * STEPS), runs("b")]).passed


def test_a_run_that_ends_early_differs_there(runs: Runs) -> None:
    entry = one(compare_runs([runs("a"), runs("b", LOSSES[:7])]))
    assert entry.diagnosis is not None
    assert "b ends at step 7" in entry.diagnosis.sentence


def test_a_loss_that_is_not_a_number_differs(runs: Runs) -> None:
    losses = [*LOSSES[:5], math.nan, *LOSSES[6:]]
    assert not compare_runs([runs("a"), runs("b", losses)]).passed


def test_every_run_is_compared_with_the_first(runs: Runs) -> None:
    found = compare_runs([runs("a"), runs("b"), runs("c", off(1e-3))])
    assert [entry.outcome for entry in found.results] == ["same", "differs"]


def test_a_metrics_file_is_a_run(runs: Runs) -> None:
    assert compare_runs([runs("a") / "metrics.jsonl", runs("b")]).passed


class TestLowPrecision:
    def test_equal_bits_need_no_rerun(self, runs: Runs) -> None:
        assert compare_runs([runs("a", precision="bf16"), runs("b", precision="bf16")]).passed

    def test_without_a_rerun_there_is_no_bound(self, runs: Runs) -> None:
        with refused(DataError, "precision") as found:
            compare_runs([runs("a", precision="bf16"), runs("b", off(1e-3), precision="bf16")])
        assert found[0].settings == (("precision", "bf16"),)
        assert ["--rerun RUN" in found[0].remedy[0], "--tolerance" in found[0].remedy[1]] == [True, True]

    def test_one_run_of_low_precision_is_enough_for_that(self, runs: Runs) -> None:
        with refused(DataError, "precision"):
            compare_runs([runs("a", precision="fp32"), runs("b", off(1e-3), precision="fp16")])

    def test_a_rerun_gives_a_bound(self, runs: Runs) -> None:
        paths = [runs("a", precision="bf16"), runs("b", off(1e-3), precision="bf16")]
        assert compare_runs(paths, reruns=[runs("c", off(-8e-4), precision="bf16", micro=2)]).passed

    def test_its_bound_is_not_wider_than_the_reruns_say(self, runs: Runs) -> None:
        paths = [runs("a", precision="bf16"), runs("b", off(1e-2), precision="bf16")]
        assert not compare_runs(paths, reruns=[runs("c", off(-8e-4), precision="bf16", micro=2)]).passed


class TestAGivenTolerance:
    def test_what_is_within_it_passes(self, runs: Runs) -> None:
        assert compare_runs([runs("a"), runs("b", off(1e-3, after=5))], tolerance=1e-2).passed

    def test_what_is_beyond_it_differs(self, runs: Runs) -> None:
        assert not compare_runs([runs("a"), runs("b", off(1e-3))], tolerance=1e-4).passed

    def test_zero_asks_for_equal_bits(self, runs: Runs) -> None:
        path = runs("a")
        assert compare_runs([path, runs("b")], tolerance=0.0).passed
        assert not compare_runs([path, runs("c", off(1e-15))], tolerance=0.0).passed


def test_a_rerun_bounds_fp32_from_its_steps(runs: Runs) -> None:
    paths = [runs("a"), runs("b", off(1e-3, after=5))]
    assert compare_runs(paths, reruns=[runs("c", off(-5e-4, after=4))]).passed


def test_differences_of_recipes_are_noted(runs: Runs) -> None:
    found = compare_runs([runs("a", precision="fp32"), runs("b", precision="fp32", seed=1)])
    assert any("train.seed=1 (was 0)" in note for note in found.notes)


def test_an_unreadable_recipe_of_another_version_is_ignored(runs: Runs) -> None:
    path = runs("a")
    (path / "recipe.yaml").write_text("of: another version\n")
    assert read_runs([path])[0].recipe is None


class TestInvalidRuns:
    def refused(self, path: Path) -> str:
        with pytest.raises(DataError) as raised:
            read_runs([path])
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def test_a_path_that_is_not_there(self, tmp_path: Path) -> None:
        assert "gone: cannot be read (No such file or directory)" in self.refused(tmp_path / "gone")

    def test_a_directory_without_metrics(self, tmp_path: Path) -> None:
        assert f"{tmp_path}: this directory has nothing that is a log." in self.refused(tmp_path)

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text("")
        assert "it has no step. Give a run that has trained." in self.refused(tmp_path)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
        assert "cannot be read (not text)" in self.refused(tmp_path)

    @pytest.mark.parametrize(
        "line", ['{"loss": 1.0, "grad_n', "", "[1]", '{"loss": 1.0}', '{"loss": "x", "grad_norm": 1}']
    )
    def test_a_damaged_line_is_named(self, runs: Runs, line: str) -> None:
        file = runs("a") / "metrics.jsonl"
        file.write_text(file.read_text() + line + "\n")
        assert f"metrics.jsonl:{STEPS + 1}: not a step" in self.refused(file)
