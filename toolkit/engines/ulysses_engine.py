"""DeepSpeed-Ulysses with ZeRO: ranks that share each sequence (toolkit/parallel/sequence/ulysses.py).

Each rank runs the model on its slice of the positions. This file adds the slicing, the scale of the gradients and the
random streams. Dims: b samples, s positions, u ranks that share a sequence.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines import deepspeed_patches
from toolkit.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.parallel.sequence.ulysses import local_slice, register_attention
from toolkit.seeds import derive_seed


class UlyssesEngine(DeepSpeedEngine):
    """A DeepSpeed engine whose ranks train on slices of sequences. One per process: it replaces the attention.

    Every rank has its own dropout stream, so the masks differ from those of one process; their distribution does not,
    and a second run has the same ones.
    """

    def __init__(self, job: Job, config: Mapping[str, Any], model: PreTrainedModel, device: torch.device) -> None:
        deepspeed.init_distributed()
        attention = job.recipe.model.attention or "sdpa"
        self.size = job.layout.ulysses
        self._unit, self._mask = register_attention(
            deepspeed_patches.complete_attention_config(model.config),
            attention,
            ranks=self.size,
            micro_batch_size=job.batch.micro_batch_size,
            seq_len=job.recipe.data.seq_len,
        )
        deepspeed_patches.keep_heads_separate(attention)
        self.sequence_rank = int(self._unit.get_sequence_parallel_rank())
        super().__init__(job, config, model, device)
        self.dp = deepspeed_patches.gradient_divisor(job.layout)
        deepspeed_patches.count_norms_on_all_ranks(self.optimizer)

    @override
    def _local_micro_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        self._mask.start(micro_batch.position_ids)
        samples, length = micro_batch.input_ids.shape
        local = local_slice(length, self.sequence_rank, self.size)
        sequences = micro_batch.sequences
        if sequences is not None:
            sequences = replace(sequences, numbers=sequences.numbers[:, local].contiguous())
        teacher = micro_batch.teacher
        positions = micro_batch.position_ids
        if positions is None:  # of the full sequence
            positions = torch.arange(length).expand(samples, -1)
        return replace(
            micro_batch,
            input_ids=micro_batch.input_ids[:, local].contiguous(),  # [b, s] -> [b, s/u]
            labels=micro_batch.labels[:, local].contiguous(),
            position_ids=positions[:, local].contiguous(),
            is_packed=False,  # the mask of the whole sequence is made in the attention, and the model's own is dropped
            dropout_seed=derive_seed("slice", micro_batch.dropout_seed, self.sequence_rank),
            sequences=sequences,
            teacher=None if teacher is None else teacher.map(lambda tensor: tensor[:, local].contiguous()),
            places=None if micro_batch.places is None else micro_batch.places[:, local].contiguous(),
            weights=None if micro_batch.weights is None else micro_batch.weights[:, local].contiguous(),
        )

    @property
    @override
    def sequence_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._unit.get_sequence_parallel_group()
        return group

    @override
    def _parallel_unit(self) -> Any:
        return self._unit
