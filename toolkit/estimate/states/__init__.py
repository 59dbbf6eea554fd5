"""What a framework keeps of every parameter, per rank: weights, gradients, master weights, moments and buffers."""

from toolkit.estimate.states.accounting import Accounting, Kept, fsdp2, megatron, nanotron, plain
from toolkit.estimate.states.deepspeed import deepspeed_states
from toolkit.estimate.states.model_states import Bytes, ModelStates
from toolkit.estimate.states.pipeline import channels_between, pipeline_counters
from toolkit.estimate.states.settings import DeepSpeedSettings

__all__ = [
    "Accounting",
    "Bytes",
    "DeepSpeedSettings",
    "Kept",
    "ModelStates",
    "channels_between",
    "deepspeed_states",
    "fsdp2",
    "megatron",
    "nanotron",
    "pipeline_counters",
    "plain",
]
