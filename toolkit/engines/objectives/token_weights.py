"""TokenWeights: makes an objective of sequences into weights of the token loss that an engine computes.

A forward pass puts out the losses of its tokens, before its backward pass begins. They are summed by sequence, the
objective's formula turns the sums into slopes, and each token gets the slope of its sequence as its weight. So no
second forward pass is needed, except where the objective compares with a mean over the global batch (kto, bco): that is
summed first, without gradients. Engines don't know which objective it is.

Dims: b samples, s positions (of this rank), n pairs or completions of the micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from toolkit.config.objective_section import UNPAIRED, ObjectiveSection
from toolkit.data.samples.micro_batch import Sequences
from toolkit.engines.objectives.formulas import FORMULAS, ObjectiveValue, SequenceSums
from toolkit.step_metrics import MARGIN_EDGES

_PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
_LABEL_METRICS = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
_DESIRABLE = 7
_COUNTED = 8
Observer = Callable[[Sequences, SequenceSums, torch.Tensor, torch.Tensor], None]
"""Function of what trains in a micro-batch: sequences, what the formula gets, losses and weights of tokens [b, s]."""
_TOTALS = 9
"""Numbers that a step adds up: the loss, six sums of metrics, the desirable completions, and all that are counted. Of
pairs, the number in each bin of margins follows."""


class TokenWeights:
    """The objective of an engine, and what it has added up in a step.

    An engine calls `start` before each forward pass, and `weigh` with the losses of its tokens.
    """

    totals: torch.Tensor
    """Sums of the step on this rank, fp64: the loss, then those of the metrics."""

    def __init__(self, section: ObjectiveSection, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """`group`: the ranks that share each sequence; None where a rank has whole ones."""
        self._section = section
        self._formula = FORMULAS[section.name]
        self._device = device
        self._group = group
        self.is_first = group is None or dist.get_rank(group) == 0
        """Whether this rank counts what all ranks of `group` know."""
        self._sequences: Sequences | None = None
        self._mode = "train"
        bins = 0 if section.name in UNPAIRED else len(MARGIN_EDGES) + 1
        self._margin_edges = torch.tensor(MARGIN_EDGES, dtype=torch.float64, device=device)
        self.totals = torch.zeros(_TOTALS + bins, dtype=torch.float64, device=device)
        self.mean = torch.zeros(2, dtype=torch.float64, device=device)
        """Sum and count of what the global batch is compared with, before and after the ranks have added theirs."""
        self._seen_rewards = torch.zeros(2, dtype=torch.float64, device=device)
        """Sum and count of the rewards of all steps before, of bco."""
        self._shift = 0.0
        self._collected: list[tuple[Sequences, torch.Tensor]] = []
        """Sequences and log-probabilities of the micro-batches that passed while `collecting`."""
        self._reference: list[torch.Tensor] = []
        """Log-probabilities of a reference model for each micro-batch of the step, [n, 2], where it is in memory."""
        self._started = 0
        """Forward passes that have begun since."""
        self.observer: Observer | None = None
        """Sees what is computed, without changing it; None where nobody looks."""

    @property
    def needs_mean(self) -> bool:
        """Whether each step begins with a pass without gradients, for a mean over the global batch."""
        return self._section.name in UNPAIRED

    def begin_step(self) -> None:
        """Forget the step before."""
        self.totals.zero_()

    def start(self, sequences: Sequences | None) -> None:
        """Begin the forward pass of a micro-batch with these sequences, which are on the device."""
        if sequences is not None and self._reference and self._mode != "collect":
            reference = self._reference[self._started % len(self._reference)]  # each pass reads all micro-batches
            sequences = replace(sequences, reference=reference)
            self._started += 1
        self._sequences = sequences

    def local_totals(self) -> torch.Tensor:
        """Return this rank's share of `totals`, a copy: zeros where another rank counts the same sequences."""
        return self.totals * float(self.is_first)

    def loss_and_count(self) -> torch.Tensor:
        """Return the summed loss, and the number of pairs or completions that it is of, fp64 [2], as `local_totals`."""
        return self.local_totals()[[0, _COUNTED]]

    def weigh(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the weight of each token in the loss, [b, s], for the losses of the tokens of a micro-batch [b, s]."""
        sequences = self._sequences
        assert sequences is not None
        pieces = len(sequences.pieces)
        numbers = sequences.numbers.flatten()
        sums = torch.zeros(2 * pieces + 1, dtype=torch.float64, device=losses.device)
        sums.index_add_(0, numbers, -losses.detach().flatten().double())
        self.sum_over_sequence_ranks(sums)
        policy = sums[:-1].view(pieces, 2)
        if self._mode == "collect":
            self._collected.append((sequences, policy))
            return torch.ones_like(losses)
        inputs = self._inputs(policy, sequences)
        if self._mode == "mean":
            self._add_to_mean(inputs)
            return torch.ones_like(losses)
        value = self._formula(inputs, self._section)
        self._add_totals(value, sequences)
        counted = sequences.is_counted * sequences.weights
        slopes = (value.slopes * counted.unsqueeze(-1)).flatten()
        weights = -torch.cat([slopes, slopes.new_zeros(1)])[numbers].view(losses.shape)
        if self.observer is not None:
            self.observer(sequences, inputs, losses, weights)
        return weights.to(losses.dtype)

    def sum_over_sequence_ranks(self, sums: torch.Tensor) -> None:
        """Sum over the ranks that share each sequence, in place. A collective call of these ranks."""
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)

    def _inputs(self, policy: torch.Tensor, sequences: Sequences) -> SequenceSums:
        return SequenceSums(
            policy=policy,
            reference=sequences.reference,
            tokens=sequences.tokens.double().clamp(min=1.0),
            is_desirable=sequences.is_desirable,
            chosen_token_share=sequences.chosen_token_share,
            shift=self._shift,
        )

    def _add_totals(self, value: ObjectiveValue, sequences: Sequences) -> None:
        counted = sequences.is_counted.double()
        self.totals[0] += (value.loss * counted * sequences.weights).sum()
        self.totals[_COUNTED] += counted.sum()
        rewards = value.rewards
        logps = value.logps
        if self._section.name in UNPAIRED:
            desirable = counted * sequences.is_desirable
            other = counted - desirable
            columns = [rewards[:, 0] * desirable, rewards[:, 0] * other, logps[:, 0] * desirable, logps[:, 0] * other]
            self.totals[_DESIRABLE] += desirable.sum()
        else:
            margins = rewards[:, 0] - rewards[:, 1]
            columns = [rewards[:, 0], rewards[:, 1], margins, (margins > 0).double(), logps[:, 0], logps[:, 1]]
            columns = [column * counted for column in columns]
            bins = torch.bucketize(margins, self._margin_edges, right=True)
            self.totals[_TOTALS:].index_add_(0, bins, counted)
        for position, column in enumerate(columns, 1):
            self.totals[position] += column.sum()

    def metrics(self, totals: Sequence[float], count: int) -> dict[str, float]:
        """Return the metrics of a step of `count` pairs or completions, whose summed `totals` the host has read.

        Rewards are in nats. Of unpaired data a metric is left out where the step has no such completion.
        """
        sums = totals[1:_DESIRABLE]
        if self._section.name not in UNPAIRED:
            return {name: value / count for name, value in zip(_PAIR_METRICS, sums, strict=False)}
        desirable = totals[_DESIRABLE]
        counts = (desirable, count - desirable, desirable, count - desirable)
        named_sums = zip(_LABEL_METRICS, sums, counts, strict=False)
        metrics = {name: value / number for name, value, number in named_sums if number}
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        metrics["kl" if self._section.name == "kto" else "delta"] = self._shift
        return metrics

    def margins(self, totals: Sequence[float]) -> tuple[int, ...] | None:
        """Return the pairs of a step in each bin of margins; None of unpaired data. `totals`: as in `metrics`."""
        return tuple(int(number) for number in totals[_TOTALS:]) or None

    def _add_to_mean(self, inputs: SequenceSums) -> None:
        """Add the log-ratios of mismatched completions (kto), or the rewards of all completions (bco), in nats."""
        if self._section.name == "kto":
            ratios = inputs.policy[:, 1] - inputs.reference[:, 1]
        else:
            ratios = self._section.beta * (inputs.policy[:, 0] - inputs.reference[:, 0])
        self.mean[0] += ratios.sum()
        self.mean[1] += len(ratios)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Add up the mean of a step in the forward passes inside, which have no gradients."""
        self.mean.zero_()
        self._mode = "mean"
        try:
            with torch.no_grad():
                yield
        finally:
            self._mode = "train"

    def finish_mean(self) -> None:
        """Take the mean of the global batch, whose parts all ranks have added up: z₀ >= 0 of kto, δ of bco."""
        if self._section.name == "bco":
            self._seen_rewards += self.mean
            total, count = self._seen_rewards.tolist()
            self._shift = total / count
        else:
            total, count = self.mean.tolist()
            self._shift = max(0.0, total / count)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the log-probabilities of sequences in the forward passes inside, which have no gradients."""
        self._collected = []
        self._mode = "collect"
        try:
            with torch.no_grad():
                yield
        finally:
            self._mode = "train"

    def counted_sums(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return numbers and log-probabilities, [n] and [n, 2], of the pieces that count and were collected."""
        parts = [(part.pieces[part.is_counted], sums[part.is_counted]) for part, sums in self._collected]
        self._collected = []
        return parts

    def keep_reference(self) -> None:
        """Take what was collected as the reference of these micro-batches, for all passes until it is called again."""
        self._reference = [sums for _, sums in self._collected]
        self._collected = []
        self._started = 0

    def state(self) -> dict[str, float]:
        """Return what the next step needs of those before: of bco, the rewards so far."""
        if self._section.name != "bco":
            return {}
        total, count = self._seen_rewards.tolist()
        return {"reward_sum": total, "reward_count": count}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Set what `state` returned."""
        self._seen_rewards[0] = state.get("reward_sum", 0.0)
        self._seen_rewards[1] = state.get("reward_count", 0.0)
