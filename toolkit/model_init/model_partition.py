"""ModelPartition: what this rank keeps of a model, its pipeline stage and of that its tensor-parallel shard."""

import copy
import re
from bisect import bisect
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.job import Job
from toolkit.config.layout import Layout
from toolkit.config.stage_balance import CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE, balance, balance_schedule
from toolkit.errors import ModelError
from toolkit.model_init.model_modules import Materializer, OnLayer, outside_layers, persistent_buffers
from toolkit.model_init.new_tokens import train_every_token
from toolkit.parallel.adapter_names import holds_adapters
from toolkit.parallel.experts.sharding import ExpertSharder
from toolkit.parallel.gather import Names
from toolkit.parallel.groups import ParallelGroups
from toolkit.parallel.loss import IGNORE, sample_loss_sums, token_loss_sum, token_losses
from toolkit.parallel.model_structure import ModelStructure, analyze_model, list_layers
from toolkit.parallel.pipeline.balance import count_costs
from toolkit.parallel.pipeline.stage import PipelineStage
from toolkit.parallel.shard import is_counted
from toolkit.parallel.tensor.parallelize import TensorParallelizer, mark_replicated
from toolkit.parallel.tensor.vocabulary import (
    VocabularyShard,
    vocab_parallel_token_loss_sum,
    vocab_parallel_token_losses,
)


class ModelPartition:
    """The part of a model on this rank. `build_model` applies it, which sets the attributes below."""

    structure: ModelStructure
    names: list[tuple[str, torch.Size]]
    """Every parameter of the full model, tied ones once."""
    trained: frozenset[str]
    """Names of the parameters that train, tied ones once."""
    buffers: list[tuple[str, torch.Tensor]]
    """The buffers in a state dict of the full model."""
    stage: PipelineStage | None = None
    vocabulary: int
    """Output features of the LM head."""
    bounds: tuple[int, ...]
    """Stage k has decoder layers [bounds[k], bounds[k + 1])."""

    def __init__(self, job: Job, groups: ParallelGroups, device: torch.device) -> None:
        self.job = job
        self.groups = groups
        self.device = device
        self._parallelizer: TensorParallelizer | None = None
        self._experts: ExpertSharder | None = None
        self._layer_index: dict[int, int] = {}

    @property
    def layout(self) -> Layout:
        """The layout that defines the partition."""
        return self.groups.layout

    def prepare(self, model: PreTrainedModel, trained: frozenset[str], adapters: Names = ()) -> None:
        """Analyze `model`, which is on the meta device, and remove what other pipeline stages own.

        `trained`: names of the parameters that train; `adapters`: those that will be added to the decoder layers.
        """
        self.trained = trained
        self.names = [*((name, parameter.shape) for name, parameter in model.named_parameters()), *adapters]
        self.buffers = list(persistent_buffers(model))
        # A copy with its buffers on the meta device as well: a forward pass cannot mix devices.
        with torch.device("meta"):
            meta_model = type(model)(copy.deepcopy(model.config))
        meta_model.tie_weights()
        if self.job.recipe.model.init == "random":
            train_every_token(meta_model)
        needs_chain = self.layout.tp * self.layout.pp > 1
        self.structure = analyze_model(meta_model) if needs_chain else list_layers(meta_model)
        head = model.get_output_embeddings()
        self.vocabulary = int(head.weight.shape[0])
        self._layer_index = {id(layer): index for index, layer in enumerate(self.structure.layer_list(model))}
        if self.layout.tp * self.layout.ep > 1:
            self._experts = ExpertSharder.of(model, self.groups)
        if self.layout.tp > 1:
            self._parallelizer = TensorParallelizer(
                model,
                self.structure,
                self.groups.tensor,
                sequence_parallel=self.layout.sequence_parallel,
                experts=self._experts,
            )
        self.bounds = self._bounds(meta_model)
        if self.layout.pp > 1:
            self._check_stages()
            self.stage = PipelineStage(
                model,
                self.structure,
                bounds=self.bounds,
                stages=[k for k, rank in enumerate(self.layout.stage_ranks) if rank == self.groups.coordinate.pipe],
                sequence_shards=self.layout.tp if self.layout.sequence_parallel else 1,
            )

    def _check_stages(self) -> None:
        """Raise ModelError where a stage has nothing to train: DeepSpeed has no optimizer without parameters."""
        rank_of = self.layout.stage_ranks
        layer = re.compile(re.escape(self.structure.layers) + r"\.(\d+)\.")
        train: set[int] = set()
        for name in self.trained:
            inside = layer.search(name)
            owner = name.rpartition(".")[0]
            if inside is not None:
                train.add(rank_of[bisect(self.bounds, int(inside[1])) - 1])
            else:
                aliases = (alias for alias, saved in self.structure.tied.items() if saved == name)
                owners = {owner, *(alias.rpartition(".")[0] for alias in aliases)}
                if owners & self.structure.before:
                    train.add(rank_of[0])
                if owners & self.structure.after:
                    train.add(rank_of[-1])
        if idle := sorted({*rank_of} - train):
            reason = f"on pipeline stage {idle[0]} every parameter is frozen, and DeepSpeed needs one that trains"
            raise ModelError.between((("parallel.pp", self.layout.pp),), reason, ("parallel.pp", 1), "freeze less")

    @property
    def parameter_count(self) -> int:
        """Parameters of the full model, tied ones once."""
        return sum(shape.numel() for _, shape in self.names)

    @property
    def shared(self) -> list[str]:
        """Names of the parameters that both the first and the last rank hold: tied embeddings."""
        rank_of = self.layout.stage_ranks
        if rank_of[0] == rank_of[-1]:
            return []
        owners = {name: {name.rpartition(".")[0]} for name, _ in self.names}
        for alias, name in self.structure.tied.items():
            owners[name].add(alias.rpartition(".")[0])
        return [
            name
            for name, modules in owners.items()
            if modules & self.structure.before and modules & self.structure.after
        ]

    def shard_layer(self, layer: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Shard a decoder layer over tensor- and expert-parallel ranks; `fill` sets what stays replicated."""
        index = self._layer_index.get(id(layer))
        if index is None:
            return
        if self._parallelizer is not None:
            self._parallelizer.parallelize_layer(index, fill)
        elif self._experts is not None:
            prefix = f"{self.structure.layers}.{index}"
            self._experts.shard_layer(layer, prefix)
            fill(layer)
            mark_replicated(layer, self.structure.tied, prefix=f"{prefix}.")

    def shard_outside_layers(self, model: PreTrainedModel, fill: Callable[[nn.Module], None], done: OnLayer) -> None:
        """Shard embedding and LM head and call `done` with each; `fill` sets the values of what stays replicated."""
        if self._parallelizer is not None:
            self._parallelizer.parallelize_vocabulary(embeds=self.stage is None or self.stage.is_first, done=done)
            fill(model)
        else:
            names = {id(module): name for name, module in model.named_modules()}
            for module in outside_layers(model):
                # One by one, because ZeRO-3 shards each, and discards its shapes.
                fill(module)
                mark_replicated(module, self.structure.tied, prefix=f"{names[id(module)]}.".lstrip("."))
                done(module)
        mark_replicated(model, self.structure.tied)

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor, *, by_sample: bool = False) -> torch.Tensor:
        """Sum the token losses, of all or of each sample, given this rank's logits [b, s, v/tp]. The same on every
        tensor-parallel rank.
        """
        if self._parallelizer is None:
            return sample_loss_sums(logits, labels) if by_sample else token_loss_sum(logits, labels)
        group = self.groups.tensor
        shard = VocabularyShard.of(self.vocabulary, group)
        return vocab_parallel_token_loss_sum(logits, labels, shard, group, ignore=IGNORE, by_sample=by_sample)

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, [b, s], given this rank's logits [b, s, v/tp], the same on every
        tensor-parallel rank."""
        if self._parallelizer is None:
            return token_losses(logits, labels)
        group = self.groups.tensor
        shard = VocabularyShard.of(self.vocabulary, group)
        return vocab_parallel_token_losses(logits, labels, shard, group, ignore=IGNORE)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts `parameter` in sums over all parameters: exactly one rank does."""
        return is_counted(parameter, on_first_tensor_rank=self.groups.is_first_of_tensor)

    def _bounds(self, meta_model: PreTrainedModel) -> tuple[int, ...]:
        if self.layout.pp == 1:
            return (0, self.structure.count)
        costs = count_costs(
            meta_model,
            self.structure,
            seq_len=self.job.recipe.data.seq_len,
            micro_batch_size=self.job.batch.micro_batch_size,
            recompute=self.job.recipe.parallel.recompute,
            flops_per_byte=GPU_FLOPS_PER_BYTE if self.device.type == "cuda" else CPU_FLOPS_PER_BYTE,
        )
        head_alone = not holds_adapters(self.trained)
        if self.layout.schedule is None:
            return balance(costs, self.layout.pp, head_alone=head_alone)
        return balance_schedule(costs, self.layout.table(self.job.batch.accumulation), head_alone=head_alone)


def finish_outside_layers(
    model: PreTrainedModel, materializer: Materializer, partition: ModelPartition | None, done: OnLayer
) -> None:
    """Shard and fill what is outside the decoder layers; call `done` with each module of it, and with the model."""
    if partition is not None:
        partition.shard_outside_layers(model, materializer.fill, done)
    for module in outside_layers(model):
        materializer.fill(module)
        done(module)
    done(model)
