"""A GPT-2 as DeepSpeed's pipeline tutorial partitions it: a PipelineModule with tied embeddings, and train_batch.

Two things are wrong with it (docs/known-bugs.md):

    with ZeRO-0 in fp32, DeepSpeed clips by a norm of the first stage's parameters only;
    the loss is the mean over the targets of a micro-batch: wrong if their numbers differ (data_parallel.py).

With `repaired` each parameter carries the mark that makes it count once, and the loss is weighted by targets.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_grad
from probe import Probe, Script, make_optimizer
from torch import nn

from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import StepResult
from toolkit.model_init.build_model import build_model


class Tokens(nn.Module):
    """The tied embedding: looks tokens up on the first stage, scores them on the last."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s, h]."""
        looked_up: torch.Tensor = self.embedding(input_ids)
        return looked_up

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, v]."""
        return F.linear(hidden, self.embedding.weight)


class Positions(nn.Module):
    """Adds the position embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        places: torch.Tensor = self.embedding(torch.arange(hidden.shape[1], device=hidden.device))
        return hidden + places


def as_layers(model: Any) -> list[Any]:
    """A GPT-2 as a sequence of layers."""
    body = model.transformer

    def tokens(**options: Any) -> TiedLayerSpec:
        return TiedLayerSpec("tokens", Tokens, body.wte, tied_weight_attr="embedding.weight", **options)

    return [tokens(), Positions(body.wpe), *body.h, body.ln_f, tokens(forward_fn=Tokens.score)]


class PipelineScript(Script):
    """`config` as in data_parallel.py."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        ds_config: Mapping[str, Any] | None = None,
        *,
        eos_id: int | None,
        trust_remote_code: bool = False,
        config: Mapping[str, Any],
        repaired: bool = False,
    ) -> None:
        recipe, layout, batch = job.recipe, job.layout, job.batch
        self.device, self.batch, self.repaired, self.target_tokens = device, batch, repaired, 0
        self.model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        deepspeed.init_distributed()
        net = PipelineModule(
            layers=as_layers(self.model), num_stages=layout.pp, loss_fn=self._loss, partition_method="uniform"
        )
        if repaired:
            for parameter in net.parameters():
                parameter.tensor_model_parallel = not parameter.ds_pipe_replicated
        sizes = {
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=net,
            optimizer=make_optimizer(recipe, net.parameters()),
            config={**sizes, "zero_allow_untested_optimizer": True, **config},
        )
        self.held = {self.names[id(parameter)]: parameter for parameter in net.parameters()}
        keep_only(self.model, self.held.values())
        self.probe = Probe(self, self.engine)

    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """See Engine.train_step."""
        self.target_tokens = target_tokens
        remaining = iter(micro_batches)
        loss = self.engine.train_batch(data_iter=((batch.input_ids, batch.labels) for batch in remaining))
        next(remaining, None)  # DeepSpeed stops before the end, which completes the fingerprint of the batch
        return StepResult(loss=float(loss), grad_norm=self.probe.norm())

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.repaired:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # DeepSpeed averages over micro-batches and replicas.
        return loss * self.batch.accumulation * self.batch.dp / self.target_tokens

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        yield from self._from_owners({name: parameter.detach() for name, parameter in self.held.items()})

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        yield from self._from_owners({name: safe_get_full_grad(parameter) for name, parameter in self.held.items()})

    def _from_owners(self, held: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the model on every rank, from the first rank that holds it."""
        known: list[dict[str, torch.Size]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(known, {name: value.shape for name, value in held.items()})
        for name in self.names.values():
            owner = next(rank for rank, shapes in enumerate(known) if name in shapes)
            value = held[name].clone() if owner == dist.get_rank() else torch.empty(known[owner][name])
            dist.broadcast(value, src=owner)
            yield name, value


def keep_only(model: nn.Module, held: Iterable[nn.Parameter]) -> None:
    """Forget the parameters of the other stages, which nobody trains here."""
    wanted = {id(parameter) for parameter in held}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in wanted:
                module.register_parameter(name, None)
