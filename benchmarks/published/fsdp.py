"""torchtitan at the end of 2024: FSDP2 over Llama, selective recomputation by operation; what the allocator reserves.

Letters: N parameters, D ranks, E logits of a rank's batch. torchtitan logs `max_reserved`, the sum of the pools of all
streams (torchtitan/metrics.py, DeviceMemoryMonitor). Mechanisms, and where they can be read (torchtitan 9dec370;
PyTorch, torch/distributed/fsdp/_fully_shard):

- 4N/D weights and 8N/D moments in fp32; gradients come anew each step (optimizer.zero_grad);
- the root group, embedding, norm and head, is gathered from the first to the last layer, and so is the last layer
  (parallelisms/parallelize_llama.py, apply_fsdp; _fsdp_state.py, _lazy_init);
- the gathered flat buffer and its copies, the parameters, both exist: the former in the copy-in stream's pool
  (_fsdp_collectives.py, foreach_all_gather). The reduced gradients, 4N/D, lie in the reduce-scatter stream's pool
  (foreach_reduce), which no other stream uses;
- a layer keeps its input and the results of every second matrix product (wq, wv, w1, w2) and of attention, with the
  log-sum-exp of its rows (parallelize_llama.py, `_save_list`). Compiled, it does not keep w2's result, which no
  gradient needs; eager, the cache of selective recomputation keeps it all the same (torch/utils/checkpoint.py). Float8
  layers call the same product, and are saved alike;
- the loss: 2E in bf16 and 4E in fp32 forward; 4E of log-softmax, 4E and 4E of gradients backward. Blocks over 10 MiB
  have segments of their own: that of 2E is free then, and too small for any of the others (CUDACachingAllocator.cpp);
- beyond that the margin of the toolkit's estimate.
"""

from published.prediction import Prediction
from published.rows import Row
from toolkit.estimate.overhead import ALLOCATOR_MARGIN
from toolkit.estimate.parameters import Architecture, Holdings
from toolkit.estimate.states import fsdp2

_GATHERED, _FP32, _LOGITS = 2, 4, 2
"""Bytes of an element that is gathered, of an element in fp32, of a logit as the model returns it."""


def predict(row: Row) -> Prediction | str:
    """Reserved by the allocator, the same on every rank."""
    if row.tp * row.pp * row.cp > 1:
        return "FSDP2 with other kinds of parallelism"
    if not row.recompute.startswith("selective(op"):
        return f"recompute={row.recompute}: only torchtitan's policy by operation is walked"
    held = architecture(row).holdings(layers=row.layers, by_decay=False)
    default, others = _default_pool(row, held), _other_pools(row, held)
    return Prediction(peak=int((default + others) * (1 + ALLOCATOR_MARGIN)))


def architecture(row: Row) -> Architecture:
    """The row's Llama."""
    return Architecture.from_config(
        {
            "model_type": "llama",
            "hidden_size": row.hidden,
            "intermediate_size": row.ffn,
            "num_hidden_layers": row.layers,
            "num_attention_heads": row.heads,
            "num_key_value_heads": row.kv_heads,
            "vocab_size": row.vocab,
            "max_position_embeddings": row.seq_len,
            "tie_word_embeddings": row.tied_emb,
        }
    )


def _default_pool(row: Row, held: Holdings) -> int:
    """The compute stream's at the loss: states, activations, what is gathered, and four blocks of logits."""
    states = fsdp2().states(held, shards=row.dp or 1).held
    gathered = _GATHERED * (root_elements(held) + held.layer_numel)
    logits = row.micro_batch * row.seq_len * row.vocab
    head = 2 * row.micro_batch * row.seq_len * row.hidden * _GATHERED  # the norm's input and the head's
    return states.total + gathered + row.layers * _layer(row) + head + (_LOGITS + 3 * _FP32) * logits


def _other_pools(row: Row, held: Holdings) -> int:
    """Flat gathered buffers, the root's and one layer's, and the reduced gradients."""
    flat = _GATHERED * (root_elements(held) + held.layer_numel)
    return flat + _FP32 * -(-held.numel // (row.dp or 1))


def root_elements(held: Holdings) -> int:
    """Parameters outside the layers."""
    return held.numel - held.layers * held.layer_numel


def _layer(row: Row) -> int:
    """Kept by one layer: input, wq, wv, attention and its rows' statistics, w1, and w2 where it is not compiled."""
    tokens = row.micro_batch * row.seq_len
    keys = row.hidden * row.kv_heads // row.heads
    is_compiled = row.compile == "1"
    wide = 3 * row.hidden + keys + row.ffn + (0 if is_compiled else row.hidden)
    return tokens * (_GATHERED * wide + _FP32 * row.heads)
