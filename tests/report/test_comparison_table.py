"""The table of a comparison in terminals of any width: names and numbers stay whole."""

import pytest
from synthetic_run import baseline, with_losses

from toolkit.parity import Bounds, ParityResult
from toolkit.parity.comparison import Baseline, Comparison, StrategyResult
from toolkit.report.comparison_table import print_comparison

LONG = "dp2-tp2-pp2-z1-sp-recompute-m2"


def lines_of(width: int, *names: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    first = baseline()
    wrong = with_losses(first, lambda step, loss: loss * (1.01 if step > 11 else 1))
    results = [StrategyResult(name=name, result=ParityResult.of(wrong, first)) for name in names]
    comparison = Comparison(title="t", baselines=[Baseline(run=first, bounds=Bounds.fixed())], results=results)
    print_comparison(comparison, seconds=1)
    printed = capsys.readouterr().out.splitlines()
    end = next(number for number, line in enumerate(printed) if line.startswith("allowed"))
    return printed[:end]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_names_and_numbers_are_whole(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("z1", "dp2-tp2-z3-sp-m2", "dp2-tp2-pp2-z1-sp")
    lines = lines_of(width, *names, capsys=capsys, monkeypatch=monkeypatch)
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines]
    for name in names:
        (row,) = (row for row in rows if row[:1] == [name])
        assert row[1] == "1.0e-02"
    assert {"strategy", "loss", "norm", "weights", "gradient", "agrees", "result"} <= {w for row in rows for w in row}


def test_a_name_without_room_is_broken_before_a_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(80, LONG, capsys=capsys, monkeypatch=monkeypatch)
    words = [line.split()[0] for line in lines if line.startswith((" dp2", " -"))]
    assert "".join(words) == LONG
    assert all(set(word.strip("-").split("-")) <= set(LONG.split("-")) for word in words)
