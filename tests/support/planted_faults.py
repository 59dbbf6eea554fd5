"""Mistakes of an engine that tests plant, to see that they are found."""

from typing import Any

import pytest

from toolkit.engines.deepspeed_engine import DeepSpeedEngine


def forget_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's first moments are lost after every step."""
    update = DeepSpeedEngine._update

    def forgetful(engine: DeepSpeedEngine, loss: float) -> Any:
        result = update(engine, loss)
        for state in engine.engine.optimizer.optimizer.state.values():
            state["exp_avg"].zero_()
        return result

    monkeypatch.setattr(DeepSpeedEngine, "_update", forgetful)
