"""Check that a family supports a parallelism: a tiny partitioned model has the loss and gradients of the full one.

All stages run in this process, one after the other; what a pipeline sends between ranks is detached and handed on.
Every parameter is random, norms and biases too, so that no part is hidden behind a zero or a one.
"""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.errors import LayoutError, ModelError
from toolkit.model_init.model_modules import cast
from toolkit.models.chunked_head import HeadFormula
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.context.attention import NAME, attending, register
from toolkit.parallel.context.exchange import make_exchange
from toolkit.parallel.context.sequence import SequenceSlice
from toolkit.parallel.experts.sharding import ExpertSharder
from toolkit.parallel.model_structure import ModelStructure, analyze_model, check_model_kind, list_layers
from toolkit.parallel.pipeline.stage import PipelineStage
from toolkit.parallel.shard import shard_of
from toolkit.parallel.tensor.parallelize import TensorParallelizer, mark_replicated
from toolkit.parallel.tensor.vocabulary import VocabParallelHead, VocabularyShard, vocab_parallel_token_loss_sum
from toolkit.parallel.tiny_model import VOCABULARY, brief, default_config, tiny_config

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-4
MOST_PARAMETERS = 30_000_000
BOUNDS = (0, 1, 3, 4)
"""The stages of the four layers: embeddings and a layer, two layers, a layer and the head."""
_RESTARTS = (*range(5), *range(7))
"""Positions of a sample that holds two documents."""
_SAMPLES = 2


class InexactError(ModelError):
    """A partitioned model whose loss or gradients differ from the full model."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Loss and gradients of one forward and backward pass."""

    loss: float
    gradients: Mapping[str, torch.Tensor]

    def check(self, gradients: Mapping[str, torch.Tensor], loss: float, situation: str) -> None:
        """Raise InexactError where this differs from what the whole model gives."""
        if not abs(self.loss - loss) <= LOSS_TOLERANCE * max(1.0, abs(loss)):
            raise InexactError(f"{situation}the loss is {self.loss:.7f} and should be {loss:.7f}")
        for name, wanted in gradients.items():
            got = self.gradients.get(name)
            if got is None:
                raise InexactError(f"{situation}{name} gets no gradient")
            scale = float(wanted.norm())
            error = float((got - wanted).norm())
            if not error <= GRADIENT_TOLERANCE * scale + 1e-9:
                raise InexactError(f"{situation}the gradient of {name} is off by {error / (scale + 1e-12):.0e}")


def check_pipeline(model_type: str) -> None:
    """Partition a tiny model into three stages. Raises ModelError with the reason where that fails or is not exact."""
    _check_kind(model_type)
    model = tiny_model(model_type)
    # On the meta device, as a model that is too large for one rank is examined.
    structure = analyze_model(_on_meta(model))
    if structure.count != BOUNDS[-1]:
        raise ModelError(f"the tiny model has {structure.count} layers instead of {BOUNDS[-1]}")
    for situation, inputs, labels in situations(model):
        whole = pass_whole(model, inputs, labels)
        pass_stages(model, structure, inputs, labels).check(whole.gradients, whole.loss, situation)


def _check_kind(model_type: str) -> None:
    """Raise ModelError for what cannot be partitioned into layers, before a tiny model is built."""
    check_model_kind(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), default_config(model_type))


def parallelize(
    model: PreTrainedModel,
    structure: ModelStructure,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
    expert: dist.ProcessGroup | None = None,
    inner: bool = False,
) -> None:
    """Shard a whole model in place: over `group`, and its experts also over `expert`."""
    alone, _ = dist.new_subgroups(1)
    sharder = ExpertSharder(model, group, expert or alone, inner=inner, sequence_parallel=sequence_parallel)
    if group.size() == 1:
        for index, layer in enumerate(structure.layer_list(model)):
            sharder.shard_layer(layer, f"{structure.layers}.{index}")
        mark_replicated(model, structure.tied)
        return
    parallelizer = TensorParallelizer(model, structure, group, sequence_parallel=sequence_parallel, experts=sharder)
    for index in range(structure.count):
        parallelizer.parallelize_layer(index)
    parallelizer.parallelize_vocabulary()


def check_tensor(
    model_type: str,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = False,
    inner: bool = False,
    expert: dist.ProcessGroup | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Split a tiny model over `group`; to be called on each of its ranks. Raises ModelError as check_pipeline does.

    `inner`: split each expert instead of sharing them out. `expert`: ranks with samples of their own that share out
    experts. `changes`: fields of its config, instead of the family's defaults; lists as tuples, to be remembered.
    """
    if group.size() > 1:
        _check_kind(model_type)
    analyze = analyze_model if group.size() > 1 else list_layers
    model = _reference(model_type, chosen := tuple(changes.items()))
    with _by_default(_dtype(model_type)):
        structure, sharded = analyze(_on_meta(model)), copy.deepcopy(model)
        try:
            parallelize(sharded, structure, group, sequence_parallel=sequence_parallel, expert=expert, inner=inner)
        except (ModelError, LayoutError) as error:
            # Ours say what was given, the reason, and what to do; the reason alone is wanted.
            raise ModelError(error.refusal.reason if error.refusal else str(error)) from error
        for situation, inputs, labels, whole in _reference_passes(model_type, chosen):
            shards = {name: shard_of(parameter) for name, parameter in sharded.named_parameters()}
            lost = whole.gradients.keys() - {shard.name for shard in shards.values()}
            if lost:
                raise InexactError(f"{situation}no rank holds {min(lost)}")
            wanted = {
                name: shard.take(whole.gradients[shard.name])
                for name, shard in shards.items()
                if shard.name in whole.gradients
            }
            pass_tensor_rank(sharded, inputs, labels, group, expert).check(wanted, whole.loss, situation)


CONTEXT_LENGTH = 16
"""Positions of a sample that ranks share: longer than the windows and chunks of `_short_windows`."""
_DOCUMENTS = ((0,), (0, 7))
"""Where documents of the two samples begin."""


def check_context(model_type: str, group: dist.ProcessGroup, exchange: Literal["gather", "ring"] = "gather") -> None:
    """Let the ranks of `group` share the sequences of a tiny model; to be called on each of them. Raises ModelError.

    The oracle is the family's own attention on each document by itself, which needs no mask between documents.
    """
    _check_kind(model_type)
    register()
    model = _reference(model_type, tuple(_short_windows(model_type).items()))
    with _by_default(_dtype(model_type)):
        shared = copy.deepcopy(model)
        try:
            shared.set_attn_implementation(NAME)
        except (ValueError, KeyError) as error:
            raise ModelError("its attention is not on the attention interface of transformers") from error
        if shared.config._attn_implementation != NAME or not getattr(shared, "_supports_attention_backend", True):
            raise ModelError("its attention is not on the attention interface of transformers")
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ModelError("it takes no position_ids")
        chance = torch.Generator().manual_seed(1)
        ids, labels = (torch.randint(3, VOCABULARY, (2, CONTEXT_LENGTH), generator=chance) for _ in range(2))
        whole = _pass_documents(model, ids, labels)
        try:
            found = pass_context_rank(shared, ids, labels, group, exchange)
        except (TypeError, AttributeError) as error:
            if "'SequenceView'" not in str(error):
                raise
            raise ModelError("it computes with masks, and context parallelism makes none") from error
        found.check(whole.gradients, whole.loss, "")


def _short_windows(model_type: str) -> dict[str, Any]:
    given = default_config(model_type).to_dict()
    return {name: 6 for name in ("sliding_window", "attention_chunk_size") if given.get(name)}


def _pass_documents(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> Passed:
    """One pass over each document by itself."""
    model = copy.deepcopy(model)
    total = 0.0
    for sample, starts in enumerate(_DOCUMENTS):
        for start, stop in zip(starts, (*starts[1:], CONTEXT_LENGTH), strict=True):
            logits = model(input_ids=ids[sample : sample + 1, start:stop], use_cache=False).logits
            loss = _loss(logits, labels[sample : sample + 1, start:stop]) * (stop - start) / labels.numel()
            loss.backward()
            total += loss.item()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return Passed(loss=total, gradients=gradients)


def pass_context_rank(
    shared: PreTrainedModel,
    ids: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup,
    exchange: Literal["gather", "ring"],
) -> Passed:
    """One pass over this rank's part of the sequences; loss and gradients are summed over the ranks."""
    sequence = SequenceSlice(rank=group.rank(), ranks=group.size(), length=CONTEXT_LENGTH, starts=_DOCUMENTS)
    own = sequence.positions()
    rows = [torch.cat([torch.arange(n) for n in np.diff((*starts, CONTEXT_LENGTH))]) for starts in _DOCUMENTS]
    with attending(sequence, make_exchange(group, exchange)):
        logits = shared(input_ids=ids[:, own], position_ids=torch.stack(rows)[:, own], use_cache=False).logits
    loss = _loss(logits, labels[:, own]) / group.size()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    gradients = {name: value.grad for name, value in shared.named_parameters() if value.grad is not None}
    for value in gradients.values():
        dist.all_reduce(value, group=group)
    return Passed(loss=total.item(), gradients=gradients)


def _dtype(model_type: str) -> torch.dtype:
    """fp64, except for a family whose router accepts only fp32."""
    return torch.float32 if model_type == "inkling2_text" else torch.float64


@lru_cache(maxsize=1)
def _reference(model_type: str, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    """Return the full model. Ranks add up in another order than one; in fp64 that stays far below the tolerance."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in changes}
    model = tiny_model(model_type, values).to(_dtype(model_type))
    # grouped_mm, the default, has no fp64.
    model.set_experts_implementation("eager" if model_type == "gpt_oss" else "batched_mm")
    return model


@lru_cache(maxsize=1)
def _reference_passes(
    model_type: str, changes: tuple[tuple[str, Any], ...]
) -> list[tuple[str, tuple[torch.Tensor, ...], torch.Tensor, Passed]]:
    """Return (name, inputs, labels, pass) of the full model, which a rank compares with those of several groups."""
    model = _reference(model_type, changes)
    return [(name, inputs, labels, pass_whole(model, inputs, labels)) for name, inputs, labels in situations(model)]


def situations(model: PreTrainedModel) -> Iterator[tuple[str, tuple[torch.Tensor, ...], torch.Tensor]]:
    """(name, inputs, labels): one document a sample, and several where the model takes positions."""
    chance = torch.Generator().manual_seed(1)
    shape = (_SAMPLES, len(_RESTARTS))
    ids, labels = (torch.randint(3, VOCABULARY, shape, generator=chance) for _ in range(2))
    yield "", (ids,), labels
    if "position_ids" in inspect.signature(model.forward).parameters:
        yield "with packed documents ", (ids, torch.tensor(_RESTARTS).expand(shape)), labels


def tiny_model(model_type: str, changes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedModel:
    """A small model of this type in which every parameter is random, ready to be compared. Raises ModelError."""
    return _random_model(tiny_config(model_type, **changes))


def _random_model(config: Any) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).num_parameters()
        if count > MOST_PARAMETERS:
            raise ModelError(f"no tiny config: it has {count / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"no tiny model: {brief(error)}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                # What starts at a constant (a norm, a bias, a gate) is moved off it; weights keep their scale.
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                parameter.add_(torch.randn_like(parameter) * (0.1 if spread == 0.0 else spread / 2))
    return model.eval()


def check_rounded(model_type: str, *, buffers: bool = True) -> None:
    """Run a pass with weights in 16 bits, and `buffers` too. Raises ModelError where the family mixes dtypes."""
    model = tiny_model(model_type).train()
    if buffers:
        model.to(torch.bfloat16)
    else:
        cast(model, torch.bfloat16)
    _check_pass(model)


def check_autocast(model_type: str) -> None:
    """Run a pass under autocast. Raises ModelError where the family mixes what is cast with what is not."""
    model = tiny_model(model_type).train()
    with torch.autocast("cpu", torch.bfloat16):
        _check_pass(model)


def check_fsdp(model_type: str) -> None:
    """Raise ModelError where a parameter that accelerate shards with the head is tied to one that it does not."""
    tied = type(tiny_model(model_type))._tied_weights_keys or {}
    if any(name.endswith(".bias") for name in tied):
        raise ModelError("the bias of its head is tied, to a parameter outside of the group that FSDP shards")


def _check_pass(model: PreTrainedModel) -> None:
    _, inputs, labels = next(situations(model))
    try:
        pass_whole(model, inputs, labels)
    except RuntimeError as error:
        raise ModelError(brief(error)) from error


def find_logits(model_type: str) -> str:
    """Find how a family's logits follow from the products of its head, and compare the loss inside the head with that
    of full logits. Returns a HeadFormula's text. Raises ModelError with the reason where there is none.
    """
    config = tiny_config(model_type)
    text = config.get_text_config(decoder=True)
    fields = [name for name, value in text.to_dict().items() if _OF_LOGITS.search(name) and _is_factor(value)]
    for number, name in enumerate(fields):
        setattr(text, name, 0.3 + 0.4 * number)
    model = _random_model(config)
    formula = _formula_of(model, text, fields)
    for situation, inputs, labels in situations(model):
        whole, inside = pass_whole(model, inputs, labels), copy.deepcopy(model)
        loss = LossInHead.of(inside, formula)
        if loss is None:
            raise ModelError("its head is no linear layer")
        loss.labels, loss.chunk_tokens = labels, lambda tokens, rows: 5
        names = dict(zip(("input_ids", "position_ids"), inputs, strict=False))
        total = inside(**names, use_cache=False).loss / labels.numel()
        total.backward()
        gradients = {name: value.grad for name, value in inside.named_parameters() if value.grad is not None}
        Passed(loss=total.item(), gradients=gradients).check(whole.gradients, whole.loss, situation)
    return str(formula)


_OF_LOGITS = re.compile("logit|lm_head|output_multiplier")


def _is_factor(value: Any) -> bool:
    return value is None or isinstance(value, float)


def _formula_of(model: PreTrainedModel, config: Any, fields: list[str]) -> HeadFormula:
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError("its head is no linear layer")
    products: list[torch.Tensor] = []
    handle = head.register_forward_hook(lambda module, arguments, result: products.append(result))
    _, inputs, labels = next(situations(model))
    with torch.no_grad():
        logits = model(input_ids=inputs[0], use_cache=False).logits
    handle.remove()
    if len(products) != 1 or products[0].shape != (*labels.shape, VOCABULARY):
        raise ModelError("its head does not run once, for all positions")
    choices = product(*([None, "cap"] if "cap" in name else [None, "*", "/"] for name in fields))
    for signs in sorted(choices, key=lambda signs: len(signs) - signs.count(None)):
        steps = tuple((sign, name) for sign, name in zip(signs, fields, strict=True) if sign is not None)
        formula = HeadFormula(steps=steps)
        scale, cap = formula.values(config)
        found = products[0] * scale if cap is None else cap * torch.tanh(products[0] * scale / cap)
        if torch.allclose(found, logits, rtol=1e-4, atol=1e-5):
            return formula
    raise ModelError("its logits are no known function of what its head returns")


def pass_whole(model: PreTrainedModel, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> Passed:
    """One pass through a copy of the model."""
    model = copy.deepcopy(model)
    names = dict(zip(("input_ids", "position_ids"), inputs, strict=False))
    loss = _loss(model(**names, use_cache=False).logits, labels)
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return Passed(loss=loss.item(), gradients=gradients)


def pass_stages(
    model: PreTrainedModel, structure: ModelStructure, inputs: tuple[torch.Tensor, ...], labels: torch.Tensor
) -> Passed:
    """One pass through the stages of copies of the model, forward in order and backward in reverse."""
    stages = [
        PipelineStage(copy.deepcopy(model), structure, bounds=BOUNDS, stages=[stage])
        for stage in range(len(BOUNDS) - 1)
    ]
    for stage in stages:
        stage.is_packed = len(inputs) > 1
    received, sent = [], []
    for stage in stages[:-1]:
        received.append(inputs[0])
        hidden, *rest = stage(inputs)
        sent.append(hidden)
        inputs = (hidden.detach().requires_grad_(), *rest)
    received.append(inputs[0])
    loss = _loss(stages[-1](inputs), labels)
    loss.backward()
    for hidden, arrived in zip(reversed(sent), reversed(received), strict=False):
        if arrived.grad is not None:  # None where a stage is broken: its parameters then miss their gradients
            hidden.backward(arrived.grad)
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, value in stage.model.named_parameters():
            if value.grad is not None:
                name = structure.tied.get(name, name)
                gradients[name] = gradients[name] + value.grad if name in gradients else value.grad
    return Passed(loss=loss.item(), gradients=gradients)


def pass_tensor_rank(
    sharded: PreTrainedModel,
    inputs: tuple[torch.Tensor, ...],
    labels: torch.Tensor,
    group: dist.ProcessGroup,
    expert: dist.ProcessGroup | None = None,
) -> Passed:
    """One pass through this rank's part of a split model; gradients under the names that they have here.

    With `expert` of its own samples; what these ranks replicate is then summed as data parallelism does.
    """
    sharded.zero_grad()
    replicas = 1 if expert is None else expert.size()
    if expert is not None:
        inputs = tuple(x[expert.rank() :: replicas] for x in inputs)
        labels = labels[expert.rank() :: replicas]
    names = dict(zip(("input_ids", "position_ids"), inputs, strict=False))
    logits = sharded(**names, use_cache=False).logits
    if isinstance(sharded.get_output_embeddings(), VocabParallelHead):
        vocabulary = VocabularyShard.of(VOCABULARY, group)
        loss = vocab_parallel_token_loss_sum(logits, labels, vocabulary, group) / labels.numel()
    else:
        loss = _loss(logits, labels)
    (loss / replicas).backward()
    loss = loss.detach() / replicas
    gradients = {name: value.grad for name, value in sharded.named_parameters() if value.grad is not None}
    if expert is not None:
        dist.all_reduce(loss, group=expert)
        for name, value in sharded.named_parameters():
            if name in gradients and not shard_of(value).over_experts:
                dist.all_reduce(gradients[name], group=expert)
    return Passed(loss=loss.item(), gradients=gradients)


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    """For families that make tensors of their own without asking which dtype the hidden state has."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _on_meta(model: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
