"""From the columns of a published run to public options of the time model. A value that is not known is refused."""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from published.reader import RefusedError, flag, matched, one_of, whole
from published.rows import Row
from toolkit.config.layout import Layout
from toolkit.estimate.flops import train_flops_per_token
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.hardware import gpu
from toolkit.models.shape import ModelShape
from toolkit.planner.cluster import Cluster
from toolkit.planner.execution import Execution
from toolkit.planner.step_request import StepRequest

FRAMEWORKS: tuple[tuple[str, str], ...] = (
    (r"Megatron-(Core|Bridge).*", "megatron"),
    (r"(Megatron-LM|Megatron-DeepSpeed|Alpa|InternEvo).*", "megatron-2021"),
    (r"nanotron.*", "nanotron"),
    (r"Aleph-Alpha scaling .*", "aleph-alpha-scaling"),
    (r"torchtitan FSDP2|Composer FSDP1", "fsdp"),
    (r"DeepSpeed ZeRO-\d", "toolkit"),
)
"""Values of the column, and the profile with their facts. Alpa and InternEvo run Megatron's layers of their time."""
ARCHITECTURES: tuple[tuple[str, str], ...] = (
    (r"gpt2-like .*|gpt|post-LN .*|mpt .*", "gpt2"),
    (r"llama .*|gpt swiglu", "llama"),
)
PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"bf16.*", "bf16"), (r"fp16", "fp16"), (r"MXFP8", "mxfp8"), (r"NVFP4", "nvfp4"), (r"(?i)fp8.*", "fp8"),
)  # fmt: skip
ATTENTION = {
    "flash1": ("flash_attentionv1.0.8",),
    "flash2": ("flash2", "flash_attention2", "flash_attention2 + RMS kernel", "sdpa-flash"),
    "cudnn": ("transformer_engine",),
    "fused-softmax": ("fused-softmax", "fused"),
    "unfused": ("torch", "unfused", "local"),
}
"""Kernels, and the values of the column that name them."""
DEFAULT_ATTENTION = {"megatron": "cudnn", "megatron-2021": "fused-softmax", "fsdp": "flash2", "toolkit": "flash2"}
"""Of frameworks, where the column is empty."""
FLASH: tuple[tuple[str, str], ...] = (
    (r"Composer FSDP1|InternEvo", "flash1"),  # both pinned flash-attn 1.0 in the middle of 2023
    (r"Megatron-Core.*", "cudnn"),  # TransformerEngine's default
    (r".*", "flash2"),
)
"""What a bare `flash` means, by framework."""
NETWORKS: tuple[tuple[str, float], ...] = (
    (r"(\d+)x(\d+)Gb", 0),
    (r"(\d+) Gbps node-node", 0),
    (r"inter-node (\d+) Gb/s", 0),
    (r"arXiv 2311\.05610", 200),  # the paper, section 3: "200Gb/s HDR InfiniBand" between nodes
    (r"Jean Zay", 400),  # the model card of BLOOM: 4 Omni-Path links a node, each of 100 Gb/s
)
"""Gb/s of a node's network: products of the numbers that the notes or the name of the document have, or what the
document itself says. Where none is known, the GPU's reference system counts."""


def read(row: Row) -> StepRequest:
    """The options of a row. Raises RefusedError."""
    framework = matched(row, "framework", FRAMEWORKS)
    model = _model(row)
    recompute = "selective" if "selective" in row["recompute"] else row["recompute"] or "none"
    pp = whole(row, "pp")
    layout = Layout(
        dp=whole(row, "dp"),
        tp=whole(row, "tp"),
        pp=pp,
        zero_stage=min(whole(row, "zero", 0), 1) if pp > 1 else whole(row, "zero", 0),
        sequence_parallel=flag(row, "sp") and row["tp"] != "1",
        recompute=one_of({"r": recompute}, "r", {name: name for name in ("none", "selective", "full")}),
    )
    if row["ep"] not in ("", "1"):
        raise RefusedError("ep: experts have no option")
    return StepRequest(
        setup=TrainingSetup(
            model=model,
            layout=layout,
            micro_batch_size=whole(row, "micro_batch"),
            accumulation=_accumulation(row, layout),
            seq_len=whole(row, "seq_len"),
        ),
        cluster=_cluster(row),
        execution=Execution(
            framework=framework,
            precision=matched(row, "precision", PRECISIONS),  # type: ignore[arg-type]
            attention=_attention(row, framework),  # type: ignore[arg-type]
            compiled=flag(row, "compile"),
            fused_norm="RMS kernel" in row["attn_impl"] or framework != "aleph-alpha-scaling",
            virtual_stages=whole(row, "vpp", 1) if pp > 1 else 1,
            context_parallel=whole(row, "cp", 1),
            dropout=framework == "megatron-2021" and model.shape.learned_positions,
            loss="fused" if "cross-entropy" in row["notes"] else "plain",
        ),
    )


def measured_seconds(row: Row, request: StepRequest) -> float:
    """Of one step: as published, or from the tokens or FLOP a second."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    setup = request.setup
    tokens = setup.global_batch_size * setup.seq_len
    if row["tokens_per_s_gpu"]:
        return tokens / request.gpus / float(row["tokens_per_s_gpu"])
    again = row["tflops_def"].startswith("HW") and setup.layout.recompute == "full"
    flops = train_flops_per_token(request.shape, setup.seq_len, recompute=again)
    return tokens * flops / request.gpus / (float(row["tflops_gpu"]) * 1e12)


def _attention(row: Row, framework: str) -> str:
    told = row["attn_impl"]
    if not told:
        return one_of({"framework": framework}, "framework", DEFAULT_ATTENTION)  # type: ignore[no-any-return]
    if told in ("flash", "flash_attention"):
        return matched(row, "framework", FLASH)
    for kernel, names in ATTENTION.items():
        if told in names:
            return kernel
    raise RefusedError(f"attn_impl: {told}")


def _accumulation(row: Row, layout: Layout) -> int:
    if row["grad_accum"]:
        return whole(row, "grad_accum")
    # Ramped and odd batches: what a replica computes, rounded down as the frameworks do.
    return max(1, whole(row, "global_batch") // (layout.dp * whole(row, "micro_batch")))


def _model(row: Row) -> ModelFacts:
    family = matched(row, "arch", ARCHITECTURES)
    names = ("layers", "hidden", "heads", "ffn", "seq_len", "kv_heads", "vocab")
    return _built(family, flag(row, "tied_emb"), tuple(whole(row, name) for name in names))


@lru_cache(maxsize=512)
def _built(family: str, tied: bool, sizes: tuple[int, ...]) -> ModelFacts:
    gpt2 = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions")
    others = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    names = gpt2 if family == "gpt2" else (*others, "num_key_value_heads")
    config: dict[str, Any] = {"model_type": family, "vocab_size": sizes[-1], "tie_word_embeddings": tied}
    config |= dict(zip(names, sizes, strict=False))
    # Megatron's GPT has grouped queries too.
    shape = replace(ModelShape.from_config(config), kv_heads=sizes[5])
    return ModelFacts(config=config_text(config), other_shape=shape)


def _cluster(row: Row) -> Cluster:
    told = re.fullmatch(r"([A-Z]+\d+)(?:-(\d+)GB)?(?:-SXM\d?)?(?: \(\d/node\))?", row["gpu"])
    if told is None:
        raise RefusedError(f"gpu: {row['gpu']}")
    found = gpu(told[1] + (f"-{told[2]}" if told[2] and len(told[1]) == 4 and told[1] != "H100" else ""))
    per_node = whole(row, "gpus_per_node", 8)
    facts: dict[str, float] = {}
    if found.link_domain <= 8:  # a rack's link joins more than its machines
        facts["gpus_per_node"] = per_node
    for pattern, known in NETWORKS:
        words = re.search(pattern, f"{row['source_doc']}; {row['notes']}")
        if words:
            gigabits = known
            if not known:
                gigabits = 1
                for number in words.groups():
                    gigabits *= int(number)
            facts["network_bytes_per_second"] = gigabits / 8 * 1e9 / per_node
            break
    return Cluster.of(found, **facts)
