"""The comparison of curves."""

import math
from pathlib import Path

import numpy as np
import pytest

from toolkit.errors import DataError
from toolkit.parity import LossCurve, Tolerance, compare_curves
from toolkit.parity.finished_runs import read_runs
from toolkit.parity.parity_run import whole_difference


def curve(*losses: float, norms: tuple[float, ...] | None = None, label: str = "x") -> LossCurve:
    return LossCurve(label=label, losses=losses, grad_norms=norms or tuple(1.0 for _ in losses))


def test_equal_curves_are_the_same() -> None:
    report = compare_curves(curve(2.0, 1.0), curve(2.0, 1.0), Tolerance.fp32())
    assert report.passed
    assert report.max_loss_difference == 0.0


def test_the_first_diverging_step_counts_from_one() -> None:
    report = compare_curves(curve(2.0, 1.0, 0.5), curve(2.0, 1.1, 0.5), Tolerance.fp32())
    assert report.first_diverging_step == 2


def test_a_difference_in_the_norm_alone_counts() -> None:
    report = compare_curves(curve(2.0, norms=(1.0,)), curve(2.0, norms=(1.1,)), Tolerance.fp32())
    assert report.first_diverging_step == 1


def test_differences_are_relative() -> None:
    report = compare_curves(curve(100.0), curve(110.0), Tolerance.fp32())
    assert report.max_loss_difference == pytest.approx(1 / 11)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_the_same(value: float) -> None:
    assert not compare_curves(curve(value), curve(value), Tolerance.fp32()).passed


def test_a_shorter_curve_differs_where_it_ends() -> None:
    assert compare_curves(curve(2.0), curve(2.0, 1.0), Tolerance.fp32()).first_diverging_step == 2


def test_the_report_says_what_and_where() -> None:
    text = str(compare_curves(curve(2.0, 1.0, label="z3"), curve(2.0, 1.1, label="reference"), Tolerance.fp32()))
    assert "z3 against reference, 2 steps: differs from step 2 on" in text


def test_an_envelope_is_twice_the_spread_and_never_shrinks() -> None:
    envelope = Tolerance.envelope([curve(1.0, 1.0, 1.0), curve(1.0, 1.01, 1.0)])
    assert envelope.loss == (0.0, pytest.approx(0.02, rel=0.02), pytest.approx(0.02, rel=0.02))


def test_the_last_bound_holds_for_later_steps() -> None:
    assert Tolerance(loss=(0.1, 0.2), grad_norm=(0.3,), source="").at(7) == (0.2, 0.3)


def test_a_curve_is_read_from_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5, "grad_norm": 1.5}\n{"step": 2, "loss": 2.0, "grad_norm": null}\n')
    read = read_runs([path])[0].run.curve
    assert read.losses == (2.5, 2.0)
    assert read.grad_norms[0] == 1.5
    assert math.isnan(read.grad_norms[1])


@pytest.mark.parametrize("line", ["not json", "[]", '{"loss": 1.0}', '{"loss": "a", "grad_norm": 1}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5, "grad_norm": 1.5}\n' + line + "\n")
    with pytest.raises(DataError, match=r"metrics.jsonl:2: not a step"):
        read_runs([path])


def test_missing_and_misshapen_parameters_are_infinitely_different() -> None:
    found = {"a": np.zeros(3), "extra": np.zeros(1)}
    wanted = {"a": np.zeros(2), "b": np.zeros(2)}
    assert whole_difference(found, wanted) == math.inf


def test_the_whole_difference_weighs_tensors_by_their_size() -> None:
    found = {"a": np.array([3.0]), "b": np.array([0.0, 4.0])}
    wanted = {"a": np.array([3.0]), "b": np.array([0.0, 4.5])}
    assert whole_difference(found, wanted) == pytest.approx(0.5 / math.sqrt(9 + 4.5**2))
