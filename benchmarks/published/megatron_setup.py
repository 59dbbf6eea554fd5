"""Setup: one rank of a Megatron-Core run, as far as memory depends on it.

What the columns of a row do not tell follows from the test's name and from the container that it ran in. Both can be
read in Megatron-LM: tests/functional_tests/test_cases/gpt/*/model_config.yaml, and docker/.ngc_version.*.
"""

from dataclasses import dataclass
from typing import Literal

from published.rows import Row

_MIB = 2**20

Attention = Literal["unfused", "flash", "fused", "ring"]
"""Which of TransformerEngine's backends runs; Megatron's own attention is like "unfused". "ring" is flash attention
with context parallelism."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes are those of one rank."""

    layers: tuple[int, ...]
    """Decoder layers of each model chunk of this stage."""
    stage: int
    pp: int
    chunks: int
    tp: int
    sp: bool
    cp: int
    dp: int
    """Ranks that share the optimizer's states."""
    micro_batches: int
    group_size: int
    """Micro-batches of a chunk that run one after the other in the interleaved schedule."""
    b: int
    s: int
    """Positions of one context-parallel rank."""
    h: int
    heads: int
    kv_heads: int
    d: int
    ffn: int
    vocab: int
    positions: int
    """Rows of a learned position table, 0 for rotary embeddings."""
    gated: bool
    tied: bool
    biases: bool
    norm_biases: bool
    qk_norm: bool
    dropout: float
    local: bool
    """Megatron's own layers instead of TransformerEngine's."""
    attention: Attention
    softmax_kernel: bool
    """Scale, mask and softmax in one kernel in 16 bits; otherwise in PyTorch, in fp32."""
    masks: bool
    """The data loader makes an attention mask."""
    recompute: bool
    loss: Literal["plain", "compiled", "in place"]
    """Kernels of the loss: PyTorch's, one compiled from them, or TransformerEngine's, which works in the logits."""
    deferred_head: int
    """Micro-batches whose LM head's weight gradient is computed at the end of the step."""
    fused_accumulation: bool
    """Weight gradients are added to the main gradients by the matrix product itself."""
    placeholders: Literal["none", "layers", "all"]
    """Weights with a 16-bit tensor in place of a gradient, one for each shape, with fused accumulation."""
    fp16: bool
    distributed: bool
    bucket_elements: int | None
    cublas_bytes: int
    """Workspace of one cuBLAS handle. The thread that runs backward has a handle of its own."""
    engine_bytes: int
    """TransformerEngine's workspace for matrix products."""

    @property
    def first(self) -> bool:
        """Whether the embedding is here."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the head is here."""
        return self.stage == self.pp - 1


def read(row: Row, stage: int) -> Setup:
    """The setup of a stage. Only for rows that `unmodelled` has nothing against."""
    name, hopper = row.model, "A100" not in row.gpu  # or later
    golden = row.source_id == "megatron_golden"
    local = row.attn_impl == "local"
    dropout = 0.0 if "dropout 0.0" in row.notes or not golden else 0.1
    deterministic = golden and not any(
        word in name for word in ("nondeterministic", "cp2", "cross_entropy_loss_fusion", "reshard")
    )
    chunks = row.vpp or 1
    h, tp = row.hidden, row.tp
    dp = row.dp or 1
    return Setup(
        layers=_layers(row, stage, chunks),
        stage=stage,
        pp=row.pp,
        chunks=chunks,
        tp=tp,
        sp=row.sp and tp > 1,
        cp=row.cp,
        dp=dp * row.cp // (2 if "multi_dist_optimizer_instances" in name else 1),
        micro_batches=_micro_batches(row, chunks),
        group_size=5 if "tunable_overlap" in name else row.pp,
        b=row.micro_batch,
        s=row.seq_len // row.cp,
        h=h,
        heads=row.heads // tp,
        kv_heads=_groups(row) // tp,
        d=h // row.heads,
        ffn=_ffn(row) // tp,
        vocab=row.vocab // tp,
        positions=0 if _is_rotary(row) else row.seq_len,
        gated=row.gated_mlp or not golden,
        tied=row.tied_emb,
        biases=golden and "disable_bias_linear" not in name,
        norm_biases=golden,
        qk_norm="qk_layernorm" in name,
        dropout=dropout,
        local=local,
        attention=_attention(row, hopper=hopper, deterministic=deterministic, dropout=dropout),
        softmax_kernel="uninstall_te" not in name,
        masks=golden and "no_create_attention_mask" not in name,
        recompute=row.recompute == "full",
        loss="compiled" if "cross_entropy_loss_fusion" in name else "plain" if golden else "in place",
        deferred_head=2 if "defer_embedding_wgrad" in name else 0,
        fused_accumulation="no-gradient-accumulation-fusion" not in row.notes,
        placeholders=_placeholders(row, hopper),
        fp16=row.precision == "fp16",
        distributed=row.zero == 1,
        bucket_elements=max(40_000_000, 1_000_000 * dp) if "overlap-grad-reduce" in row.notes else None,
        cublas_bytes=32 * _MIB if deterministic or hopper else 8 * _MIB + 128 * 2**10,
        engine_bytes=0 if local else 32 * _MIB if hopper else 4 * _MIB,
    )


def _micro_batches(row: Row, chunks: int) -> int:
    """Without interleaving, micro-batches after the first few repeat what was: they are left out."""
    given = row.micro_batches or 1
    return given if chunks > 1 else min(given, row.pp + 2)


def _layers(row: Row, stage: int, chunks: int) -> tuple[int, ...]:
    if "uneven_pipeline" in row.model:
        return (2,) if stage in (0, row.pp - 1) else (4,)
    if "account_for_embedding" in row.model:
        # Embedding and loss count as a layer each, and every chunk has one: the first and the last chunk have no
        # decoder layer.
        count = [1] * chunks
        count[0] -= stage == 0
        count[-1] -= stage == row.pp - 1
        return tuple(count)
    return (row.layers // (row.pp * chunks),) * chunks


def _is_rotary(row: Row) -> bool:
    return "position-embedding-type" in row.notes or row.source_id == "simumax_b200"


def _ffn(row: Row) -> int:
    """Where a test does not tell, arguments.py takes two thirds of 4h for gated layers, in steps of 64."""
    return row.hidden * 8 // 3 // 64 * 64 if "swiglu" in row.model else row.ffn


def _groups(row: Row) -> int:
    """num-query-groups, where the row has the heads."""
    return 8 if row.model.startswith("gpt3_7b") else row.kv_heads


def _attention(row: Row, *, hopper: bool, deterministic: bool, dropout: float) -> Attention:
    """TransformerEngine's choice (dot_product_attention/utils.py, fused_attn.cpp).

    cuDNN's kernel where it may be taken, on Hopper and later; of those Blackwell's is not deterministic with dropout.
    flash-attn before 2.4.1 is taken for no deterministic run.
    """
    if row.attn_impl in ("local", "unfused"):
        return "unfused"
    if row.cp > 1:
        return "ring"
    if hopper and not ("B200" in row.gpu and deterministic and dropout):
        return "fused"
    return "unfused" if deterministic and _is_old_container(row) else "flash"


def _is_old_container(row: Row) -> bool:
    """Tests that were dropped have the values of the long-term container before November 2025, NGC PyTorch 24.01."""
    return "(lts)" in row.framework and "n_gpus=8 assumed" in row.notes


def _placeholders(row: Row, hopper: bool) -> Literal["none", "layers", "all"]:
    """get_dummy_wgrad: in TransformerEngine from 2.3, and in Megatron's own layers from August 2025.

    Values of the development container on A100 are older: its tests run on H100 since.
    """
    if "no-gradient-accumulation-fusion" in row.notes or _is_old_container(row):
        return "none"
    return "layers" if "(dev)" in row.framework and not hopper else "all"
