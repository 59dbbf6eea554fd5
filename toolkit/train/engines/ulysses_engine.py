"""DeepSpeed-Ulysses with ZeRO: ranks that share each sequence, and in attention exchange it for heads.

Each rank runs the model on its slice of the positions. In every attention two all-to-alls turn slices of all heads into
all positions of some heads, and back (Jacobs et al. 2023). That is DeepSpeed's own code, put in the place of the
attention function of transformers; what this file adds is the slicing, the weight of the gradients and the random
streams.

Dims: b samples, s positions, u ranks that share a sequence.
"""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.batch import Batch
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.train.engines.base import MicroBatch
from toolkit.train.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.train.seeds import derive_seed


class UlyssesEngine(DeepSpeedEngine):
    """A DeepSpeed engine whose ranks train on slices of sequences. One a process: it changes transformers' attention.

    Dropout: every rank has a stream of its own, so the masks are others than those of one process, of the same
    distribution, and the same again in a second run.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        batch: Batch,
        config: Mapping[str, Any],
        model: PreTrainedModel,
        device: torch.device,
    ) -> None:
        deepspeed.init_distributed()
        self._unit = UlyssesSPAttentionHF.register_with_transformers(
            SimpleNamespace(config=complete(model.config)),
            core_attn_implementation=recipe.model.attn_implementation,
            sequence_parallel_size=layout.ulysses,
            micro_batch_size=batch.micro_size,
            seq_length=recipe.data.seq_len,
            seq_length_is_variable=False,
        )
        keep_heads_apart(recipe.model.attn_implementation)
        self.size, self.place = layout.ulysses, int(self._unit.get_sequence_parallel_rank())
        super().__init__(recipe, layout, batch, config, model, device)
        self.dp = gradient_divisor(layout)
        if isinstance(self.optimizer, BF16_Optimizer):
            # ZeRO-1 in bf16. It takes the group for a tensor-parallel one, lets its first rank alone count the norm,
            # and fails on ranks that count nothing. But every rank holds the whole gradient.
            self.optimizer.mpu = None

    def _own_share(self, micro_batch: MicroBatch) -> MicroBatch:
        length = micro_batch.input_ids.shape[1] // self.size
        own = slice(self.place * length, (self.place + 1) * length)
        positions = torch.arange(own.start, own.stop).expand(len(micro_batch.input_ids), -1)
        return MicroBatch(
            input_ids=micro_batch.input_ids[:, own].contiguous(),  # [b, s] -> [b, s/u]
            labels=micro_batch.labels[:, own].contiguous(),
            # The model rotates by them, so they are those of the whole sequence.
            position_ids=positions.contiguous(),
            dropout_seed=derive_seed("slice", micro_batch.dropout_seed, self.place),
        )

    def _parallel_unit(self) -> Any:
        return self._unit


def keep_heads_apart(attention: str) -> None:
    """DeepSpeed's attention returns heads side by side; transformers wants them in a dimension, as GPT-2 needs it."""
    exchange = ALL_ATTENTION_FUNCTIONS[attention]

    def attend(module: nn.Module, query: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        output, weights = exchange(module, query, *arguments, **options)  # query [b, heads, s/u, size]
        return output.reshape(*output.shape[:2], query.shape[1], -1), weights

    ALL_ATTENTION_FUNCTIONS[attention] = attend


def gradient_divisor(layout: Layout) -> int:
    """What DeepSpeed divides the sum of all ranks' gradients by: dp under ZeRO 0, 1 and 2, dp * u under ZeRO 3.

    The others divide by `world size / sequence_parallel_size` (engine.py `_reduce_non_expert_gradients`,
    stage_1_and_2.py `average_tensor`). ZeRO-3 reduces with `reduce_scatter_coalesced` (stage3.py
    `__avg_scatter_grads`), which divides by the size of its group, and that has all ranks; with reduce_scatter=false it
    would divide as the others do, but only buckets that are not too full, so the DeepSpeed config must not switch it
    off. Adam hides such a factor, and the norm and SGD do not.
    """
    return layout.world_size if layout.zero_stage == 3 else layout.dp


def complete(config: PretrainedConfig) -> PretrainedConfig:
    """A copy that names what DeepSpeed reads and some families leave out: key-value heads and the size of a head."""
    config = copy.deepcopy(config)
    if getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config
