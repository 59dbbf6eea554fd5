"""Known mistakes of preference tuning, put into a parallel run one by one: the diagnosis names each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_preferences import preference_data, small_llama

from toolkit.config.recipe import Recipe
from toolkit.data.samples.micro_batch import Sequences
from toolkit.data.samples.preference_samples import PreferenceSamples
from toolkit.engines.full_forward import FullForwardEngine
from toolkit.engines.objectives.formulas import FORMULAS, ObjectiveValue
from toolkit.engines.objectives.token_weights import TokenWeights
from toolkit.parity import Cause, ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

MODEL = small_llama(2, initializer_range=0.1, attention_dropout=0.1)


def split_a_pair_over_ranks() -> None:
    """One rank has the chosen completion of a pair alone."""
    start = TokenWeights.start

    def faulty(self: TokenWeights, sequences: Sequences | None) -> None:
        if sequences is not None and torch.distributed.get_rank() == 1:
            outside = 2 * len(sequences.pieces)
            numbers = sequences.numbers.masked_fill(sequences.numbers == 1, outside)
            sequences = replace(sequences, numbers=numbers)
        start(self, sequences)

    TokenWeights.start = faulty  # type: ignore[method-assign]


def leave_dropout_on_in_the_reference() -> None:
    def faulty(self: FullForwardEngine, micro_batches: Any) -> None:
        assert self.objective is not None
        self.dropout.start(3)
        with self.objective.collecting(), self._forward_only():
            for micro_batch in micro_batches:
                batch = self._local_micro_batch(micro_batch).to(self.device)
                self._losses(self._run(batch), batch)

    FullForwardEngine._collect_sums = faulty  # type: ignore[method-assign]


def take_the_coefficient_of_another_sequence() -> None:
    formula = FORMULAS["dpo"]

    def faulty(*arguments: Any) -> ObjectiveValue:
        value = formula(*arguments)
        return replace(value, slopes=value.slopes.flatten().roll(1).view_as(value.slopes))

    FORMULAS["dpo"] = faulty


def take_means_for_sums() -> None:
    inputs = TokenWeights._inputs

    def faulty(self: TokenWeights, policy: torch.Tensor, sequences: Sequences) -> Any:
        tokens = sequences.tokens.double().clamp(min=1.0)
        return inputs(self, policy / tokens, replace(sequences, reference=sequences.reference / tokens))

    TokenWeights._inputs = faulty  # type: ignore[method-assign]


def train_on_the_turn_before() -> None:
    tokens = PreferenceSamples.tokens

    def faulty(self: PreferenceSamples, index: int, held: Any = None) -> Any:
        input_ids, labels = tokens(self, index, held)
        for place, piece, side in self._sequences(index):
            length = int(self._places[piece, side])
            labels[place : place + length - 1] = input_ids[place + 1 : place + length]
        return input_ids, labels

    PreferenceSamples.tokens = faulty  # type: ignore[method-assign]


def read_the_reference_of_another_order() -> None:
    batch = PreferenceSamples.batch

    def faulty(self: PreferenceSamples, *arguments: Any, **options: Any) -> Any:
        made = batch(self, *arguments, **options)
        assert made.sequences is not None
        reference = made.sequences.reference.roll(1, dims=0)
        return replace(made, sequences=replace(made.sequences, reference=reference))

    PreferenceSamples.batch = faulty  # type: ignore[method-assign]


def take_the_coefficient_of_another_pair() -> None:
    """In the first step all pairs have the same coefficients."""
    formula = FORMULAS["dpo"]

    def faulty(*arguments: Any) -> ObjectiveValue:
        value = formula(*arguments)
        return replace(value, slopes=value.slopes.roll(1, dims=0))

    FORMULAS["dpo"] = faulty


FAULTS: dict[Callable[[], None], tuple[Cause, str]] = {
    split_a_pair_over_ranks: (Cause.PAIRS, "rank 1 has one completion of a pair without the other"),
    leave_dropout_on_in_the_reference: (Cause.REFERENCE, "dropout was on"),
    take_the_coefficient_of_another_sequence: (Cause.OBJECTIVE, "in step 1 the tokens of a completion have the weight"),
    take_the_coefficient_of_another_pair: (Cause.OBJECTIVE, "in another order than the completions"),
    take_means_for_sums: (Cause.OBJECTIVE, "mean log-probabilities of tokens where the baseline's gets their sums"),
    train_on_the_turn_before: (Cause.LABELS, "is of other turns, or of the prompt"),
    read_the_reference_of_another_order: (Cause.REFERENCE, "those of other completions"),
}
"""What the diagnosis says of each mistake."""


def _train(recipe: Recipe, fault: Callable[[], None] | None) -> ParityRun:
    if fault is not None:
        fault()
    return train_in_memory(recipe)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            marks=() if fault in (None, take_means_for_sums) else pytest.mark.whole,
            id="none" if fault is None else fault.__name__,
        )
        for fault in (None, *FAULTS)
    ],
)
def test_a_planted_fault_is_named(
    make_recipe: Callable[..., Recipe],
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    fault: Callable[[], None] | None,
) -> None:
    def make(cache: str, **changes: Any) -> Recipe:
        return make_recipe(
            model=MODEL,
            data=preference_data(tmp_path, "dpo", tmp_path / cache),
            train__steps=4,
            train__objective={"name": "dpo"},
            batch={"global_batch_size": 8, "micro_batch_size": 4},
            optimizer={"name": "adamw", "lr": 3e-4},
            schedule={"name": "constant"},
            **changes,
        )

    baseline = ranks(train_in_memory, 1, make("one", train__engine="reference"))[0]
    run = ranks(_train, 2, make("two", parallel={"dp": 2, "zero_stage": 1}), fault)[0]
    result = ParityResult.of(run, baseline)
    if fault is None:
        assert result.passed, str(result)
        return
    cause, says = FAULTS[fault]
    assert result.diagnosis is not None
    assert (result.diagnosis.cause, says in result.diagnosis.sentence) == (cause, True), str(result)
