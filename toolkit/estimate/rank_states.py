"""RankStates: the model states of a rank of a pipeline stage, and the dtypes in which it computes."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toolkit.config.layout import Layout
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.profile_memory import stage_parameters
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.recorded.recording import Precision
from toolkit.estimate.recorded.recordings import parameters as recorded_parameters
from toolkit.estimate.states import ModelStates, TorchStates
from toolkit.estimate.trainable import in_4_bits, without_4bit

if TYPE_CHECKING:
    from toolkit.estimate.memory_model import Workload


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """What a rank keeps of its parameters, and in which dtypes it computes."""

    params: RankParameters
    parameter_count: int
    """Elements of the rank's parameters, before any are packed in 4 bits."""
    states: ModelStates
    itemsize: int
    """Bytes of an element of activations; under autocast, of those that it does not cast."""
    autocast: bool

    @property
    def precision(self) -> Precision:
        """Of the operations."""
        return "autocast" if self.autocast else "fp32" if self.itemsize == 4 else "bf16"

    @property
    def product_bytes(self) -> int:
        """Of an element of what matrix products read and write."""
        return 2 if self.autocast else self.itemsize

    @property
    def copies_weights(self) -> bool:
        """Whether autocast makes copies of weights in 16 bits."""
        return self.autocast and self.itemsize == 4


def rank_states(
    config: str,
    parameters: ModelParameters,
    framework: DeepSpeedSettings | TorchStates,
    layout: Layout,
    work: "Workload",
    stage: int,
    layers: range,
) -> RankStates:
    """The states of a rank of this stage, of a model with this config (`config_text`), whose `parameters` all train."""
    deepspeed = framework if isinstance(framework, DeepSpeedSettings) else None
    groups = {"by_decay": deepspeed is None or deepspeed.by_decay, "by_copies": framework.hidden_in_8_bits}
    groups["by_matrix"] = framework.muon or framework.hidden_in_8_bits
    trainable = without_4bit(work.trainable)
    whole = recorded_parameters(config, trainable) if trainable else parameters
    params = counted = stage_parameters(whole, layout, stage, layers, **groups)
    itemsize = work.activation_bytes or (2 if deepspeed is None else deepspeed.model_bytes)
    autocast = work.autocast if deepspeed is None else deepspeed.autocast != "none"
    unpacked = 0
    if trainable != work.trainable:
        packed, unpacked = in_4_bits(
            whole, framework.weight_bytes if isinstance(framework, TorchStates) else framework.model_bytes
        )
        params = stage_parameters(packed, layout, stage, layers, **groups)
    replicas = layout.dp * layout.ulysses
    if isinstance(framework, DeepSpeedSettings):
        states = deepspeed_states(framework, params, dp=replicas, accumulation=work.accumulation)
    else:
        states = framework.states(params, shards=replicas, accumulation=work.accumulation)
    # A matrix that is kept in 4 bits is unpacked for each of its products.
    states = replace(states, gathered=states.gathered + unpacked * (2 if autocast else itemsize))
    return RankStates(params=params, parameter_count=counted.numel, states=states, itemsize=itemsize, autocast=autocast)
