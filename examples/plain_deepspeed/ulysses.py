"""DeepSpeed-Ulysses as its tutorial shows it: slices of sequences, and a loss gathered over the ranks that share one.

With ZeRO-3, which the tutorial uses, it is right. The same script with ZeRO 0, 1 or 2 computes gradients that are too
large by the number of ranks that share a sequence (docs/known-bugs.md). With `repaired` the loss is divided by that
number where ZeRO does not divide by it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from data_parallel import DataParallelScript
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import groups
from probe import Probe, make_optimizer, mean_over_ranks
from torch.distributed.nn.functional import all_gather

from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import StepResult
from toolkit.model_init.build_model import build_model


class UlyssesScript(DataParallelScript):
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
        self.device, self.repaired = device, repaired
        self.model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
        deepspeed.init_distributed()
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            self.model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=layout.ulysses,
            micro_batch_size=batch.micro_batch_size,
            seq_length_is_variable=True,
        )
        sizes = {
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
            "sequence_parallel_size": layout.ulysses,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.model,
            optimizer=make_optimizer(recipe, self.model.parameters()),
            config={**sizes, "zero_allow_untested_optimizer": True, **config},
            mpu=mpu,
        )
        self.probe = Probe(self, self.engine)

    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """See Engine.train_step."""
        group, size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
        losses = []
        for whole in micro_batches:
            batch = own_slice(whole, groups._get_sequence_parallel_rank(), size)
            loss = F.cross_entropy(self._logits(batch).flatten(0, 1), batch.labels.flatten())
            # As the tutorial has it: the mean over the targets of all ranks that share the sequences.
            losses_per_rank = all_gather(loss, group=group)  # type: ignore[no-untyped-call]
            good_tokens = (batch.labels != -100).sum()
            good_tokens_per_rank = all_gather(good_tokens, group=group)  # type: ignore[no-untyped-call]
            loss = (torch.stack(losses_per_rank) * torch.stack(good_tokens_per_rank)).sum()
            loss = loss / torch.stack(good_tokens_per_rank).sum()
            losses.append(loss.detach())
            if self.repaired and self.engine.zero_optimization_stage() < 3:
                loss = loss / size
            self.engine.backward(loss)
            self.engine.step()
        return StepResult(loss=mean_over_ranks(torch.stack(losses).mean()), grad_norm=self.probe.norm())


def own_slice(batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """What UlyssesSPDataLoaderAdapter makes of a batch: this rank's positions, with labels that are shifted already."""
    length = batch.input_ids.shape[1] // size
    own = slice(rank * length, (rank + 1) * length)
    positions = torch.arange(own.start, own.stop).expand(len(batch.input_ids), -1)
    return MicroBatch(
        input_ids=batch.input_ids[:, own].contiguous(),
        labels=batch.labels[:, own].contiguous(),
        position_ids=positions.contiguous(),
        dropout_seed=batch.dropout_seed,
    )
