"""Data parallelism as DeepSpeed's getting-started guide shows it: initialize, forward, backward, step.

Four things are wrong with it, each in its own circumstances (docs/known-bugs.md):

    the mean loss of a micro-batch, where micro-batches have different numbers of targets: a token of a short sample
    weighs more than one of a long sample, and the result depends on how the batch is split;
    a micro-batch without any target: its mean is 0/0; ZeRO-0 writes the NaN into every weight, ZeRO 1 to 3 skip the
    step and say nothing;
    a config without "gradient_clipping": since 0.19.3 it clips at 1.0;
    a WarmupLR in the config, taken for the warm-up of transformers.

With `repaired` the loss is a sum over targets divided by the number of targets of the global batch. The other two are
matters of the config.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from probe import Probe, Script, make_optimizer, mean_over_ranks

from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import StepResult
from toolkit.model_init.build_model import build_model


class DataParallelScript(Script):
    """`config`: what the user writes into ds_config.json beside the sizes of batches. (`ds_config` is the toolkit's.)

    `loss_fn` is of one micro-batch. `lr_scheduler` makes the scheduler that deepspeed.initialize gets.
    """

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
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        recipe, layout, batch = job.recipe, job.layout, job.batch
        self.device, self.dp, self.repaired, self.loss_fn = device, layout.dp, repaired, loss_fn
        self.model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
        sizes = {
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model,
            optimizer=make_optimizer(recipe, self.model.parameters()),
            config={**sizes, "zero_allow_untested_optimizer": True, **config},
            lr_scheduler=lr_scheduler,
        )
        self.probe = Probe(self, self.engine)

    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """See Engine.train_step."""
        losses = []
        for batch in micro_batches:
            logits, labels = self._logits(batch).flatten(0, 1), batch.labels.flatten()
            if self.repaired:
                # DeepSpeed averages over ranks: times dp, micro-batches add up to the mean of the global batch.
                loss = F.cross_entropy(logits, labels, reduction="sum") * self.dp / target_tokens
                self.engine.backward(loss, scale_wrt_gas=False)
            else:
                loss = self.loss_fn(logits, labels)
                self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        logged = torch.stack(losses).sum() if self.repaired else torch.stack(losses).mean()
        return StepResult(loss=mean_over_ranks(logged), grad_norm=self.probe.norm())

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_tensor")):
                yield name, parameter.detach().clone()

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        for name, parameter in self.model.named_parameters():
            yield name, safe_get_full_grad(parameter)

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        logits: torch.Tensor = self.engine(**batch.inputs(), use_cache=False).logits
        return logits
