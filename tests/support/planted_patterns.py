"""The pattern of each mistake that the diagnosis knows, planted in a synthetic run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from synthetic_run import (
    Array,
    baseline,
    changed,
    norm_of,
    with_completions,
    with_gradients,
    with_losses,
    with_norms,
    without_tensors,
)

from toolkit.parity import Cause, ParityRun
from toolkit.parity.first_batch import FirstBatch

BASELINE = baseline()
MIXTURE = baseline(experts=4)
PREFERENCES = with_completions(BASELINE)
WITHOUT_SAMPLES = replace(BASELINE, first_batch=FirstBatch())
Change = Callable[[ParityRun], ParityRun]


def turned(value: Array) -> Array:
    """A little longer, and pointing slightly elsewhere."""
    noise = np.random.default_rng(7).normal(size=value.shape)
    return (value + 0.1 * noise * np.abs(value).mean()).astype(value.dtype)


def unweighted(run: ParityRun) -> float:
    parts = run.micro_losses
    blocks = [parts[start : start + run.micro_batch_size] for start in range(0, len(parts), run.micro_batch_size)]
    means = [sum(loss for loss, _ in block) / sum(count for _, count in block) for block in blocks]
    return sum(means) / len(means)


def weighing(weights: list[float], *, only_layers: bool = False) -> Change:
    """A gradient in which samples count so many times; with `only_layers` that of matrices inside of layers alone."""

    def change(run: ParityRun) -> ParityRun:
        own = dict(run.first_gradients)
        targets = sum(count for _, count in run.micro_losses)
        for name, rows in run.first_batch.gradients.items():
            if only_layers and ("layers." not in name or own[name].ndim < 2):
                continue
            value = own[name].copy().reshape(-1)
            places = np.linspace(0, value.size - 1, rows.shape[1]).astype(int)
            value[places] = np.array(weights) @ rows / targets
            own[name] = value.reshape(own[name].shape)
        changed_run = run if only_layers else with_gradients(run, times(1.1))
        return replace(changed_run, first_gradients=own)

    return change


def with_bias(run: ParityRun, step: int, factor: float, *, layer: int = 1) -> ParityRun:
    """A mean output with `factor` biases more, in the first step (0) or after the first update (1)."""
    name = f"model.layers.{layer}.attn"
    bias = run.initial[f"{name}.bias"] + step * run.first_updates[f"{name}.bias"]
    outputs = [dict(means) for means in run.mean_outputs]
    for later in range(layer, len(outputs[step])):
        place = f"model.layers.{later}.attn"
        outputs[step][place] = outputs[step][place] + (factor * bias if later == layer else 0.3)
    return replace(run, mean_outputs=tuple(outputs))


def crossed_loss(run: ParityRun) -> float:
    """The loss if micro-batches of two samples get their labels in reverse order."""
    assert run.first_batch.crossed is not None
    order = [1, 0, 3, 2, 5, 4, 7, 6]
    targets = sum(count for _, count in run.micro_losses)
    return float(run.first_batch.crossed[range(8), order].sum() / targets)


def times(factor: float) -> Callable[[Array], Array]:
    return lambda value: value * np.float32(factor)


def other_loss(run: ParityRun) -> ParityRun:
    return with_losses(run, lambda step, loss: loss * 1.01)


def other_weights(run: ParityRun) -> ParityRun:
    """Other weights in the end."""
    return replace(run, parameters=changed(run.parameters, times(1.01), "embed"))


def other_outputs(first: str) -> Change:
    """Outputs that differ from the layer `first` on."""

    def change(run: ParityRun) -> ParityRun:
        names = list(run.outputs)
        late = names[names.index(first) :]
        return replace(
            other_loss(run),
            outputs={name: value * (1.1 if name in late else 1) for name, value in run.outputs.items()},
        )

    return change


def gradients(factor: float, *parts: str) -> Change:
    return lambda run: with_gradients(run, times(factor), *parts)


def norm_counting(run: ParityRun, *ranks: slice) -> ParityRun:
    """The mean of norms, each with some of the experts."""

    def counted(part: slice) -> float:
        return norm_of({name: g[part] if "experts" in name else g for name, g in run.first_gradients.items()})

    mean = float(np.mean([counted(part) for part in ranks]))
    return with_norms(run, lambda step, norm: mean if step == 1 else norm)


def updates(change: Callable[[str, Array], Array], **more: object) -> Change:
    return lambda run: replace(
        run, first_updates={name: change(name, value) for name, value in run.first_updates.items()}, **more
    )


def grown(factor: float, *, until: int = 99) -> Change:
    return lambda run: with_losses(run, lambda step, loss: loss * (1 + 2e-8 * factor ** min(step, until)))


def set_in(step: int) -> Change:
    return lambda run: with_losses(run, lambda place, loss: loss * (1.01 if place >= step else 1))


def completions(*, from_step: int = 1, **facts: Callable[[Array], Array]) -> Change:
    """Other facts of completions from this step on, and losses that follow."""

    def change(run: ParityRun) -> ParityRun:
        places = ("later_sequences",) if from_step > 1 else ("sequences", "later_sequences")
        other = {}
        for place in places:
            before = getattr(run, place)
            other[place] = replace(before, **{name: turn(getattr(before, name)) for name, turn in facts.items()})
        return replace(set_in(from_step)(run), **other)

    return change


def without_rejected(values: Array) -> Array:
    """Zero for the rejected completion of the first pair."""
    changed_values = values.copy()
    changed_values[1] = 0
    return changed_values


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What a mistake leaves behind, and what must be said about it."""

    name: str
    plant: Change
    rule: str
    cause: Cause
    says: str = ""
    baseline: ParityRun = BASELINE


BARE = without_tensors(BASELINE)
EQUAL = replace(BASELINE, micro_losses=tuple((4.6 * 20, 20) for _ in range(8)))
BY_LAYER = ("layers.0", "layers.1", "embed")

PATTERNS = (
    Pattern(
        name="a pair whose completions are on two ranks",
        plant=completions(targets=without_rejected, policy=without_rejected),
        baseline=PREFERENCES,
        rule="targets",
        cause=Cause.PAIRS,
        says="rank 0 has one completion of a pair without the other (rejected completion 0)",
    ),
    Pattern(
        name="prompts that are trained on",
        plant=completions(targets=lambda counts: counts + 3, policy=times(1.4)),
        baseline=PREFERENCES,
        rule="targets",
        cause=Cause.LABELS,
        says="chosen completion 0, rejected completion 0, chosen completion 1 and 5 more",
    ),
    Pattern(
        name="means of log-probabilities",
        plant=completions(policy=lambda sums: sums / PREFERENCES.sequences.targets),
        baseline=PREFERENCES,
        rule="inputs",
        cause=Cause.OBJECTIVE,
        says="divided by the number of its target tokens",
    ),
    Pattern(
        name="the reference of another order",
        plant=completions(reference=lambda sums: np.roll(sums, 2)),
        baseline=PREFERENCES,
        rule="inputs",
        cause=Cause.REFERENCE,
        says="those of other completions",
    ),
    Pattern(
        name="the reference of pairs outside of the batch",
        plant=completions(reference=lambda sums: PREFERENCES.references[10:14].reshape(-1)),
        baseline=PREFERENCES,
        rule="inputs",
        cause=Cause.REFERENCE,
        says="those of other completions",
    ),
    Pattern(
        name="a reference with dropout",
        plant=completions(reference=lambda sums: sums * np.linspace(0.98, 1.01, len(sums))),
        baseline=replace(PREFERENCES, masks_compared=4),
        rule="inputs",
        cause=Cause.REFERENCE,
        says="dropout was on",
    ),
    Pattern(
        name="another reference model",
        plant=completions(reference=lambda sums: sums * np.linspace(0.98, 1.01, len(sums))),
        baseline=PREFERENCES,
        rule="inputs",
        cause=Cause.REFERENCE,
        says="the reference has other weights",
    ),
    Pattern(
        name="coefficients of the other completion",
        plant=completions(coefficients=lambda slopes: np.roll(slopes, 1)),
        baseline=PREFERENCES,
        rule="coefficients",
        cause=Cause.OBJECTIVE,
        says="in step 1 the tokens of a completion have the weight of another one",
    ),
    Pattern(
        name="another beta",
        plant=completions(coefficients=times(2.0)),
        baseline=PREFERENCES,
        rule="coefficients",
        cause=Cause.OBJECTIVE,
        says="another objective, or another beta",
    ),
    Pattern(
        name="coefficients of the next pair",
        plant=completions(from_step=2, coefficients=lambda slopes: np.roll(slopes, 2)),
        baseline=PREFERENCES,
        rule="later_coefficients",
        cause=Cause.OBJECTIVE,
        says="in step 2 the tokens of a completion have the weight of another one",
    ),
    Pattern(
        name="another order of samples",
        plant=lambda run: replace(run, batches=("f" * 16, *run.batches[1:])),
        rule="samples",
        cause=Cause.DATA_ORDER,
        says="samples of step 1",
    ),
    Pattern(
        name="ranks of one model that read different samples",
        plant=lambda run: replace(run, batches=(*run.batches[:2], "a!=b", *run.batches[3:])),
        rule="samples",
        cause=Cause.DATA_ORDER,
        says="ranks that share a model read different samples in step 3",
    ),
    Pattern(
        name="other initial weights",
        plant=lambda run: replace(other_weights(run), initial=changed(run.initial, times(1.001), "layers.2.mlp")),
        rule="initial_weights",
        cause=Cause.INITIAL_WEIGHTS,
        says="model.layers.2.mlp.weight",
    ),
    Pattern(
        name="replicas that differ before the first step",
        plant=lambda run: replace(
            run, diverged_at_start=frozenset({"model.norm.weight"}), diverged=frozenset({"model.norm.weight"})
        ),
        rule="initial_weights",
        cause=Cause.INITIAL_WEIGHTS,
        says="start with different ones: model.norm.weight",
    ),
    Pattern(
        name="ranks that drop the same activations",
        plant=lambda run: replace(run, mask_faults=("ranks 0 and 1 draw the same masks in layer 2",), masks_compared=8),
        rule="dropout_masks",
        cause=Cause.DROPOUT,
        says="ranks 0 and 1 draw the same masks in layer 2. The same activations",
    ),
    Pattern(
        name="blocks of a sequence that merge wrongly",
        plant=lambda run: replace(other_outputs("model.layers.0")(run), attention_fault="a block is merged 2 times"),
        rule="shared_attention",
        cause=Cause.CONTEXT,
        says="before any step: a block is merged 2 times.",
    ),
    Pattern(
        name="experts of another rank",
        plant=lambda run: replace(
            other_weights(run), initial=changed(run.initial, times(1.001), "layers.2.mlp.experts")
        ),
        baseline=MIXTURE,
        rule="weights_at_start",
        cause=Cause.EXPERTS,
        says="only experts start from other weights (model.layers.2.mlp.experts.up)",
    ),
    Pattern(
        name="rows in another order",
        plant=other_outputs("model.layers.2"),
        baseline=MIXTURE,
        rule="between_router_and_experts",
        cause=Cause.EXPERTS,
        says="what comes to the experts of model.layers.2 is right",
    ),
    Pattern(
        name="another input of experts",
        plant=other_outputs("model.layers.2 before its experts"),
        baseline=MIXTURE,
        rule="forward_pass",
        cause=Cause.SHARD,
        says="model.layers.2 before its experts returns something else, while model.layers.1 agrees",
    ),
    Pattern(
        name="experts scaled by the ranks that share them out",
        plant=gradients(4, "experts"),
        baseline=MIXTURE,
        rule="gradients",
        cause=Cause.EXPERTS,
        says="all 4 times the baseline's (4)",
    ),
    Pattern(
        name="experts averaged with others",
        plant=lambda run: with_gradients(run, turned, "experts"),
        baseline=MIXTURE,
        rule="gradients",
        cause=Cause.EXPERTS,
        says="averaged over ranks that hold other experts",
    ),
    Pattern(
        name="no auxiliary loss",
        plant=lambda run: with_gradients(run, turned, "layers.0", "layers.1", "layers.2", "3.mlp.router", "3.norm"),
        baseline=MIXTURE,
        rule="routers",
        cause=Cause.BALANCING,
        says="from the last router on backward (model.layers.0.mlp.router.weight, ",
    ),
    Pattern(
        name="routers whose parts are not summed",
        plant=lambda run: replace(
            with_gradients(run, turned, "layers.0", "layers.1", "layers.2", "3.mlp.router", "3.norm"),
            diverged=frozenset({"model.layers.3.mlp.router.weight"}),
        ),
        baseline=MIXTURE,
        rule="routers",
        cause=Cause.ROUTER,
        says="the parts are not summed",
    ),
    Pattern(
        name="a norm without experts",
        plant=lambda run: norm_counting(run, slice(0)),
        baseline=MIXTURE,
        rule="norm",
        cause=Cause.CLIPPING,
        says="counts no experts",
    ),
    Pattern(
        name="a norm of one rank's experts",
        plant=lambda run: norm_counting(run, slice(2, 4)),
        baseline=MIXTURE,
        rule="norm",
        cause=Cause.CLIPPING,
        says="counts the experts of one of 2 ranks",
    ),
    Pattern(
        name="a mean of the ranks' norms",
        plant=lambda run: norm_counting(run, slice(0, 2), slice(2, 4)),
        baseline=MIXTURE,
        rule="norm",
        cause=Cause.CLIPPING,
        says="counts a mean over 2 ranks",
    ),
    Pattern(
        name="two updates for a global batch",
        plant=lambda run: replace(
            other_weights(run), learning_rates=tuple(rate for rate in run.learning_rates for _ in "ab")
        ),
        rule="number_of_updates",
        cause=Cause.BATCH_SIZE,
        says="24 updates of 12 global batches",
    ),
    Pattern(
        name="a loss that is not a number",
        plant=lambda run: with_losses(run, lambda step, loss: np.nan if step == 3 else loss),
        rule="not_finite",
        cause=Cause.NOT_FINITE,
        says="loss of step 3",
    ),
    Pattern(
        name="a loss that is not a number in a finished run",
        plant=lambda run: with_losses(run, lambda step, loss: np.nan if step == 3 else loss),
        baseline=BARE,
        rule="not_finite",
        cause=Cause.NOT_FINITE,
        says="the baseline's is not. Check",
    ),
    Pattern(
        name="a gradient that is not a number in every weight",
        plant=lambda run: replace(
            with_losses(run, lambda step, loss: np.nan if step == 3 else loss),
            parameters=changed(run.parameters, times(np.nan), "norm"),
        ),
        rule="not_finite",
        cause=Cause.NOT_FINITE,
        says="The update was applied: model.layers.0.norm.weight, ",
    ),
    Pattern(
        name="an infinite norm",
        plant=lambda run: with_norms(run, lambda step, norm: np.inf if step == 4 else norm),
        rule="not_finite",
        cause=Cause.NOT_FINITE,
        says="gradient norm of step 4",
    ),
    Pattern(
        name="a mean of the micro-batches' means",
        plant=lambda run: with_losses(run, lambda step, loss: unweighted(run) if step == 1 else loss),
        rule="token_weighting",
        cause=Cause.TOKEN_WEIGHTING,
        says="mean losses",
    ),
    Pattern(
        name="gradients twice as long", plant=gradients(2), rule="constant_factor", cause=Cause.SCALING, says="(2)"
    ),
    Pattern(
        name="loss and gradients of a quarter",
        plant=lambda run: with_losses(gradients(0.25)(run), lambda step, loss: loss / 4),
        rule="constant_factor",
        cause=Cause.SCALING,
        says="reported loss is off too",
    ),
    Pattern(
        name="embeddings with a wrong shard",
        plant=other_outputs("embeddings"),
        rule="forward_pass",
        cause=Cause.SHARD,
        says="input of the first layer",
    ),
    Pattern(
        name="a layer with a wrong shard",
        plant=other_outputs("model.layers.2"),
        rule="forward_pass",
        cause=Cause.SHARD,
        says="model.layers.2 returns something else, while model.layers.1 agrees",
    ),
    Pattern(
        name="positions that start again",
        plant=lambda run: replace(other_outputs("model.layers.0")(run), positions=(3.5, 17.5)),
        baseline=replace(BASELINE, positions=(7.5, 77.5)),
        rule="positions",
        cause=Cause.POSITIONS,
        says="told other positions",
    ),
    Pattern(
        name="layers in bf16",
        plant=lambda run: replace(other_outputs("model.layers.0")(run), dtypes=frozenset({"bfloat16", "float32"})),
        baseline=replace(BASELINE, dtypes=frozenset({"float32"})),
        rule="precision",
        cause=Cause.PRECISION,
        says="compute in bfloat16, the baseline's only in float32",
    ),
    Pattern(
        name="gradients that are not zeroed",
        plant=lambda run: replace(
            other_weights(run),
            update_gradients={name: 1.5 * value for name, value in run.first_gradients.items()},
        ),
        baseline=replace(BASELINE, update_gradients=BASELINE.first_gradients),
        rule="of_later_step",
        cause=Cause.ACCUMULATION,
        says="the right one plus 0.5 times that of step 1",
    ),
    Pattern(
        name="something that is kept between steps",
        plant=lambda run: replace(other_weights(run), update_gradients=changed(run.first_gradients, turned, "mlp")),
        baseline=replace(BASELINE, update_gradients=BASELINE.first_gradients),
        rule="of_later_step",
        cause=Cause.BACKWARD,
        says="kept from one step to the next",
    ),
    Pattern(
        name="a tied embedding that is summed twice",
        plant=gradients(2, "embed"),
        rule="wrong_gradients",
        cause=Cause.TYING,
        says="2 times the baseline's. Copies that are tied",
    ),
    Pattern(
        name="a bias that each of four ranks adds",
        plant=lambda run: with_bias(other_outputs("model.layers.1")(run), 0, 3.0),
        rule="in_first_step",
        cause=Cause.BIAS,
        says="model.layers.1.attn returns 3 times its bias more than the baseline's, in every channel: "
        "every one of 4 tensor-parallel ranks",
    ),
    Pattern(
        name="a bias that is left out after the first update",
        plant=lambda run: with_bias(set_in(2)(run), 1, -1.0),
        rule="after_first_update",
        cause=Cause.BIAS,
        says="the bias is not added at all",
    ),
    Pattern(
        name="a bias that is divided by two ranks",
        plant=lambda run: with_bias(set_in(2)(run), 1, -0.5),
        rule="after_first_update",
        cause=Cause.BIAS,
        says="only 1/2 of the bias is added",
    ),
    Pattern(
        name="labels in reverse order",
        plant=lambda run: with_losses(run, lambda step, loss: crossed_loss(run) if step == 1 else loss),
        rule="labels",
        cause=Cause.LABELS,
        says="they are those of a micro-batch's samples in reverse order",
    ),
    Pattern(
        name="labels that are not shifted",
        plant=lambda run: with_losses(run, lambda step, loss: loss * 0.7 if step == 1 else loss),
        rule="labels",
        cause=Cause.LABELS,
        says="the tokens themselves instead of the next ones",
    ),
    Pattern(
        name="a micro-batch whose gradient is added twice",
        plant=weighing([1, 1, 1, 1, 1, 1, 2, 2]),
        rule="sample_weights",
        cause=Cause.ACCUMULATION,
        says="micro-batch 3 counts once and 1 more",
    ),
    Pattern(
        name="a gradient of one of two ranks",
        plant=lambda run: replace(weighing([2, 2, 0, 0, 2, 2, 0, 0])(run), replicas=2),
        rule="sample_weights",
        cause=Cause.ALL_REDUCE,
        says="data-parallel rank 0 counts 2 times, data-parallel rank 1 does not count",
    ),
    Pattern(
        name="a gradient of equally weighted samples",
        plant=weighing([sum(range(3, 43, 5)) / 8 / count for count in range(3, 43, 5)]),
        rule="sample_weights",
        cause=Cause.TOKEN_WEIGHTING,
        says="mean of the samples' mean gradients",
    ),
    Pattern(
        name="a sample that is lost",
        plant=weighing([1, 1, 1, 0, 1, 1, 1, 1]),
        rule="sample_weights",
        cause=Cause.ACCUMULATION,
        says="some do not count once in the sum: sample 4 does not count",
    ),
    Pattern(
        name="weight gradients of a micro-batch that are computed twice",
        plant=weighing([1, 1, 1, 1, 1, 1, 2, 2], only_layers=True),
        rule="weight_gradients",
        cause=Cause.ACCUMULATION,
        says="micro-batch 3 counts once and 1 more",
    ),
    Pattern(name="a wrong softmax", plant=other_loss, rule="forward_pass", cause=Cause.FORWARD, says="softmax"),
    Pattern(
        name="another forward pass of a family without layer outputs",
        plant=lambda run: replace(other_loss(run), outputs={}),
        rule="forward_pass",
        cause=Cause.FORWARD,
        says="computes something else",
    ),
    Pattern(
        name="gradients of unequal micro-batches that are averaged",
        plant=lambda run: with_gradients(run, turned),
        baseline=WITHOUT_SAMPLES,
        rule="unequal_weights",
        cause=Cause.TOKEN_WEIGHTING,
        says="between 11 and 71 target tokens",
    ),
    Pattern(
        name="the same where micro-batches are equal",
        plant=lambda run: with_gradients(run, turned),
        baseline=with_losses(EQUAL, lambda step, loss: loss),
        rule="wrong_gradients",
        cause=Cause.BACKWARD,
    ),
    Pattern(
        name="an embedding that is not tied",
        plant=gradients(0.5, "embed"),
        rule="wrong_gradients",
        cause=Cause.TYING,
        says="lookup and from the head",
    ),
    Pattern(
        name="a scaled gradient between stages",
        plant=gradients(0.5, *BY_LAYER),
        rule="wrong_gradients",
        cause=Cause.STAGES,
        says="up to layer 1 is 0.5 times",
    ),
    Pattern(
        name="norms and biases that are not summed",
        plant=gradients(0.5, "norm.weight", "bias"),
        rule="wrong_gradients",
        cause=Cause.ALL_REDUCE,
        says="only norms and biases",
    ),
    Pattern(
        name="one layer",
        plant=lambda run: with_gradients(run, turned, "layers.2."),
        rule="wrong_gradients",
        cause=Cause.SHARD,
        says="only layer 2",
    ),
    Pattern(
        name="one matrix of every layer",
        plant=gradients(0.5, "mlp.weight"),
        rule="wrong_gradients",
        cause=Cause.ALL_REDUCE,
        says="only mlp.weight, in every layer",
    ),
    Pattern(
        name="wrong before a place and right after it",
        plant=lambda run: with_gradients(run, turned, "embed", "layers.0", "layers.1", "layers.2.norm"),
        rule="wrong_gradients",
        cause=Cause.ALL_REDUCE,
        says="right after model.layers.2.norm.weight",
    ),
    Pattern(
        name="wrong in all of the first layers",
        plant=lambda run: with_gradients(run, turned, "embed", "layers.0", "layers.1"),
        rule="wrong_gradients",
        cause=Cause.MESSAGES,
        says="right from layer 2 on",
    ),
    Pattern(
        name="gradients that follow no rule",
        plant=lambda run: with_gradients(run, turned, "layers.1.mlp", "layers.3.attn.weight"),
        rule="wrong_gradients",
        cause=Cause.BACKWARD,
        says="model.layers.1.mlp.weight, model.layers.3.attn.weight",
    ),
    Pattern(
        name="a norm of half the parameters",
        plant=lambda run: with_norms(run, lambda step, norm: norm * 0.5),
        rule="reported_norm",
        cause=Cause.CLIPPING,
        says="0.5 times that of its own gradient",
    ),
    Pattern(
        name="another norm in a finished run",
        plant=lambda run: with_norms(run, lambda step, norm: norm * 2),
        baseline=BARE,
        rule="first_norm",
        cause=Cause.BACKWARD,
        says="2 times the baseline's",
    ),
    Pattern(
        name="another learning rate from step 4 on",
        plant=lambda run: replace(set_in(5)(run), learning_rates=(0.1, 0.1, 0.1, *[0.05] * 9)),
        rule="schedule",
        cause=Cause.SCHEDULE,
        says="learning rate of step 4",
    ),
    Pattern(
        name="decay of all parameters",
        plant=lambda run: updates(lambda name, value: value - np.float32(0.01) * run.initial[name])(set_in(4)(run)),
        rule="first_update",
        cause=Cause.WEIGHT_DECAY,
        says="multiple of the weights",
    ),
    Pattern(
        name="decay of norms and biases",
        plant=lambda run: updates(
            lambda name, value: value - np.float32(0.01) * run.initial[name] if value.ndim < 2 else value
        )(set_in(4)(run)),
        rule="first_update",
        cause=Cause.WEIGHT_DECAY,
        says="in norms and biases",
    ),
    Pattern(
        name="a gradient that is not clipped",
        plant=lambda run: updates(lambda name, value: value * np.float32(3))(set_in(4)(run)),
        rule="first_update",
        cause=Cause.CLIPPING,
        says="3 times the baseline's everywhere",
    ),
    Pattern(
        name="ranks that clip by norms of their own",
        plant=lambda run: updates(
            lambda name, value: value * np.float32(1.5 if "mlp" in name else 2),
            diverged=frozenset({"model.norm.weight"}),
        )(set_in(4)(run)),
        rule="first_update",
        cause=Cause.CLIPPING,
        says="each rank clips by the norm of its own shard",
    ),
    Pattern(
        name="another optimizer",
        plant=lambda run: updates(lambda name, value: np.sign(value))(set_in(4)(run)),
        rule="first_update",
        cause=Cause.OPTIMIZER,
        says="another optimizer",
    ),
    Pattern(
        name="replicas that diverge",
        plant=lambda run: replace(run, diverged=frozenset({"model.norm.weight"})),
        rule="diverged_replicas",
        cause=Cause.REPLICAS,
        says="model.norm.weight",
    ),
    Pattern(
        name="biases that are added twice",
        plant=set_in(2),
        rule="second_forward_pass",
        cause=Cause.FORWARD,
        says="a parameter that was zero at first",
        baseline=replace(BASELINE, initial=changed(BASELINE.initial, times(0), "bias")),
    ),
    Pattern(
        name="a head that keeps the embedding from before the update",
        plant=set_in(2),
        rule="second_forward_pass",
        cause=Cause.STALE,
        says="computes with weights from before the update",
    ),
    Pattern(name="chaos", plant=grown(3), rule="growth", cause=Cause.CHAOS, says="cannot tell from rounding"),
    Pattern(
        name="a difference that sets in at once",
        plant=set_in(6),
        rule="growth",
        cause=Cause.OPTIMIZER,
        says="step 6 is not",
    ),
    Pattern(
        name="a norm that jumps while the loss is right",
        plant=lambda run: with_norms(run, lambda step, norm: norm * (1.5 if step > 6 else 1)),
        rule="growth",
        cause=Cause.OPTIMIZER,
        says="step 7 is not",
    ),
    Pattern(
        name="other weights after equal curves",
        plant=other_weights,
        rule="growth",
        cause=Cause.OPTIMIZER,
        says="trained weights do not",
    ),
    Pattern(
        name="a run that ends early",
        plant=lambda run: replace(
            run,
            curve=replace(run.curve, losses=run.curve.losses[:5], grad_norms=run.curve.grad_norms[:5]),
            learning_rates=run.learning_rates[:5],
        ),
        rule="growth",
        cause=Cause.UNKNOWN,
        says="ends at step 5",
    ),
)
