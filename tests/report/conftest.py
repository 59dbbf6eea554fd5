"""A comparison to vary, and a browser if one is installed."""

import math
import random
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Comparison = dict[str, Any]
PARTS = ("ln_1.weight", "attn.c_attn.weight", "attn.c_proj.bias", "mlp.c_fc.weight")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def make_comparison() -> Callable[..., Comparison]:
    """`same` strategies that agree, one that differs, one that failed, of `layers` layers over `steps` steps."""

    def make(
        *, same: int = 6, differs: bool = True, failed: bool = True, layers: int = 4, steps: int = 30
    ) -> Comparison:
        chance = random.Random(1)
        names = ["transformer.wte.weight", *(f"transformer.h.{i}.{part}" for i in range(layers) for part in PARTS)]
        names.append("transformer.ln_f.weight")
        losses = [8.0 - 3 * (1 - math.exp(-i / 10)) for i in range(steps)]
        norms = [2 - i / steps for i in range(steps)]

        def noisy(values: list[float], scale: float) -> list[float]:
            return [value * (1 + chance.gauss(0, scale)) for value in values]

        def rows(scale: float) -> list[dict[str, Any]]:
            sizes = [abs(chance.gauss(0, scale)) for _ in names]
            return [
                {"name": n, "ratio": 1 + d, "cosine": 1 - d, "difference": d} for n, d in zip(names, sizes, strict=True)
            ]

        def strategy(label: str, scale: float, **changes: Any) -> dict[str, Any]:
            return {
                "label": label,
                "layout": label,
                "baseline": "reference",
                "result": "same",
                "agreement": "curve",
                "cause": "",
                "sentence": "",
                "evidence": "",
                "error": "",
                "losses": noisy(losses, scale),
                "grad_norms": noisy(norms, scale),
                "loss_difference": 2.5 * scale,
                "norm_difference": 2.6 * scale,
                "parameter_difference": 2.7 * scale,
                "first_diverging_step": None,
                "tolerance": {
                    "loss": [1e-6] * steps,
                    "grad_norm": [2e-6] * steps,
                    "parameters": 3e-6,
                    "gradient": 3e-6,
                    "source": "4 x the spread of 3 reruns",
                },
                "gradients": rows(scale),
                "updates": rows(scale),
                "diverged_replicas": [],
                "command": f"dstk compare --against {label}",
                "seconds": 12.3,
            } | changes

        strategies = [strategy(f"dp2-tp{i}-pp1-z1", 1e-8) for i in range(1, same + 1)]
        if differs:
            strategies.append(
                strategy(
                    "dp2-tp9-pp1-z3",
                    1e-2,
                    result="differs",
                    agreement="none",
                    cause="missing all-reduce",
                    sentence="The gradients of norms are each rank's part only.",
                    evidence="9 of 18 parameters",
                    first_diverging_step=1,
                    diverged_replicas=names[1:9:4],
                )
            )
        if failed:
            empty: dict[str, Any] = {name: [] for name in ("losses", "grad_norms", "gradients", "updates")}
            empty |= dict.fromkeys(("loss_difference", "norm_difference", "parameter_difference"))
            strategies.append(
                strategy("dp1-tp1-pp2-z3", 0.0, result="failed", agreement="none", error="no such layout", **empty)
            )
        reruns = [
            {"label": f"rounding seed {i}", "losses": noisy(losses, 1e-7), "grad_norms": noisy(norms, 1e-7)}
            for i in (1, 2)
        ]
        return {
            "title": "gpt2-tiny, fp32",
            "created": "2026-11-21T10:00:00+00:00",
            "command": "dstk compare --recipe r.yaml --against z1",
            "passed": not (differs or failed),
            "environment": {"torch": "2.13.0", "device": "2 cores"},
            "recipe": "model:\n  name_or_path: gpt2-tiny\n",
            "notes": ["dropout is off"],
            "outcome": "differs" if differs or failed else "same",
            "baselines": [
                {
                    "label": "reference",
                    "losses": losses,
                    "grad_norms": norms,
                    "learning_rates": [1e-3] * steps,
                    "reruns": reruns,
                }
            ],
            "strategies": strategies,
        }

    return make


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The system's Chromium, driven by playwright, with a profile of its own."""
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()
