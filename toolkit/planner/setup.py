"""Setup: everything that the time of a step depends on."""

from dataclasses import dataclass, field
from itertools import pairwise

from toolkit.config.layout import Layout
from toolkit.config.recipe import OptimizerName
from toolkit.models.shape import ModelShape
from toolkit.models.weights import held_layer_parameters, routed_parameters
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
    imbalance: float = 1.0
    """Routed rows of the busiest rank over the mean."""
    optimizer: OptimizerName = "adamw"

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
            ep=self.layout.ep,
            inner=self.layout.experts == "inner",
            imbalance=self.imbalance,
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
    def routed(self) -> float:
        """Weights of routed experts, of the rank that holds most of them: so many replicas less have the same ones."""
        return max(self.stages) * routed_parameters(self.shape) / (self.layout.tp * self.layout.ep)

    @property
    def parameters(self) -> float:
        """Weights of the rank that holds most of them, but for the routed experts."""
        shape, stages = self.shape, self.stages
        layers = [count * (held_layer_parameters(shape) - routed_parameters(shape)) for count in stages]
        table = shape.vocab * shape.embed_dim
        layers[0] += table
        layers[-1] += 0 if shape.tied and len(stages) == 1 else table
        return max(layers) / self.layout.tp

    @property
    def trained_routed(self) -> float:
        """Of the routed experts' weights, those that train: all, where nothing is frozen."""
        return self.routed if self.trained is None else 0.0

    @property
    def trained_parameters(self) -> float:
        """Of the others, those that train; of a model with frozen weights, all that train."""
        if self.trained is None:
            return self.parameters
        return (max(self.stages) * self.trained.layer + self.trained.outside) / self.layout.tp

    @property
    def replicas(self) -> int:
        """Ranks that share optimizer states where they are sharded."""
        return self.layout.dp * self.layout.ulysses * self.run.context_parallel
