"""RankStates: the model states of a rank of a pipeline stage, and the dtypes in which it computes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from toolkit.config.layout import Layout
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.recorded.recording import Precision
from toolkit.estimate.recorded.recordings import parameters as recorded_parameters
from toolkit.estimate.states import ModelStates, TorchStates
from toolkit.estimate.trainable import in_4_bits, without_4bit
from toolkit.estimate.training_setup import TrainingSetup

Engine = DeepSpeedSettings | TorchStates
"""An engine that trains Hugging Face's layers, and how it keeps model states."""


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """The model states that a rank keeps, and the dtypes in which it computes."""

    params: RankParameters
    parameter_count: int
    """Elements of the rank's parameters, before any are packed in 4 bits."""
    states: ModelStates
    itemsize: int
    """Bytes of an element of activations; under autocast, of those that it does not cast."""
    autocast: bool

    @property
    def precision(self) -> Precision:
        """Precision of the operations."""
        if self.autocast:
            return "autocast"
        return "fp32" if self.itemsize == 4 else "bf16"

    @property
    def product_bytes(self) -> int:
        """Bytes of an element that matrix products read and write."""
        return 2 if self.autocast else self.itemsize

    @property
    def copies_weights(self) -> bool:
        """Whether autocast makes copies of weights in 16 bits."""
        return self.autocast and self.itemsize == 4


def rank_states(
    setup: TrainingSetup,
    engine: Engine,
    stage: int,
    layers: Sequence[int],
    *,
    model: ModelParameters | None = None,
) -> RankStates:
    """The states of a rank of a pipeline stage, which has these layers; of rank `stage` where ranks have several.

    `model`: the parameters, in place of the setup's own.
    """
    dtypes = _EngineDtypes.of(engine)
    weights = _rank_weights(setup, engine, stage, layers, model=model)
    replicas = setup.layout.zero_shards
    if isinstance(engine, DeepSpeedSettings):
        states = deepspeed_states(engine, weights.params, dp=replicas, accumulation=setup.accumulation)
    else:
        states = engine.states(weights.params, shards=replicas, accumulation=setup.accumulation)
    if setup.keeps_reference:
        states = _with_reference(states, engine, weights.params, replicas)
    # A matrix that is kept in 4 bits is unpacked for each of its products.
    unpacked_bytes = 2 if dtypes.autocast else dtypes.itemsize
    states = replace(states, gathered=states.gathered + weights.unpacked * unpacked_bytes)
    return RankStates(
        params=weights.params,
        parameter_count=weights.count,
        states=states,
        itemsize=dtypes.itemsize,
        autocast=dtypes.autocast,
    )


def stage_parameters(
    parameters: ModelParameters, layout: Layout, stage: int, layers: Sequence[int], *, by_decay: bool, **groups: bool
) -> RankParameters:
    """Return the parameters of a rank of a pipeline stage, or, where ranks have several, of rank number `stage`."""
    return parameters.rank_parameters(
        layers=layers,
        first=layout.stage_ranks[0] == stage,
        last=layout.stage_ranks[-1] == stage,
        tp=layout.tp,
        ep=layout.ep,
        inner=layout.experts == "inner",
        by_decay=by_decay,
        **groups,
    )


@dataclass(frozen=True, kw_only=True)
class _EngineDtypes:
    """The dtypes in which an engine keeps weights and computes."""

    weight_bytes: int
    """Bytes of an element of the weights."""
    itemsize: int
    """Bytes of an element of the weights that a layer computes with, and of activations."""
    autocast: bool

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Read the dtypes of an engine."""
        if isinstance(engine, DeepSpeedSettings):
            return cls(
                weight_bytes=engine.model_bytes,
                itemsize=engine.model_bytes,
                autocast=engine.autocast != "none",
            )
        return cls(weight_bytes=engine.weight_bytes, itemsize=engine.itemsize, autocast=engine.autocast)


@dataclass(frozen=True, kw_only=True)
class _RankWeights:
    """A rank's parameters as they are kept."""

    params: RankParameters
    """The parameters: ones in 4 bits count as so many elements of the weights' dtype as they take memory."""
    count: int
    """Elements of the parameters, before any are packed in 4 bits."""
    unpacked: int
    """Elements of the largest matrix that is kept in 4 bits; 0 without any."""


def _rank_weights(
    setup: TrainingSetup, engine: Engine, stage: int, layers: Sequence[int], *, model: ModelParameters | None
) -> _RankWeights:
    """Return the parameters of a rank, with adapters and in 4 bits if they are so. The arguments: as `rank_states`."""
    groups = {
        "by_decay": isinstance(engine, TorchStates) or engine.by_decay,
        "by_copies": engine.hidden_in_8_bits,
        "by_matrix": engine.muon or engine.hidden_in_8_bits,
    }
    trainable = without_4bit(setup.computation.trainable)
    whole = setup.model.parameters if model is None else model
    if trainable:
        whole = recorded_parameters(setup.model.config, trainable)
    params = stage_parameters(whole, setup.layout, stage, layers, **groups)
    if trainable == setup.computation.trainable:
        return _RankWeights(params=params, count=params.numel, unpacked=0)
    packed, unpacked = in_4_bits(whole, _EngineDtypes.of(engine).weight_bytes)
    packed_params = stage_parameters(packed, setup.layout, stage, layers, **groups)
    return _RankWeights(params=packed_params, count=params.numel, unpacked=unpacked)


def _with_reference(states: ModelStates, engine: Engine, params: RankParameters, replicas: int) -> ModelStates:
    """Add a copy of what the rank has of the weights that train: shards where they are sharded, in the same memory.

    Source: `SecondWeights.frozen` (toolkit/engines/second_weights.py).
    """
    if isinstance(engine, TorchStates):
        is_sharded = engine.gathered_bytes > 0
        frozen_numel = -(-params.frozen.numel // replicas) if is_sharded else params.frozen.numel
        copied = states.resident.parameters - engine.weight_bytes * frozen_numel
        return replace(states, resident=replace(states.resident, reference=copied))
    if engine.zero_stage < 3:
        copied = engine.model_bytes * params.trained
        return replace(states, resident=replace(states.resident, reference=copied))
    shard_numel = sum(numel * count for group in params.groups for numel, count in group.shards(replicas))
    copied = engine.model_bytes * shard_numel
    if engine.offload_params:
        return replace(states, host=replace(states.host, reference=copied))
    return replace(states, resident=replace(states.resident, reference=copied))
