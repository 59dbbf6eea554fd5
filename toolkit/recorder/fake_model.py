"""A rank's part of a model on fake tensors: parameters of any size that take no memory.

The model is built, sharded and recomputed by the code that trains it. Of decoder layers that are alike only a few are
kept; the others are skipped, as on a pipeline stage that does not have them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.estimate.recorded.recording import RankPass
from toolkit.estimate.trainable import Trainable
from toolkit.model_init.selective_recompute import recompute_attention
from toolkit.models.families.spec import SPELLINGS
from toolkit.parallel.context import attention
from toolkit.parallel.experts.sharding import ExpertSharder, experts_in
from toolkit.parallel.loss import token_loss_sum
from toolkit.parallel.model_structure import ModelStructure, analyze_model
from toolkit.parallel.pipeline.stage import NonLocalLayer, PipelineStage
from toolkit.parallel.pipeline.weight_gradients import WeightGradients
from toolkit.parallel.tensor.parallelize import TensorParallelizer
from toolkit.parallel.tensor.vocabulary import VocabularyShard, vocab_parallel_token_loss_sum
from toolkit.recorder.chunked_loss import ChunkedLoss, HiddenStates
from toolkit.recorder.frozen import RecordedAdapters, freeze, receives_gradients
from toolkit.recorder.gpu_kernels import as_autocast, attend
from toolkit.recorder.routing import groups

_MOST_POSITIONS = 2048
_FLASH = "fused_without_mask"  # "flash" in a name would make transformers look for a package
_BLOCKS = "blocks_without_mask"


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    """A model, or a stage of it, in training mode. `running`: indices of the decoder layers that run."""

    model: PreTrainedModel
    stage: PipelineStage | None
    structure: ModelStructure
    running: tuple[int, ...]
    pattern: tuple[int, ...]
    """The kind of every layer."""
    loss_sum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    hidden: int
    window: int | None
    """Positions that a layer with a sliding window, or with chunks, attends to."""
    weight_gradients: WeightGradients | None = None
    """The queue in which a split backward pass leaves the gradients of weights; None where the pass is whole."""

    @property
    def positions(self) -> int:
        """Positions of the longest sample."""
        config = text_config(self.model)
        numbers = (getattr(config, name, None) for name in SPELLINGS["positions"])
        return int(next(filter(None, numbers), _MOST_POSITIONS))

    @property
    def has_learned_positions(self) -> bool:
        """Whether positions are rows of a table that is learned."""
        return has_position_table(self.positions, self.model)

    @property
    def has_experts(self) -> bool:
        """Whether layers have routed experts."""
        return any(True for _ in experts_in(self.model))

    @property
    def layers(self) -> nn.ModuleList:
        return self.structure.layer_list(self.model)


def has_position_table(positions: int, model: nn.Module) -> bool:
    """Whether an embedding may be one of positions: by its number of rows, some of which may be for padding."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return any(0 <= table.num_embeddings - positions <= 4 for table in tables)


Mode = FakeTensorMode | torch.device


def tensors_without_memory(rank_pass: RankPass) -> Mode:
    """A context whose tensors take no memory: fake ones, or the meta device's.

    The meta device gives the same events in a third of the time, but has no kernels of a CPU and no autocast.
    """
    is_plain = rank_pass.computation.device == "cuda" and rank_pass.precision != "autocast"
    return torch.device("meta") if is_plain else FakeTensorMode(allow_non_fake_inputs=True)


def autocast(rank_pass: RankPass) -> torch.autocast:
    """Return the autocast context of products, which is enabled where the precision of the pass is `autocast`."""
    return torch.autocast("cpu", torch.bfloat16, enabled=rank_pass.precision == "autocast")


def build(rank_pass: RankPass, mode: Mode) -> FakeModel:
    """Build the model of a pass. The process group is that of its tensor-parallel ranks."""
    layout = rank_pass.layout
    model = _hugging_face_model(rank_pass)
    structure = structure_of(rank_pass.config, model)
    layers = structure.layer_list(model)
    trainable = Trainable.parse(rank_pass.computation.trainable or "all")
    freeze(model, trainable)
    pattern = kinds_of(model, layers, receives_gradients(model, layers, recomputes=layout.recompute == "full"))
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    tensor_group, expert_group = groups(rank_pass)
    sharding = _Sharding(rank_pass, model, structure, tensor_group, expert_group, has_adapters=bool(trainable.rank))
    stage = _stage(rank_pass, model, structure)
    running = skip_similar(layers, pattern, structure, splits_sequence=layout.sequence_parallel)
    with mode:
        _make_fake(model)
        if stage is not None:
            stage.cast_nonlocal(_dtype(rank_pass))
        sharding.shard(running, has_embeddings=stage is None or stage.is_first)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    model.config.dtype = _dtype(rank_pass)
    _enable_recompute(rank_pass, model)
    (model if stage is None else stage).train()
    vocabulary_shard = VocabularyShard.of(vocabulary, tensor_group) if layout.tp > 1 else None
    weight_gradients = _queued_weight_gradients(rank_pass, model, layers)
    return FakeModel(
        model=model,
        stage=stage,
        structure=structure,
        running=running,
        pattern=pattern,
        loss_sum=_loss_sum(rank_pass, model, vocabulary_shard, tensor_group),
        hidden=int(text_config(model).hidden_size),
        window=_window(rank_pass, model),
        weight_gradients=weight_gradients,
    )


def _window(rank_pass: RankPass, model: PreTrainedModel) -> int | None:
    """Return the positions from which masks of a window or of chunks appear; None where none do."""
    if rank_pass.computation.attention == "blocks":
        return None
    text = text_config(model)
    return getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)


def _enable_recompute(rank_pass: RankPass, model: PreTrainedModel) -> None:
    """Let the backward pass compute again what the layout says."""
    recompute = rank_pass.layout.recompute
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif recompute == "selective":
        recompute_attention(model)


def _queued_weight_gradients(
    rank_pass: RankPass, model: PreTrainedModel, layers: nn.ModuleList
) -> WeightGradients | None:
    """Return the queue in which a split backward pass leaves the gradients of weights; None where it is whole."""
    if rank_pass.splits == "no":
        return None
    weight_gradients = WeightGradients()
    weight_gradients.connect(model if rank_pass.splits == "all" else layers)
    return weight_gradients


def _dtype(rank_pass: RankPass) -> torch.dtype:
    """Return the dtype of the weights."""
    return torch.bfloat16 if rank_pass.precision == "bf16" else torch.float32


def _hugging_face_model(rank_pass: RankPass) -> PreTrainedModel:
    """Build the whole model on the meta device."""
    facts = json.loads(rank_pass.config)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    kind = rank_pass.computation.attention
    registered_name = {"flash": _FLASH, "blocks": _BLOCKS}.get(kind, kind)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=registered_name, dtype=_dtype(rank_pass)
        )
    model.tie_weights()
    return model


class _Sharding:
    """Shards the model over tensor-parallel and expert-parallel ranks, with adapters where it has them.

    It is made before the tensors of the model become fake, and shards after.
    """

    def __init__(
        self,
        rank_pass: RankPass,
        model: PreTrainedModel,
        structure: ModelStructure,
        tensor_group: dist.ProcessGroup,
        expert_group: dist.ProcessGroup,
        *,
        has_adapters: bool,
    ) -> None:
        layout = rank_pass.layout
        self.layers = structure.layer_list(model)
        self.dtype = _dtype(rank_pass)
        self.experts = ExpertSharder(
            model,
            tensor_group,
            expert_group,
            inner=layout.experts == "inner",
            sequence_parallel=layout.sequence_parallel,
        )
        self.parallelizer: TensorParallelizer | None = None
        self.adapters: RecordedAdapters | None = None
        if layout.tp == 1:
            return
        if has_adapters:
            self.adapters = RecordedAdapters(model)
        self.parallelizer = TensorParallelizer(
            model,
            structure,
            tensor_group,
            sequence_parallel=layout.sequence_parallel,
            experts=self.experts,
        )

    def shard(self, layer_indices: Sequence[int], *, has_embeddings: bool) -> None:
        """Shard decoder layers, and embeddings and head where the rank has them."""
        if self.parallelizer is None:
            for index in layer_indices:
                self.experts.shard_layer(self.layers[index], "")
            return
        for index in layer_indices:
            self.parallelizer.parallelize_layer(index)
            if self.adapters is not None:
                self.adapters.attach(self.layers[index], self.dtype)
        self.parallelizer.parallelize_vocabulary(embeds=has_embeddings)


def _loss_sum(
    rank_pass: RankPass, model: PreTrainedModel, shard: VocabularyShard | None, group: dist.ProcessGroup
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of the pass. Over chunks it multiplies by the head, and the model returns hidden states."""
    chunk_tokens = rank_pass.computation.loss_chunk
    if chunk_tokens:
        head = model.get_output_embeddings()
        model.set_output_embeddings(HiddenStates(head))

        def chunked(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with autocast(rank_pass):
                loss: torch.Tensor = ChunkedLoss.apply(hidden.flatten(0, 1), head.weight, chunk_tokens)
                return loss

        return chunked
    if shard is None:
        return token_loss_sum
    return lambda logits, labels: vocab_parallel_token_loss_sum(logits, labels, shard, group)


_STRUCTURES: dict[str, ModelStructure] = {}


def structure_of(config: str, model: PreTrainedModel) -> ModelStructure:
    """Return a model's layers and what is around them: found by one pass, once for all passes of a config."""
    if config not in _STRUCTURES:
        _STRUCTURES.clear()
        _STRUCTURES[config] = analyze_model(model)
    return _STRUCTURES[config]


def text_config(model: PreTrainedModel) -> Any:
    """The language model's config."""
    return model.config.get_text_config(decoder=True)


def kinds_of(model: PreTrainedModel, layers: nn.ModuleList, reached: Sequence[bool]) -> tuple[int, ...]:
    """Number the kinds of decoder layers: alike are those with equal modules, shapes and flags, if gradients have all
    `reached` their inputs, or none.
    """
    config = text_config(model).to_dict()
    lists = [value for value in config.values() if isinstance(value, list | tuple) and len(value) == len(layers)]
    numbers: dict[Any, int] = {}
    kinds = []
    for index, layer in enumerate(layers):
        listed = [str(values[index]) for values in lists]
        kinds.append(numbers.setdefault((_signature(layer), reached[index], *listed), len(numbers)))
    return tuple(kinds)


def _signature(layer: nn.Module) -> Any:
    parts = []
    for name, module in layer.named_modules():
        flags = {
            key: value if not isinstance(value, float) else bool(value)
            for key, value in vars(module).items()
            if isinstance(value, str | bool | int | float | None) and "idx" not in key and "index" not in key
        }
        parameters = ((key, value) for key, value in module._parameters.items() if value is not None)
        shapes = [(key, value.shape, value.requires_grad) for key, value in parameters]
        parts.append((name, type(module).__name__, tuple(sorted(map(str, flags.items()))), tuple(shapes)))
    return tuple(parts)


def skip_similar(
    layers: nn.ModuleList, pattern: tuple[int, ...], structure: ModelStructure, *, splits_sequence: bool
) -> tuple[int, ...]:
    """Skip all layers but the last two, and one of each kind with its neighbors; return those that are left.

    The neighbors matter: a variable of the model may hold what a layer returned until the next one returns. With
    sequence parallelism the first layer splits the sequence, and the last one gathers it.
    """
    local = [index for index, layer in enumerate(layers) if not isinstance(layer, NonLocalLayer)]
    running = set(local[-2:])
    if splits_sequence:
        running.update(local[:2])
    for kind in dict.fromkeys(pattern[index] for index in local):
        alike = [index for index in local if pattern[index] == kind]
        center = max((index for index in alike if index != local[-1]), default=alike[-1])
        running.update({center - 1, center, center + 1}.intersection(local))
    for index in local:
        if index not in running:
            layers[index] = NonLocalLayer(layers[index], structure.tuple_length)
    return tuple(sorted(running))


def _stage(rank_pass: RankPass, model: PreTrainedModel, structure: ModelStructure) -> PipelineStage | None:
    """Return the stage that the pass names, with all layers but those of another stage before and behind it."""
    count = structure.count
    bounds: tuple[int, ...]
    match rank_pass.part:
        case "whole":
            return None
        case "first":
            stage = 0
            bounds = (0, count - 1, count)
        case "middle":
            stage = 1
            bounds = (0, 1, count - 1, count)
        case "last":
            stage = 1
            bounds = (0, 1, count)
    shards = rank_pass.layout.tp if rank_pass.layout.sequence_parallel else 1
    return PipelineStage(model, structure, bounds=bounds, stages=[stage], sequence_shards=shards)


def _make_fake(model: nn.Module) -> None:
    """Replace every tensor by a fake one. Tied parameters stay one object."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = (empty, tensor)
        return made[id(tensor)][0]

    for module in model.modules():
        for values in (module._parameters, module._buffers, module.__dict__):
            for name, value in list(values.items()):
                if isinstance(value, torch.Tensor):
                    values[name] = fake(value)


def _flash(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Flash attention, whose package has its kernels for GPUs alone."""
    if query.dtype == torch.float32:  # as transformers does under autocast
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    attended = attend(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The toolkit's attention as one operation, which compiled layers run: its shapes follow from its operands."""
    query, key, value = (as_autocast(each) for each in (query, key, value))
    token = torch.zeros(1, dtype=torch.int64)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: torch.Tensor = attention.OPERATION(query, key, value, s_aux, token, scale, softcap)[0]
    return output, None


def _no_mask(*arguments: Any, **options: Any) -> None:
    """Make no mask: kernels know that attention is causal."""


ALL_ATTENTION_FUNCTIONS.register(_FLASH, _flash)
ALL_ATTENTION_FUNCTIONS.register(_BLOCKS, _blocks)
ALL_MASK_ATTENTION_FUNCTIONS.register(_FLASH, _no_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(_BLOCKS, _no_mask)
