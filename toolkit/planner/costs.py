"""Cost of training on so many tokens: days, money, energy, CO2. Prices and factors stand in prices.json."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.hardware import Gpu
from toolkit.planner.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a whole training run that is never interrupted."""

    days: float
    usd: float | None
    """Price in US dollars; None where no price is known."""
    kwh: float | None
    """Energy at most, with boards and nodes at full power; None where their power is not known, as for CPUs."""
    kg_co2: float | None


def cost_of(
    step: StepTime, gpu: Gpu, tokens: float, *, price: float | None = None, carbon: float | None = None
) -> Cost:
    """Cost of `tokens`, with a price an hour and GPU and kilograms of CO2 a kWh that replace the catalogue's."""
    facts = _facts()
    hours = tokens / step.tokens * step.seconds / 3600
    rate = facts["usd_per_gpu_hour"].get(gpu.name) if price is None else price
    kwh = None
    if gpu.watts > 0:
        kwh = hours * step.gpus * gpu.watts * facts["node_power"] / 1000
    return Cost(
        days=hours / 24,
        usd=None if rate is None else hours * step.gpus * rate,
        kwh=kwh,
        kg_co2=None if kwh is None else kwh * (facts["kg_co2_per_kwh"] if carbon is None else carbon),
    )


@cache
def _facts() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("prices.json").read_text(encoding="utf-8")))
