"""The bytes that collectives and the update of a step need by formula, beside those that were counted.

Bytes of a collective are of the whole tensor: of an all-reduce what a rank passes, of a gather or a scatter the longer
side, of an all-to-all what a rank sends, also to itself. docs/step-counts.md derives the formulas.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy

if TYPE_CHECKING:
    from measure.step_counter import StepCounts

NORM_BYTES = 4
"""Bytes an element that the norm reads of a gradient in fp32."""
SCALING_BYTES = 8
"""Bytes an element with which clipping reads and writes a gradient in fp32."""
ADAMW_BYTES = 28
"""Bytes an element: AdamW reads gradient, weight and two moments and writes the last three, all in fp32."""
CAST_BYTES = 6
"""Bytes an element with which a master weight is read in fp32 and written in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What the formulas need of one rank's model and batch."""

    parameters: int
    """Trained parameters of the model on this rank, before ZeRO shards them."""
    expert_parameters: int
    """Those of them that expert-parallel ranks do not share."""
    tied_parameters: int
    """Trained parameters of a word embedding that is the head as well; 0 where these are two."""
    layers: int
    """Decoder layers on this rank."""
    micro_batches: int
    tokens: int
    """Of a micro-batch."""
    hidden: int
    query_width: int
    """Query heads times the dimension of a head, of the whole model."""
    key_value_width: int
    """Key-value heads times the dimension of a head, of the whole model."""
    experts: int
    """Experts of a layer, on all ranks; 0 of a dense model."""
    experts_per_token: int

    @property
    def activation_bytes(self) -> int:
        """The hidden state of a micro-batch in 16 bits, [b, s, h]."""
        return 2 * self.tokens * self.hidden

    @property
    def row_bytes(self) -> int:
        """The rows of a micro-batch in 16 bits, one for each token and expert that it goes to, [b, s, k, h]."""
        return self.activation_bytes * self.experts_per_token

    @property
    def attention_bytes(self) -> int:
        """Queries, keys, values and outputs of attention of a micro-batch in 16 bits."""
        return 2 * self.tokens * 2 * (self.query_width + self.key_value_width)

    @classmethod
    def of(cls, recipe: Recipe, model: Any, *, layers: int, micro_batches: int) -> "StepFacts":
        """Read them from a model."""
        config = model.config
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        embedding = model.get_input_embeddings().weight if config.tie_word_embeddings else None
        experts = getattr(config, "num_experts", None) or 0
        return cls(
            parameters=sum(map(_elements, trained)),
            expert_parameters=sum(_elements(parameter) for parameter in trained if hasattr(parameter, "group_name")),
            tied_parameters=_elements(embedding) if embedding is not None and embedding.requires_grad else 0,
            layers=layers,
            micro_batches=micro_batches,
            tokens=int(recipe.batch.micro_batch_size or 1) * recipe.data.seq_len,
            hidden=config.hidden_size,
            query_width=config.num_attention_heads * head_dim,
            key_value_width=(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_dim,
            experts=experts,
            experts_per_token=config.num_experts_per_tok if experts else 0,
        )


def _elements(parameter: Any) -> int:
    """Return the elements that a rank has, before ZeRO shards them; of a DTensor, those of its shard."""
    if isinstance(parameter.data, DTensor):
        return parameter.data.to_local().numel()
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def closed_form(strategy: Strategy, facts: StepFacts) -> dict[str, int]:
    """Return the bytes of each kind of collective over the whole step, of the large ones; {} where none is derived."""
    forms: Counter[str] = Counter()
    activations = facts.micro_batches * facts.activation_bytes
    layers = facts.layers
    ends = 2 if strategy.pp == 1 else 1
    if strategy.tp > 1 and strategy.sp:
        forms["allgather"] += (4 * layers + ends + 2 * layers * strategy.recompute) * activations
        forms["reduce_scatter"] += (4 * layers + layers * strategy.recompute) * activations
    elif strategy.tp > 1:
        forms["allreduce"] += (4 * layers + ends + layers * strategy.recompute) * activations
    if strategy.pp > 1:
        forms["send"] += activations
        forms["recv"] += activations
    passes = layers * facts.micro_batches * (2 + strategy.recompute)
    if strategy.ep > 1:
        counts = 8 * facts.experts * layers * facts.micro_batches * (1 + strategy.recompute)
        forms["alltoall"] += 2 * passes * facts.row_bytes + counts
    if strategy.ulysses > 1:
        forms["alltoall"] += passes * facts.attention_bytes // strategy.ulysses
    forms.update(_of_zero(strategy, facts))
    return dict(forms)


def _of_zero(strategy: Strategy, facts: StepFacts) -> Counter[str]:
    """Return the bytes of gradients and parameters that replicas send, by kind."""
    forms: Counter[str] = Counter()
    dp = (strategy.dp or strategy.ep) * strategy.ulysses
    shared = facts.parameters - facts.expert_parameters
    parameters = shared * (dp > 1) + facts.expert_parameters * (dp > strategy.ep)
    if strategy.engine == "ddp" or strategy.zero_stage in (None, 0, 1):
        forms["allreduce"] += 4 * parameters
    elif strategy.zero_stage == 2:
        forms["allreduce"] += 4 * parameters * facts.micro_batches
    else:
        forms["reduce_scatter"] += 4 * parameters * facts.micro_batches
    if strategy.zero_stage in (1, 2):
        forms["allgather"] += 2 * parameters
    elif strategy.zero_stage == 3:
        forms["allgather"] += 2 * parameters * facts.micro_batches
    if strategy.pp > 1:
        forms["allreduce"] += 4 * facts.tied_parameters
    return +forms


def update_form(strategy: Strategy | None, facts: StepFacts) -> tuple[int, int]:
    """Return the elements that a rank updates, and the bytes of each. `strategy`: None where a model's shards are it.

    A rank whose weights have 16 bits also casts its part of the fp32 master weights to them.
    """
    per_element = NORM_BYTES + SCALING_BYTES + ADAMW_BYTES
    if strategy is None or not strategy.zero_stage:
        return facts.parameters, per_element
    dp = (strategy.dp or strategy.ep) * strategy.ulysses
    shared = facts.parameters - facts.expert_parameters
    elements = shared // dp + facts.expert_parameters * strategy.ep // dp
    return elements, per_element + CAST_BYTES


def update_row(strategy: Strategy | None, counts: "StepCounts", facts: StepFacts) -> list[str]:
    """Return one row: what the update moves for each element, beside the closed form, and its largest operations."""
    elements, form = update_form(strategy, facts)
    names: Counter[str] = Counter()
    for (phase, name), moved in counts.moved_by_name.items():
        if phase == "update":
            names[name] += moved
    moved = names.total()
    parts = [f"{name} {size / elements:.1f}" for name, size in names.most_common() if size / elements >= 0.5]
    measured = moved / elements
    return [", ".join(parts), f"{elements:,}", f"{measured:.1f}", str(form), f"{measured / form:.2f}"]


def collective_rows(strategy: Strategy | None, counts: "StepCounts", facts: StepFacts | None) -> Iterator[list[str]]:
    """One row for each kind of collective and group. `async`: calls that return before they are done."""
    calls: Counter[tuple[str, int]] = Counter()
    in_background: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    waits: Counter[tuple[str, int]] = Counter()
    operations: Counter[tuple[str, int]] = Counter()
    flops: Counter[tuple[str, int]] = Counter()
    of_kind: Counter[str] = Counter()
    for call, number in counts.collectives.items():
        key = call.kind, call.group_size
        calls[key] += number
        in_background[key] += number * call.is_async
        sizes[key] += counts.collective_bytes[call]
        waits[key] += counts.waits[call]
        operations[key] += counts.operations_meanwhile[call]
        flops[key] += counts.flops_meanwhile[call]
        if call.group_size > 1:
            of_kind[call.kind] += counts.collective_bytes[call]
    forms = closed_form(strategy, facts) if strategy is not None and facts is not None else {}
    for key in sorted(calls):
        kind, group = key
        # Nothing is sent to oneself. Of several groups, the one that sends the most stands for all.
        of_groups = [size for (other, ranks), size in sizes.items() if other == kind and ranks > 1]
        form = forms.get(kind, 0) if group > 1 and sizes[key] == max(of_groups) else 0
        yield [
            kind,
            str(group),
            str(calls[key]),
            str(in_background[key]),
            f"{operations[key] / waits[key]:,.0f}" if waits[key] else "",
            f"{flops[key] / waits[key] / 1e6:,.1f}" if waits[key] else "",
            f"{sizes[key] / 1024:,.1f}",
            f"{form / 1024:,.1f}" if form else "",
            f"{of_kind[kind] / form:.3f}" if form else "",
        ]
