"""TrainingSetup: what is trained and how, which is what an estimate, a plan, a recording and a benchmark's row ask."""

from dataclasses import dataclass, field, replace

from toolkit.config.context_exchange import ExchangeKind, chosen_exchange
from toolkit.config.layout import CpExchange, Layout
from toolkit.estimate.computation import Attention, Computation
from toolkit.estimate.model_facts import ModelFacts


@dataclass(frozen=True, kw_only=True)
class TeacherSetup:
    """The teacher of a distillation, which the ranks that train ask before they build the student."""

    model: ModelFacts
    top_k: int
    """Tokens that are stored for each target."""
    attention: Attention
    chunked_loss: bool
    """Whether its head takes tokens in chunks."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A model, the layout and the batch that it is trained in, and what runs in a pass.

    A `MemoryRequest` adds how an engine keeps model states, a `StepRequest` the cluster and the kernels, a
    `PlanRequest` the number of GPUs, and a `RankPass` what of it a recording depends on.
    """

    model: ModelFacts
    layout: Layout = field(default_factory=Layout)
    micro_batch_size: int
    """Samples of one forward pass of one replica."""
    accumulation: int = 2
    """Micro-batches that a rank computes for one step; in a pipeline, those that pass through it."""
    seq_len: int
    """Tokens of a sample."""
    computation: Computation = field(default_factory=Computation)
    chunked_loss: bool = False
    """Whether this toolkit's engine computes the loss in chunks, inside the head."""
    cp_exchange: CpExchange = "auto"
    """How context-parallel ranks see each other's keys and values."""
    blocks: bool = False
    """Whether the toolkit's attention, which makes no mask, computes whole sequences."""
    keeps_reference: bool = False
    """Whether a rank keeps a frozen copy of what it has of the weights that train: the reference of an objective."""
    forward_passes: int = 0
    """Forward passes without gradients over each micro-batch of a step, before the one that trains."""
    teacher: TeacherSetup | None = None
    """The teacher of a distillation; None without one, or for one whose config is not known here."""
    router_losses: int = 0
    """Losses that balance a mixture's routers: of each, a layer keeps a number for each token and expert."""

    def of_teacher(self) -> "TrainingSetup":
        """Return the setup in which the teacher is asked, in the layout of the same ranks."""
        teacher = self.teacher
        assert teacher is not None
        return replace(
            self,
            model=teacher.model,
            layout=self.layout.for_teacher(has_experts=teacher.model.shape.experts is not None),
            computation=replace(self.computation, attention=teacher.attention, trainable="", imbalance=1.0),
            chunked_loss=teacher.chunked_loss,
            keeps_reference=False,
            forward_passes=0,
            router_losses=0,
            teacher=None,
        )

    @property
    def trains_adapters(self) -> bool:
        """Whether LoRA's adapters are all that trains."""
        return self.computation.trainable.startswith("lora:")

    @property
    def global_batch_size(self) -> int:
        """Samples of one step on all replicas."""
        return self.micro_batch_size * self.accumulation * self.layout.dp

    @property
    def attention(self) -> Attention:
        """The attention that computes: under context parallelism the toolkit's own, in blocks."""
        return "blocks" if self.layout.cp > 1 or self.blocks else self.computation.attention

    def exchange(self, itemsize: int) -> ExchangeKind:
        """Return how context-parallel ranks exchange keys and values, whose elements have `itemsize` bytes."""
        tokens = self.micro_batch_size * self.seq_len
        shares = self.layout.cp_ulysses * self.layout.tp
        return chosen_exchange(self.cp_exchange, self.model.shape, tp=shares, tokens=tokens, itemsize=itemsize)

    @property
    def rank_positions(self) -> int:
        """Positions of a sample on one rank: Ulysses and context parallelism share them out."""
        return self.seq_len // (self.layout.ulysses * self.layout.cp)

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch_size * self.rank_positions

    @property
    def expert_owners(self) -> int:
        """Ranks that have different experts, and so share the rows that are routed to all of them."""
        return self.layout.ep * (1 if self.layout.experts == "inner" else self.layout.tp)
