"""What this rank keeps of a model: its pipeline stage, and of that its tensor-parallel share."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.families.anatomy import Anatomy, examine
from toolkit.layout import Layout
from toolkit.parallel.balance import CPU_FLOPS_PER_BYTE, balance, count_costs
from toolkit.parallel.groups import ParallelGroups
from toolkit.parallel.shard import is_counted
from toolkit.parallel.stage import PipelineStage
from toolkit.parallel.tensor import TensorCut, mark_whole
from toolkit.parallel.vocabulary import VocabularyShard, vocab_parallel_token_loss_sum
from toolkit.recipe import Recipe
from toolkit.train.loss import IGNORE, token_loss_sum
from toolkit.train.weights import OnLayer
from toolkit.train.weights.part import persistent_buffers

_GPU_FLOPS_PER_BYTE = 120.0
"""An H100 at 40 % of its bf16 peak of 989 TFLOP/s, with 3.35 TB/s of memory: computed, not measured."""


class ModelCut:
    """A `ModelPart`: hand it to `build_model`, and read afterwards what it found and made."""

    anatomy: Anatomy
    names: list[tuple[str, torch.Size]]
    """Every parameter of the whole model, tied ones once."""
    buffers: list[tuple[str, torch.Tensor]]
    """The buffers that a state dict of the whole model holds."""
    stage: PipelineStage | None = None
    vocabulary: int
    """Outputs of the head."""
    bounds: tuple[int, ...]
    """Stage k has decoder layers [bounds[k], bounds[k + 1])."""

    def __init__(self, recipe: Recipe, groups: ParallelGroups, device: torch.device) -> None:
        self.recipe, self.groups, self.device = recipe, groups, device
        self._tensor: TensorCut | None = None
        self._index: dict[int, int] = {}

    @property
    def layout(self) -> Layout:
        """The layout that the cut is for."""
        return self.groups.layout

    def begin(self, model: PreTrainedModel) -> None:
        """See ModelPart."""
        self.names = [(name, parameter.shape) for name, parameter in model.named_parameters()]
        self.buffers = list(persistent_buffers(model))
        # A twin whose buffers are on the meta device too: a forward pass does not mix devices.
        with torch.device("meta"):
            twin = type(model)(copy.deepcopy(model.config))
        twin.tie_weights()
        self.anatomy = examine(twin)
        head = model.get_output_embeddings()
        self.vocabulary = int(head.weight.shape[0])
        self._index = {id(layer): index for index, layer in enumerate(self.anatomy.layer_list(model))}
        if self.layout.tp > 1:
            self._tensor = TensorCut(
                model, self.anatomy, self.groups.tensor, sequence_parallel=self.layout.sequence_parallel
            )
        self.bounds = self._bounds(twin)
        if self.layout.pp > 1:
            self.stage = PipelineStage(
                model,
                self.anatomy,
                bounds=self.bounds,
                stage=self.groups.coordinate.pipe,
                sequence_shards=self.layout.tp if self.layout.sequence_parallel else 1,
            )

    @property
    def parameter_count(self) -> int:
        """Of the whole model, tied ones once."""
        return sum(shape.numel() for _, shape in self.names)

    @property
    def shared(self) -> list[str]:
        """Names of the parameters that the first and the last stage both hold: tied embeddings."""
        if self.layout.pp == 1:
            return []
        owners = {name: {name.rpartition(".")[0]} for name, _ in self.names}
        for other, name in self.anatomy.tied.items():
            owners[name].add(other.rpartition(".")[0])
        return [name for name, at in owners.items() if at & self.anatomy.before and at & self.anatomy.after]

    def cut_layer(self, layer: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """See ModelPart."""
        if self._tensor is not None and id(layer) in self._index:
            self._tensor.layer(self._index[id(layer)], fill)

    def cut_rest(self, model: PreTrainedModel, fill: Callable[[nn.Module], None], done: OnLayer) -> None:
        """See ModelPart."""
        if self._tensor is not None:
            self._tensor.vocabulary(embeds=self.stage is None or self.stage.is_first, done=done)
        fill(model)
        mark_whole(model, self.anatomy.tied)

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the token losses from this rank's logits [b, s, v/tp]; the same on every tensor-parallel rank."""
        if self._tensor is None:
            return token_loss_sum(logits, labels)
        shard = VocabularyShard.of(self.vocabulary, self.groups.tensor)
        return vocab_parallel_token_loss_sum(logits, labels, shard, self.groups.tensor, ignore=IGNORE)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts `parameter` in a sum over the model's parameters: exactly one rank does."""
        return is_counted(parameter, on_first_tensor_rank=self.groups.is_first_of_tensor)

    def _bounds(self, twin: PreTrainedModel) -> tuple[int, ...]:
        if self.layout.pp == 1:
            return (0, self.anatomy.count)
        costs = count_costs(
            twin,
            self.anatomy,
            seq_len=self.recipe.data.seq_len,
            micro_batch_size=self.recipe.batch.micro_size,
            recompute=self.recipe.parallel.recompute,
            flops_per_byte=_GPU_FLOPS_PER_BYTE if self.device.type == "cuda" else CPU_FLOPS_PER_BYTE,
        )
        return balance(costs, self.layout.pp)
