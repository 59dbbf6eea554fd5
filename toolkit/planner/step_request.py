"""StepRequest: everything that the time of a step depends on."""

from dataclasses import dataclass, field
from itertools import pairwise

from toolkit.config.layout import Layout
from toolkit.config.recipe import OptimizerName
from toolkit.estimate.profile_stages import stage_bounds
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.models.shape import ModelShape
from toolkit.models.weights import held_layer_parameters, routed_parameters
from toolkit.planner.cluster import Cluster
from toolkit.planner.execution import Execution
from toolkit.planner.layer_time import RankWork
from toolkit.planner.trained import Trained


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A training setup, the cluster that it runs on, and the kernels that it runs with."""

    setup: TrainingSetup
    cluster: Cluster
    execution: Execution = field(default_factory=Execution)
    bounds: tuple[int, ...] = ()
    """Layers where pipeline stages begin and end; empty: as equal as they can be."""
    trained: Trained | None = None
    """Parameters that train, as far as the time depends on them; None: all."""
    optimizer: OptimizerName = "adamw"

    @property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return self.setup.model.shape

    @property
    def layout(self) -> Layout:
        """The layout that the model is trained in."""
        return self.setup.layout

    @property
    def work(self) -> RankWork:
        """The work of one rank on a micro-batch."""
        setup = self.setup
        layout = setup.layout
        shards = layout.ulysses * layout.cp * self.execution.context_parallel
        tokens = setup.micro_batch_size * setup.seq_len // shards
        expert_input_shards = 1 if layout.experts == "inner" else layout.tp
        routed_rows = 0.0
        experts = setup.model.shape.experts
        if experts is not None:
            busiest = setup.computation.imbalance if setup.expert_owners > 1 else 1.0
            routed_rows = tokens * experts.per_token * busiest / expert_input_shards
        return RankWork(
            tokens=tokens,
            seq_len=setup.seq_len,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            heads_split=layout.ulysses,
            context=layout.cp,
            routed_rows=routed_rows,
            expert_owners=setup.expert_owners,
            expert_shards=layout.tp if layout.experts == "inner" else 1,
        )

    @property
    def stages(self) -> list[int]:
        """Number of decoder layers of each stage, of which a rank may have several."""
        bounds = self.bounds or stage_bounds(self.shape, self.layout.pp, self.execution.facts["stages"])
        return [stop - start for start, stop in pairwise(bounds)]

    @property
    def rank_layers(self) -> list[int]:
        """Number of decoder layers of each pipeline rank."""
        counts = [0] * self.layout.pp
        for rank, count in zip(self.layout.stage_ranks, self.stages, strict=True):
            counts[rank] += count
        return counts

    @property
    def most_layers(self) -> int:
        """Decoder layers of the rank that has most of them."""
        return max(self.rank_layers)

    @property
    def gpus(self) -> int:
        """Number of all ranks."""
        return self.layout.world_size * self.execution.context_parallel

    @property
    def routed(self) -> float:
        """Weights of routed experts, of the rank that holds most of them: 1/ep of a layer's on each."""
        return self.most_layers * routed_parameters(self.shape) / (self.layout.tp * self.layout.ep)

    @property
    def parameters(self) -> float:
        """Weights of the rank that holds most of them, but for the routed experts."""
        shape = self.shape
        layers = [count * (held_layer_parameters(shape) - routed_parameters(shape)) for count in self.rank_layers]
        table = shape.vocab * shape.embed_dim
        first = self.layout.stage_ranks[0]
        last = self.layout.stage_ranks[-1]
        layers[first] += table
        layers[last] += 0 if shape.tied and first == last else table
        return max(layers) / self.layout.tp

    @property
    def trained_routed(self) -> float:
        """Weights of routed experts that train, on the rank with most: all, or 0 where any weights are frozen."""
        return self.routed if self.trained is None else 0.0

    @property
    def trained_parameters(self) -> float:
        """Weights that train on the rank with most of them: without routed experts, unless weights are frozen."""
        if self.trained is None:
            return self.parameters
        return (self.most_layers * self.trained.layer + self.trained.outside) / self.layout.tp

    @property
    def replicas(self) -> int:
        """Ranks that share optimizer states where they are sharded."""
        return self.layout.zero_shards * self.execution.context_parallel
