"""loss.png: the loss of every step, its running mean, the validation loss, and between which entropies they lie."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_INK, _FAINT, _ACCENT, _HELD_OUT = "#1f2933", "#c5ccd3", "#2563eb", "#d97706"


def plot_loss(
    path: Path,
    losses: Sequence[float],
    *,
    title: str,
    held_out: Sequence[tuple[int, float]] = (),
    unigram_entropy: float | None = None,
    entropy_rate: float | None = None,
) -> None:
    """Write a PNG of 1600 x 900 pixels. `losses` are nats per token of steps 1, 2, …; `held_out` (step, loss)."""
    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    window = max(1, len(losses) // 30)
    if window > 1:
        axes.plot(steps, losses, color=_FAINT, linewidth=1, label="loss of a step")
        axes.plot(
            steps, _running_mean(losses, window), color=_ACCENT, linewidth=2, label=f"mean of the last {window} steps"
        )
    else:
        axes.plot(steps, losses, color=_ACCENT, linewidth=2, marker="." if len(losses) < 20 else None, label="loss")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color=_HELD_OUT, marker="o", markersize=4, linewidth=1.5, label="held out"
        )
    for label, nats, dashes in (("unigram entropy", unigram_entropy, (4, 3)), ("entropy rate", entropy_rate, (1, 2))):
        if nats is not None:
            axes.axhline(nats, color=_INK, linewidth=1, linestyle=(0, dashes), label=label)
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(1, max(2, len(losses)))
    axes.grid(axis="y", color="#eceff2", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    means = []
    for i in range(len(values)):
        part = values[max(0, i + 1 - window) : i + 1]
        means.append(sum(part) / len(part))
    return means
