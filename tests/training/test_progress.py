"""The progress line, the metrics file and the plot."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from toolkit.report.images import plot_loss
from toolkit.step_metrics import StepMetrics
from toolkit.training.metrics import MetricsFile
from toolkit.training.progress import ProgressLine


def step(number: int, **changes: object) -> StepMetrics:
    facts = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.75, "tokens": 4000, "seconds": 2.0, "memory_bytes": 10}
    return StepMetrics(step=number, **(facts | changes))  # type: ignore[arg-type]


def shown(*steps: StepMetrics, every: int = 1, enabled: bool = True, mfu: float | None = None) -> list[str]:
    output = io.StringIO()
    progress = ProgressLine(4, every=every, enabled=enabled, console=Console(file=output, width=40))
    if mfu is not None:
        progress.mfu = lambda rate: mfu
    with progress:
        for metrics in steps:
            progress.step(metrics)
    return output.getvalue().splitlines()


def test_a_plain_line_has_everything_and_is_never_broken() -> None:
    assert shown(step(2)) == ["step 2/4  loss 2.5000  lr 1.00e-03  grad norm 0.750  2k tok/s  ETA 4s"]


def test_the_rank_that_holds_the_others_up_most_is_named() -> None:
    one = step(1, slow_ranks={"rank 3 (node2) forward": 1.82})
    two = step(2, slow_ranks={"rank 3 (node2) forward": 1.82, "rank 1 (node1) data": 4.0})
    lines = shown(one, two)
    assert "slow: rank 3 (node2) forward 1.8x" in lines[0]
    assert "slow: rank 1 (node1) data 4.0x and 1 more" in lines[1]


def test_what_an_objective_measures_is_shown_after_the_loss() -> None:
    rewards = {"rewards/chosen": 0.5, "rewards/rejected": 0.25, "rewards/margins": 0.25, "rewards/accuracies": 0.75}
    logps = {"logps/chosen": -12.345, "logps/rejected": -20.0}
    pairs, completions, one_label, taught, balanced = shown(
        step(1, objective=rewards | logps),
        step(1, objective=logps | {"rewards/margins": 0.25, "kl": 0.125}),
        step(1, objective={"logps/rejected": -20.0, "kl": 0.0}),
        step(1, objective={"token_loss": 2.0, "divergence": 1.5}),
        step(1, objective={"delta": -0.5}),
    )
    both = "logps chosen -12.35 rejected -20.00"
    assert pairs.split("  ")[1:5] == ["loss 2.5000", "margin 0.2500", "accuracy 75%", both]
    assert completions.split("  ")[1:5] == ["loss 2.5000", "margin 0.2500", "KL 0.1250", both]
    assert one_label.split("  ")[1:4] == ["loss 2.5000", "KL 0.0000", "logps rejected -20.00"]
    assert taught.split("  ")[1:3] == ["loss 2.5000", "KL 1.5000"]
    assert balanced.split("  ")[1:3] == ["loss 2.5000", "delta -0.5000"]


def test_mfu_is_shown_where_it_is_known() -> None:
    assert "MFU 43.2%" in shown(step(1), mfu=0.432)[0]


def test_plain_lines_come_every_so_many_steps_and_at_the_end() -> None:
    lines = shown(*(step(n) for n in range(1, 5)), every=3)
    assert [line.split()[1] for line in lines] == ["3/4", "4/4"]


def test_other_ranks_are_silent() -> None:
    assert shown(step(1), enabled=False) == []


def test_a_skipped_step_says_so() -> None:
    assert "skipped (fp16 overflow)" in shown(step(1, skipped=True))[0]


def test_a_line_that_stays_has_the_validation_loss_of_its_own_step_only() -> None:
    assert ["held-out 3.1000" in line for line in shown(step(1, eval_loss=3.1), step(2))] == [True, False]


def test_a_terminal_gets_one_line_that_moves() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=160)
    with ProgressLine(4, every=1, enabled=True, console=console) as progress:
        progress.step(step(4))
    assert "step 4/4" in output.getvalue()
    assert "loss 2.5000" in output.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_the_line_fits_the_terminal(width: int) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width)
    with ProgressLine(4, every=1, enabled=True, console=console) as progress:
        progress.mfu = lambda rate: 0.4
        measured = {
            "rewards/margins": 0.25,
            "rewards/accuracies": 0.75,
            "logps/chosen": -120.5,
            "logps/rejected": -99.5,
        }
        progress.step(step(4, eval_loss=3.0, objective=measured | {"kl": 0.5}))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert all(len(line.strip()) <= width for line in re.split(r"[\r\n]", plain))
    assert plain.rstrip().count("\n") <= 1
    assert "loss 2.5000" in plain


def test_metrics_survive_a_crash_of_the_writer(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(step(1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1  # before close
    file.close()


def test_what_is_not_finite_is_null_in_json() -> None:
    assert json.loads(step(1, grad_norm=float("inf")).to_json())["grad_norm"] is None


@pytest.mark.parametrize("count", [1, 2, 500])
def test_a_plot_is_a_png_of_its_size(tmp_path: Path, count: int) -> None:
    losses = [8 - i / count for i in range(count)]
    plot_loss(tmp_path / "loss.png", losses, title="t", held_out=[(1, 7.9)], unigram_entropy=6.0, entropy_rate=1.5)
    data = (tmp_path / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1600, 900)
