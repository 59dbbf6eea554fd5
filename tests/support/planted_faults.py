"""Mistakes of an engine that tests plant, to see that they are found."""

from typing import Any

import pytest

from toolkit.engines.deepspeed_engine import DeepSpeedEngine


def forget_moments(monkeypatch: pytest.MonkeyPatch, kind: str = "exp_avg") -> None:
    """Adam's first moments, or another kind of state, are lost after every step."""
    update = DeepSpeedEngine._update

    def forgetful(engine: DeepSpeedEngine, loss: float) -> Any:
        result = update(engine, loss)
        for state in engine.engine.optimizer.optimizer.state.values():
            if kind in state:
                state[kind].zero_()
        return result

    monkeypatch.setattr(DeepSpeedEngine, "_update", forgetful)
