"""RankStates: the model states of a rank of a pipeline stage, and the dtypes in which it computes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.profile_memory import stage_parameters
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
    layout = setup.layout
    groups = {
        "by_decay": isinstance(engine, TorchStates) or engine.by_decay,
        "by_copies": engine.hidden_in_8_bits,
        "by_matrix": engine.muon or engine.hidden_in_8_bits,
    }
    if isinstance(engine, DeepSpeedSettings):
        weight_bytes = engine.model_bytes
        itemsize = engine.model_bytes
        autocast = engine.autocast != "none"
    else:
        weight_bytes = engine.weight_bytes
        itemsize = engine.itemsize
        autocast = engine.autocast
    trainable = without_4bit(setup.computation.trainable)
    whole = setup.model.parameters if model is None else model
    if trainable:
        whole = recorded_parameters(setup.model.config, trainable)
    counted = stage_parameters(whole, layout, stage, layers, **groups)
    params = counted
    unpacked = 0
    if trainable != setup.computation.trainable:
        packed, unpacked = in_4_bits(whole, weight_bytes)
        params = stage_parameters(packed, layout, stage, layers, **groups)
    replicas = layout.zero_shards
    if isinstance(engine, DeepSpeedSettings):
        states = deepspeed_states(engine, params, dp=replicas, accumulation=setup.accumulation)
    else:
        states = engine.states(params, shards=replicas, accumulation=setup.accumulation)
    if setup.keeps_reference:
        states = _with_reference(states, engine, params, replicas)
    # A matrix that is kept in 4 bits is unpacked for each of its products.
    states = replace(states, gathered=states.gathered + unpacked * (2 if autocast else itemsize))
    return RankStates(params=params, parameter_count=counted.numel, states=states, itemsize=itemsize, autocast=autocast)


def _with_reference(states: ModelStates, engine: Engine, params: RankParameters, replicas: int) -> ModelStates:
    """Add a copy of what the rank has of the weights that train: shards where they are sharded, in the same memory.

    Source: `SecondWeights.frozen` (toolkit/engines/second_weights.py).
    """
    if isinstance(engine, DeepSpeedSettings):
        elements = params.trained
        if engine.zero_stage == 3:
            elements = sum(size * count for group in params.groups for size, count in group.shards(replicas))
        copied = engine.model_bytes * elements
    else:
        frozen = -(-params.frozen.numel // replicas) if engine.gathered_bytes else params.frozen.numel
        copied = states.resident.parameters - engine.weight_bytes * frozen
    if isinstance(engine, DeepSpeedSettings) and engine.zero_stage == 3 and engine.offload_params:
        return replace(states, host=replace(states.host, reference=copied))
    return replace(states, resident=replace(states.resident, reference=copied))
