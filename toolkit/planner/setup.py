"""Setup: everything that the time of a step depends on."""

from dataclasses import dataclass, field
from itertools import pairwise

from toolkit.config.layout import Layout
from toolkit.models.shape import ModelShape, layer_matmul_parameters
from toolkit.planner.cluster import Cluster
from toolkit.planner.execution import Execution
from toolkit.planner.layer_time import Work
from toolkit.planner.stages import stage_bounds
from toolkit.planner.trained import Trained


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that the time of a step depends on."""

    shape: ModelShape
    layout: Layout
    cluster: Cluster
    micro_batch_size: int
    accumulation: int
    seq_len: int
    run: Execution = field(default_factory=Execution)
    bounds: tuple[int, ...] = ()
    """Layers where pipeline stages begin and end; empty: as equal as they can be."""
    gradient_bytes: int = 0
    """Of a gradient in communication; 0: the framework's."""
    trained: Trained | None = None
    """Which weights train; None: all."""

    @property
    def work(self) -> Work:
        """What a rank computes of a micro-batch."""
        shards = self.layout.ulysses * self.run.context_parallel
        return Work(
            tokens=self.micro_batch_size * self.seq_len // shards,
            seq_len=self.seq_len,
            tp=self.layout.tp,
            sequence_parallel=self.layout.sequence_parallel,
            heads_split=self.layout.ulysses,
        )

    @property
    def stages(self) -> list[int]:
        """Layers of each stage."""
        bounds = self.bounds or stage_bounds(self.shape, self.layout.pp, self.run.facts["stages"])
        return [stop - start for start, stop in pairwise(bounds)]

    @property
    def gpus(self) -> int:
        """All ranks."""
        return self.layout.world_size * self.run.context_parallel

    @property
    def parameters(self) -> float:
        """Weights of the rank that holds most of them."""
        shape, stages = self.shape, self.stages
        layers = [count * layer_matmul_parameters(shape) for count in stages]
        table = shape.vocab * shape.embed_dim
        layers[0] += table
        layers[-1] += 0 if shape.tied and len(stages) == 1 else table
        return max(layers) / self.layout.tp

    @property
    def trained_parameters(self) -> float:
        """Of them, those that train."""
        if self.trained is None:
            return self.parameters
        return (max(self.stages) * self.trained.layer + self.trained.outside) / self.layout.tp

    @property
    def replicas(self) -> int:
        """Ranks that share optimizer states where they are sharded."""
        return self.layout.dp * self.layout.ulysses * self.run.context_parallel
