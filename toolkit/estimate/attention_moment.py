"""What the toolkit's attention allocates in the backward pass of a layer, in bytes of one micro-batch on a rank.

`toolkit/parallel/context/` computes attention tile by tile, and recordings lack what it allocates meanwhile: gradients
are summed in fp32, a kernel has those of one tile, and keys and values are those of the rank, of whole sequences
(`gather`), or in a ring those at hand and those on their way, with their gradients.
"""

import json
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.config.context_exchange import key_value_width
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.models.config_fields import text_config

_FP32_BYTES = 4
_MOST_SCORES = 1 << 24
"""`MOST_SCORES` of toolkit/parallel/context/kernels.py."""
_TILE = 512
"""`TILE` of toolkit/parallel/context/sequence.py."""
_LARGEST_FLASH_HEAD = 256
_WINDOW_IN_ALL_LAYERS = frozenset({"ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"})
"""Families of transformers whose layers all have the window that the config has."""


def bytes_in_attention(setup: TrainingSetup, itemsize: int) -> int:
    """Return the bytes at the worst moment of attention's backward pass, beside the gradients that it returns.

    `itemsize`: bytes of an element of queries, keys and values.

    Known errors: documents of a sample count as one, whose tiles are larger; a window that a config leaves to the
    default of its family, the padded values of latent attention and the scores of soft caps are not counted.
    """
    layout = setup.layout
    tokens = setup.rank_tokens
    shape = setup.model.shape
    width = key_value_width(shape, layout.cp_ulysses * layout.tp)
    operands = _Operands(
        samples=setup.micro_batch_size,
        positions=setup.rank_positions * layout.cp_ulysses,
        query_width=shape.heads * shape.head_dim // (layout.tp * layout.cp_ulysses),
        key_value_width=2 * width,
        head_dim=shape.head_dim,
        itemsize=itemsize,
        shares_keys=shape.kv_heads < shape.heads,
        on_gpu=setup.computation.device == "cuda",
    )
    ranks = layout.cp // layout.cp_ulysses
    windows = _windows(setup.model.config, setup.seq_len)
    returned = itemsize * tokens * (shape.heads * shape.head_dim // layout.tp + 2 * key_value_width(shape, layout.tp))
    if ranks == 1:
        return operands.whole_bytes(windows) - returned
    if setup.exchange(itemsize) == "gather":
        return operands.gathered_bytes(ranks, windows) - returned
    return operands.ring_bytes(ranks, windows) - returned


class _Windows(NamedTuple):
    """The sliding windows of a model."""

    positions: int
    """Positions that a query sees; 0 without windows."""
    in_all_layers: bool


def _windows(config: str, seq_len: int) -> _Windows:
    """Read the windows of a config, as far as samples of so many tokens are longer."""
    text = text_config(json.loads(config))
    window = text.get("sliding_window") or 0
    kinds = set(text.get("layer_types") or ())
    has_none = bool(kinds) and "sliding_attention" not in kinds
    if window >= seq_len or text.get("use_sliding_window") is False or has_none:
        return _Windows(positions=0, in_all_layers=False)
    has_all = kinds == {"sliding_attention"} or (not kinds and text.get("model_type") in _WINDOW_IN_ALL_LAYERS)
    return _Windows(positions=window, in_all_layers=window > 0 and has_all)


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """The queries, keys and values that attention has on a rank."""

    samples: int
    positions: int
    """Positions of a sample, of queries as of keys and values."""
    query_width: int
    """Numbers of a position's queries, of all heads."""
    key_value_width: int
    """Numbers of a position's keys and values."""
    head_dim: int
    itemsize: int
    """Bytes of a number."""
    shares_keys: bool
    """Whether several query heads share keys and values."""
    on_gpu: bool
    """Whether kernels are those of a GPU, which have a workspace."""

    @property
    def _queries(self) -> int:
        return self.samples * self.positions * self.query_width

    @property
    def _keys_and_values(self) -> int:
        return self.samples * self.positions * self.key_value_width

    def whole_bytes(self, windows: _Windows) -> int:
        """Return the bytes of a rank that has whole sequences."""
        kernel = self._kernel_bytes(windows, self.positions, _TILE - 1 + windows.positions)
        return _FP32_BYTES * (self._queries + self._keys_and_values) + kernel

    def gathered_bytes(self, ranks: int, windows: _Windows) -> int:
        """Return the bytes with the keys and values of whole sequences on each of so many ranks."""
        whole = ranks * self._keys_and_values
        kernel = self._kernel_bytes(windows, self.positions // 2, _TILE - 1 + windows.positions)
        return _FP32_BYTES * self._queries + (self.itemsize + _FP32_BYTES) * whole + kernel

    def ring_bytes(self, ranks: int, windows: _Windows) -> int:
        """Return the bytes in a ring of so many ranks.

        While a tile of another rank's keys is computed there are these and their values, the gradients of these and of
        the rank's own in fp32, and on the way the next keys and values, and gradients as they are sent and as they
        arrive. Two ranks send none of these meanwhile, and three send the ones or the others. So do more ranks while
        a window within a chunk is computed, which reaches neighbors alone: the first and the last to come.
        """
        half = self.positions // 2
        operand_bytes = self.itemsize * self._keys_and_values
        sum_bytes = _FP32_BYTES * self._keys_and_values
        of_own_keys = self._kernel_bytes(windows, half, min(half, _TILE - 1 + windows.positions))
        of_other_keys = self._kernel_bytes(windows, half, min(half, windows.positions))
        reaches_neighbors_alone = windows.in_all_layers and windows.positions <= half
        on_the_way = {2: 0, 3: 2}.get(ranks, 2 if reaches_neighbors_alone else 3)
        return _FP32_BYTES * self._queries + max(
            sum_bytes + 2 * operand_bytes + of_own_keys,
            2 * sum_bytes + (1 + on_the_way) * operand_bytes + of_other_keys,
            2 * sum_bytes + (3 if ranks == 2 else 4) * operand_bytes,
        )

    def _kernel_bytes(self, windows: _Windows, positions: int, keys_in_window: int) -> int:
        """Return the bytes of the results and the workspace of the kernel with most; a CPU's has no workspace.

        `positions`: queries, and keys, of a tile that no window cuts. `keys_in_window`: keys of one that a window cuts.
        """
        has_flash = self.itemsize == 2 and self.head_dim <= _LARGEST_FLASH_HEAD and self.head_dim % 8 == 0
        sizes = []
        if not windows.in_all_layers:
            sizes.append(self._flash_bytes(positions) if has_flash else self._scores_bytes(positions, positions))
        if windows.positions:
            sizes.append(self._scores_bytes(min(_TILE, positions), keys_in_window))
        return max(sizes)

    def _flash_bytes(self, positions: int) -> int:
        """Return the bytes of flash attention: also the query's gradient in fp32, and those of key and value for each
        query head that shares them.
        """
        results = self._result_bytes(positions, positions)
        if not self.on_gpu:
            return results
        queries = self.samples * positions * self.query_width
        by_query_head = 2 * self.itemsize * queries if self.shares_keys else 0
        return results + _FP32_BYTES * queries + by_query_head

    def _scores_bytes(self, queries: int, keys: int) -> int:
        """Return the bytes where scores are computed in parts: weights and their gradients, in fp32 and as they are
        multiplied; the key's gradient by query heads and its sum; and in 16 bits those of key and value in fp32.
        """
        results = self._result_bytes(queries, keys)
        if not self.on_gpu:
            return results
        key_value_numbers = self.samples * keys * self.key_value_width
        scores = min(_MOST_SCORES, self.samples * (self.query_width // self.head_dim) * queries * keys)
        of_key = self.itemsize * self.samples * keys * self.query_width + _FP32_BYTES * key_value_numbers // 2
        if self.itemsize == _FP32_BYTES:
            return results + of_key + 8 * scores
        return results + of_key + 12 * scores + _FP32_BYTES * key_value_numbers

    def _result_bytes(self, queries: int, keys: int) -> int:
        """Return the bytes of the gradients of so many queries, keys and values."""
        return self.itemsize * self.samples * (queries * self.query_width + keys * self.key_value_width)
