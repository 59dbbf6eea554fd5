"""A pipeline stage as DeepSpeed's PipelineModule: one layer per stage, tied parameters by name, a step without update.

DeepSpeed sees a pipeline with as many layers as stages, so its partitioning, activation checkpointing and layer seeding
have no effect. It provides the 1F1B schedule, the communication between stages, and ZeRO-1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import nn

from toolkit.config.layout import Layout
from toolkit.parallel.groups import ParallelGroups
from toolkit.parallel.pipeline.stage import PipelineStage
from toolkit.parallel.shard import is_counted, shard_of


class BuiltStage(LayerSpec):  # type: ignore[misc]
    """The layer spec of a stage that is already built; on other ranks it only takes its place."""

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__(PipelineStage)
        self.stage = stage

    def build(self, log: bool = False) -> PipelineStage:
        """Return the stage."""
        return self.stage


class StagePipeline(PipelineModule):  # type: ignore[misc]
    """One BuiltStage per pipeline rank. `shared`: names of the parameters that both the first and last stage hold."""

    def __init__(self, stage: PipelineStage, groups: ParallelGroups, shared: list[str], loss_fn: Any) -> None:
        self._groups = groups
        self._shared = shared
        self._shared_here: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        layout = groups.layout
        super().__init__(
            layers=[BuiltStage(stage)] * layout.pp,
            topology=_topology(layout),
            loss_fn=loss_fn,
            partition_method="uniform",
        )

    def get_tied_weights_and_groups(self) -> list[tuple[Any, dist.ProcessGroup]]:
        """Return the shared parameters of this stage, each with the group that sums its gradient.

        DeepSpeed 0.19.8 sums `grad` (deepspeed/runtime/pipe/engine.py `_exec_reduce_tied_grads`), which is None where
        ZeRO-1 accumulates in another dtype than the parameters' (fp16 in fp32), in `grad_accum`: the copies of an
        embedding would drift apart. So that is what it gets here. No issue is known.
        """
        return [(_Accumulated.of(parameter), group) for parameter, group in self._shared_here]

    def _index_tied_modules(self) -> dict[str, Any]:
        if self._shared:
            group = self._groups.ends()
            if group is not None:
                held = {shard_of(parameter).name: parameter for parameter in self.parameters()}
                self._shared_here = [(held[name], group) for name in self._shared if held[name].requires_grad]
        for parameter in self.parameters():
            self._mark(parameter)
        return {}  # DeepSpeed uses it to count parameters, for a log line

    def _mark(self, parameter: Any) -> None:
        """Tell DeepSpeed how to count a parameter in norms.

        Without these marks DeepSpeed 0.19.8 counts the first model-parallel rank only, which spans stages: ZeRO-0 drops
        later stages and counts tied copies twice (deepspeed/runtime/utils.py `clip_grad_norm_`). No issue is known;
        the tests of planted faults train without them.
        """
        parameter.ds_pipe_replicated = shard_of(parameter).name in self._shared and self._groups.coordinate.pipe != 0
        counted = is_counted(parameter, on_first_tensor_rank=self._groups.is_first_of_tensor)
        parameter.model_parallel = counted
        parameter.tensor_model_parallel = counted


@dataclass(frozen=True)
class _Accumulated:
    """A parameter as DeepSpeed looks at it to sum its gradient."""

    grad: torch.Tensor

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_Accumulated | nn.Parameter":
        """The parameter itself, unless its gradient is accumulated apart from it."""
        accumulated = getattr(parameter, "grad_accum", None)
        return parameter if accumulated is None else cls(accumulated)


class StepWithoutUpdate(schedule.TrainSchedule):  # type: ignore[misc]
    """Forward, backward and reductions of one step; the update waits until loss and gradient norm are checked."""

    def steps(self) -> Iterator[list[Any]]:
        """Yield the instructions of each clock tick, without the optimizer step."""
        for instructions in super().steps():
            yield [instruction for instruction in instructions if not isinstance(instruction, schedule.OptimizerStep)]


def _topology(layout: Layout) -> Any:
    if layout.tp > 1:
        return PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.replicas)
    return PipeDataParallelTopology(num_pp=layout.pp, num_dp=layout.replicas)
