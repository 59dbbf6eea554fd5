"""The bytes that collectives of a step need by formula, beside those that were counted.

Bytes are of the whole tensor: of an all-reduce what a rank passes, of a gather or a scatter the longer side.
docs/step-counts.md derives the formulas.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy

if TYPE_CHECKING:
    from measure.step_counter import StepCounts


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What the formulas need of one rank's model and batch."""

    parameters: int
    """Trained parameters of the model on this rank, before ZeRO shards them."""
    layers: int
    """Decoder layers on this rank."""
    micro_batches: int
    tokens: int
    """Of a micro-batch."""
    hidden: int

    @property
    def activation_bytes(self) -> int:
        """The hidden state of a micro-batch in 16 bits, [b, s, h]."""
        return 2 * self.tokens * self.hidden

    @classmethod
    def of(cls, recipe: Recipe, model: Any, *, layers: int, micro_batches: int) -> "StepFacts":
        """Read them from a model."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return cls(
            parameters=sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained),
            layers=layers,
            micro_batches=micro_batches,
            tokens=int(recipe.batch.micro_batch_size or 1) * recipe.data.seq_len,
            hidden=model.config.hidden_size,
        )


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
    replicas = (strategy.dp or 1) * strategy.ulysses
    if replicas > 1:
        if strategy.engine == "ddp" or strategy.zero_stage in (None, 0, 1):
            forms["allreduce"] += 4 * facts.parameters
        elif strategy.zero_stage == 2:
            forms["allreduce"] += 4 * facts.parameters * facts.micro_batches
        else:
            forms["reduce_scatter"] += 4 * facts.parameters * facts.micro_batches
        if strategy.zero_stage in (1, 2):
            forms["allgather"] += 2 * facts.parameters
        elif strategy.zero_stage == 3:
            forms["allgather"] += 2 * facts.parameters * facts.micro_batches
    return dict(forms)


def collective_rows(strategy: Strategy | None, counts: "StepCounts", facts: StepFacts | None) -> Iterator[list[str]]:
    """One row for each kind of collective and group. `async`: calls that return before they are done."""
    calls: Counter[tuple[str, int]] = Counter()
    in_background: Counter[tuple[str, int]] = Counter()
    sizes: Counter[tuple[str, int]] = Counter()
    of_kind: Counter[str] = Counter()
    for call, number in counts.collectives.items():
        key = call.kind, call.group_size
        calls[key] += number
        in_background[key] += number * call.is_async
        sizes[key] += counts.collective_bytes[call]
        if call.group_size > 1:
            of_kind[call.kind] += counts.collective_bytes[call]
    forms = closed_form(strategy, facts) if strategy is not None and facts is not None else {}
    for kind, group in sorted(calls):
        form = forms.get(kind, 0) if group > 1 else 0  # nothing is sent to oneself
        yield [
            kind,
            str(group),
            str(calls[kind, group]),
            str(in_background[kind, group]),
            f"{sizes[kind, group] / 1024:,.1f}",
            f"{form / 1024:,.1f}" if form else "",
            f"{of_kind[kind] / form:.3f}" if form else "",
        ]
