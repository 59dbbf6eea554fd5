"""The worst moment of a stage's passes: activations, fresh gradients, and autocast's copies of weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.rank_states import RankStates
from toolkit.estimate.recorded.activations import Activations, Moment, UnrecordedInLayer
from toolkit.estimate.training_setup import TrainingSetup

_CAST_BYTES = 2
"""Bytes of an element of autocast's copies of weights."""


@dataclass(frozen=True, kw_only=True)
class WorstMoment:
    """What is live at the worst moment of the passes of a stage, beside model states and buffers, in bytes."""

    activations: int
    fresh_gradients: int
    """Gradients of weights that the backward pass has allocated so far."""
    casts: int
    """Autocast's copies of weights in 16 bits."""

    @property
    def total(self) -> int:
        """All bytes that are live."""
        return self.activations + self.fresh_gradients + self.casts


def worst_moment(
    setup: TrainingSetup,
    recorded: Activations,
    rank: RankStates,
    layers: range,
    *,
    in_flight: int,
    unrecorded: UnrecordedInLayer,
) -> WorstMoment:
    """Find the worst moment of a stage with these layers, of which a backward or the forward pass may have it.

    Autocast keeps its copies of weights with the activations of each micro-batch. Under recomputation those of the
    forward pass, which it keeps of weights that train, are freed when the loss begins, and backward makes those of a
    layer again. `unrecorded`: what the recording of a layer's backward pass lacks.
    """
    params = rank.params
    if not rank.copies_weights:
        moment = _recorded_moment(setup, recorded, rank, layers, in_flight=in_flight, unrecorded=unrecorded)
        return WorstMoment(activations=moment.activations, fresh_gradients=moment.gradients, casts=0)
    if setup.layout.recompute != "full":
        moment = _recorded_moment(
            setup, recorded, rank, layers, in_flight=in_flight, unrecorded=unrecorded, casts=casts_to_come(params)
        )
        casts = _CAST_BYTES * params.matrices * in_flight
        return WorstMoment(activations=moment.activations, fresh_gradients=moment.gradients, casts=casts)
    moment = _recorded_moment(setup, recorded, rank, layers, in_flight=in_flight, unrecorded=unrecorded)
    in_backward = WorstMoment(
        activations=moment.activations,
        fresh_gradients=moment.gradients,
        casts=_casts_while_recomputing(params),
    )
    in_forward = _moment_of_forward_pass(setup, recorded, params, layers)
    return in_forward if in_forward.total > in_backward.total else in_backward


def casts_to_come(params: RankParameters) -> list[int]:
    """Bytes of autocast's copies of weights that are not made yet: before the layers, and at the end of each."""
    whole = _CAST_BYTES * params.matrices
    made = accumulate((_CAST_BYTES * numel for numel in params.layer_matrices), initial=0)
    return [whole - copied for copied in made]


def _recorded_moment(
    setup: TrainingSetup,
    recorded: Activations,
    rank: RankStates,
    layers: range,
    *,
    in_flight: int,
    unrecorded: UnrecordedInLayer,
    casts: Sequence[int] = (),
) -> Moment:
    """Return the worst moment of the recording. `casts`: as `casts_to_come`; the others are those of `worst_moment`."""
    params = rank.params
    bytes_of_layer = rank.states.fresh_layer
    return recorded.worst_moment(
        layers,
        in_flight=in_flight,
        gradients_kept=[bytes_of_layer * numel // max(1, params.trained_layer) for numel in params.trained_layers],
        casts_to_come=casts,
        offloaded=setup.layout.offload_activations,
        unrecorded=unrecorded,
    )


def _casts_while_recomputing(params: RankParameters) -> int:
    """Bytes of autocast's copies in the backward pass: of what is in no layer, and of the largest layer."""
    outside = params.matrices - sum(params.layer_matrices)
    return _CAST_BYTES * (outside + max(params.layer_matrices, default=0))


def _moment_of_forward_pass(
    setup: TrainingSetup, recorded: Activations, params: RankParameters, layers: range
) -> WorstMoment:
    """Return the worst moment before the loss under recomputation, with the copies that autocast keeps until then.

    Where some weights are frozen, autocast keeps copies of those that train.
    """
    layer_numels = params.layer_matrices
    kept_numel = params.matrices
    if params.frozen.numel:
        layer_numels = params.trained_matrices
        kept_numel = sum(layer_numels)
    casts = _CAST_BYTES * kept_numel
    live = recorded.forward_peak(
        layers,
        casts=[_CAST_BYTES * numel for numel in layer_numels],
        offloaded=setup.layout.offload_activations,
    )
    return WorstMoment(activations=live - casts, fresh_gradients=0, casts=casts)
