"""Setups, requests and passes for tests, from fields that stand side by side wherever they belong.

memory_request(model, Layout(dp=8), {"seq_len": 1024, "recompute": "full"}, framework).peak()
changed(step_request(shape, Layout(dp=8), micro_batch_size=1, seq_len=64, cluster=cluster), imbalance=1.5)
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from toolkit.config.layout import Layout
from toolkit.estimate.memory_request import Framework, MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.recorded.recording import RankPass
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.hardware import Gpu
from toolkit.models.shape import ModelShape
from toolkit.planner.step_request import StepRequest

Holder = TypeVar("Holder")
_NESTED = ("setup", "layout", "computation")
"""Fields whose own fields are changed by their names."""


def changed(holder: Holder, **values: Any) -> Holder:
    """The same setup, request or pass with other values, each in the part that has a field of this name."""
    replaced, left = _replaced(holder, values)
    assert not left, f"no field of {type(holder).__name__}, or of what it holds: {', '.join(left)}"
    return replaced


def _replaced(holder: Any, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the holder with the values that it or a part of it has fields for, and the other values."""
    assert is_dataclass(holder)
    names = [field.name for field in fields(holder)]
    changes = {name: value for name, value in values.items() if name in names}
    left = {name: value for name, value in values.items() if name not in names}
    for name in _NESTED:
        if name in names and left:
            changes[name], left = _replaced(changes.get(name, getattr(holder, name)), left)
    return replace(holder, **changes), left


def training_setup(
    model: ModelFacts, layout: Layout, *, micro_batch_size: int, seq_len: int, **more: Any
) -> TrainingSetup:
    """A setup; `more` are fields of TrainingSetup, of Computation and of Layout."""
    setup = TrainingSetup(model=model, layout=layout, micro_batch_size=micro_batch_size, seq_len=seq_len)
    return changed(setup, **more)


def memory_request(
    model: ModelFacts, layout: Layout, work: Mapping[str, Any], framework: Framework, gpu: Gpu | None = None
) -> MemoryRequest:
    """The memory estimate's input; `work` has the values of `training_setup`."""
    return MemoryRequest(setup=training_setup(model, layout, **work), framework=framework, gpu=gpu)


def step_request(shape: ModelShape, layout: Layout, *, cluster: Any, **values: Any) -> StepRequest:
    """The time model's input for a model of this shape; `values` are its other fields, and those of a setup."""
    own = {field.name for field in fields(StepRequest)}
    setup = training_setup(model_of(shape), layout, **{name: values[name] for name in values if name not in own})
    return StepRequest(setup=setup, cluster=cluster, **{name: values[name] for name in values if name in own})


def model_of(shape: ModelShape) -> ModelFacts:
    """A model of which nothing but the shape is known."""
    return ModelFacts(config="{}", other_shape=shape)


def rank_pass(config: str, **values: Any) -> RankPass:
    """A pass of the model with this config, as text; `values` are fields of RankPass, of Computation and of Layout."""
    ep = values.get("ep", 1)
    return changed(RankPass(config=config, layout=Layout(dp=ep, tp=values.get("tp", 1))), **values)
