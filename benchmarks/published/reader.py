"""From the columns of a published run to public options of the estimate. A value that is not understood is refused."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from published.rows import Row
from toolkit.config.layout import Layout
from toolkit.estimate.computation import Computation
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.memory_request import MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.hardware import Gpu, gpu

FRAMEWORKS: tuple[tuple[str, str], ...] = (
    (r"Megatron-Core.*", "megatron"),
    (r"Megatron-LM \((2020|2021|2022)\)", "megatron-2021"),
    (r"Megatron-DeepSpeed( 3D)?", "megatron-deepspeed"),
    (r"nanotron.*", "nanotron"),
    (r"Aleph-Alpha scaling .*", "aleph-alpha-scaling"),
    (r"torchtitan FSDP2", "torchtitan"),
    (r"DeepSpeed ZeRO-\d", "deepspeed"),
)
"""Values of the column, and the profile or engine that they name."""
ARCHITECTURES: tuple[tuple[str, str], ...] = (
    (r"gpt2-like \(LayerNorm, GELU 4h, learned pos, tied emb\)|gpt", "gpt2"),
    (r"post-LN nn\.MultiheadAttention, GELU 4h, untied, learned pos", "gpt2"),
    (r"llama \(RMSNorm, SwiGLU, RoPE, (untied|MHA)\)|gpt swiglu", "llama"),
)
ATTENTION: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "": ("", {}),
    "flash": ("flash", {}),
    "flash2": ("flash", {}),
    "flash_attention": ("flash", {}),
    "flash_attention2": ("flash", {}),
    "flash_attentionv1.0.8": ("flash", {}),
    "flash_attention2 + RMS kernel": ("flash", {"fused_norm": True}),
    "sdpa-flash": ("sdpa", {}),
    "transformer_engine": ("flash", {}),
    "fused-softmax": ("eager", {}),
    "fused": ("eager", {}),
    "torch": ("eager", {}),
    "unfused": ("eager", {}),
    "local": ("eager", {"transformer_engine": False}),
}
"""Values of the column: attention, and options that the value implies."""
GRADIENTS = {"": 0, "fp32": 4, "fp32 (bf16 main_grad)": 4, "fp16": 2, "bf16": 2}
"""Values of the column, in bytes."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {"aleph-alpha-scaling": {"fused_norm": False}}
"""What a framework does where no column tells."""
SHARDINGS = (
    r"|none|dist-optimizer|FSDP2: fp32 master params\+Adam sharded, bf16 all-gather, fp32 reduce.*",
    r"DS ZeRO-(?P<zero>\d) (?P<precision>fp16|bf16)( \((?P<grad_dtype>\w+) grads\))?",
)
"""Values of the column; what they say of other columns must be what these say."""
RECOMPUTATIONS = {"selective(op)": "selective", "selective(op, every 2nd matmul)": "selective"}
"""torchtitan's policy by operation."""
NOTES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (r"reduce_bucket_size 5e7", {"reduce_bucket_size": 50_000_000}),
    (r"overlap_comm", {"overlap_comm": True}),
    (r"contiguous_gradients", {"contiguous_gradients": True}),
    (r"persistence_threshold 0", {"stage3_param_persistence_threshold": 0}),
    (r"fp32 master \(baseline\)|README says .*", {}),
    (r"dropout 0\.1 default", {"dropout": True}),
    (r"dropout 0\.0", {"dropout": False}),
    (r"deterministic/unfused kernels in many tests", {"cublas_mib": 32}),
    (r"no-gradient-accumulation-fusion", {"fused_accumulation": False}),
    (r"cross-entropy-loss-fusion", {"loss": "compiled"}),
    (r"cross-entropy fusion", {"loss": "fused"}),
    (r"position-embedding-type", {"rotary": True}),
    (r"disable-bias-linear|use-mcore-models|attention-softmax-in-fp32|overlap-.*", {}),
    (r"n_gpus=\d+ assumed .*|tiny model: fixed overheads dominate step time|peak is over the run incl\. .*", {}),
    (r"static = allocated after the step|rank with the largest reserved of the stage", {}),
    (r"DeepSpeed activation checkpointing|TP/PP overlap off|SimuMax predicted .*|[\d.]+ GiB \([-+.\d]+%\)", {}),
    (r"(first|last) stage max alloc .*|TP mode REDUCE_SCATTER \(SP\)\. DP-dependence .*|GAS covaries\)", {}),
    (r"plotted as crashed/oom.*|published MFU .*|use tokens/s\. .*", {}),
    (r"FSDP(\+compile)?", {}),
    (r"NHIDDEN .*|NLAYERS .*|NHEADS sweep|(TP\d+ ?)?(PP\d+ ?)?(\d\d-\d\d)?( table: .*)?|.*-size warmup sweep", {}),
    (r"GBS 2048 \(2k\) / 512 \(8k\) = 4M tokens|vocab ~128k .*|.RMS kernel. = fused RMSNorm|.torch./.fused. .*", {}),
    (r"GBS sweep|NUMA fixed .*|printed \d+GB .*|memory dropped", {}),
)
"""Phrases of the notes, and the options that they set; none where a phrase sets nothing that takes memory."""
_PROFILE = {"rotary", *(field.name for field in fields(FrameworkProfile))}
_ZERO = ("reduce_bucket_size", "overlap_comm", "contiguous_gradients", "stage3_param_persistence_threshold")


class RefusedError(Exception):
    """A value that the reader does not understand, as column and reason."""


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """What a published run asks of the estimate, and which part of the answer was measured."""

    request: MemoryRequest
    framework: str
    """Framework or engine, and whose layers it runs."""
    stage: int | None
    """That was measured; None: the one that takes most."""


def read(row: Row) -> PublishedRun:
    """The options of a row. Raises RefusedError."""
    name = matched(row, "framework", FRAMEWORKS)
    layout = _layout(row, name)
    framework = _deepspeed(row) if name == "deepspeed" else _profile(row, name)
    attention, _ = one_of(row, "attn_impl", ATTENTION)
    if not attention:
        attention = next(iter(framework.facts["attention"])) if isinstance(framework, FrameworkProfile) else "sdpa"
    setup = TrainingSetup(
        model=_model(row),
        layout=layout,
        micro_batch_size=whole(row, "micro_batch"),
        seq_len=whole(row, "seq_len"),
        accumulation=_accumulation(row, layout),
        computation=Computation(attention=attention),
    )
    request = MemoryRequest(setup=setup, framework=framework, gpu=_gpu(row))
    return PublishedRun(request=request, framework=name, stage=_stage(row, layout))


def _layout(row: Row, name: str) -> Layout:
    layout = Layout(
        dp=whole(row, "dp"),
        tp=whole(row, "tp"),
        pp=whole(row, "pp"),
        zero_stage=whole(row, "zero", 0),
        sequence_parallel=flag(row, "sp") and row["tp"] != "1",
        recompute=one_of(
            row, "recompute", RECOMPUTATIONS if name == "torchtitan" else {x: x for x in ("none", "full", "selective")}
        ),
    )
    ranks = layout.world_size * whole(row, "cp", 1)
    if whole(row, "n_gpus", ranks) != ranks:
        raise RefusedError(f"n_gpus: {row['n_gpus']} is not dp x tp x pp x cp")
    if row["ep"] not in ("", "1") or (flag(row, "compile") and name != "torchtitan"):
        raise RefusedError("ep, compile: experts and torch.compile have no option")
    found = next(filter(None, (re.fullmatch(words, row["optimizer_sharding"]) for words in SHARDINGS)), None)
    if found is None or any(row[column] not in (said, "") for column, said in found.groupdict().items() if said):
        raise RefusedError(f"optimizer_sharding: {row['optimizer_sharding']}")
    return layout


def _profile(row: Row, name: str) -> FrameworkProfile:
    _, implied = one_of(row, "attn_impl", ATTENTION)
    no_dropout = (
        {"dropout": False} if name.startswith("megatron") and matched(row, "arch", ARCHITECTURES) == "llama" else {}
    )
    noted = {option: value for option, value in _noted(row, _PROFILE).items() if option != "rotary"}
    framework = FrameworkProfile(
        name=name,
        precision=one_of(row, "precision", {"bf16": "bf16", "fp16": "fp16"}),
        virtual_stages=whole(row, "vpp", 1),
        context_parallel=whole(row, "cp", 1),
        compiled=flag(row, "compile"),
        **{**no_dropout, **DEFAULTS.get(name, {}), **implied, **noted},
    )
    told = one_of(row, "grad_dtype", GRADIENTS)
    states = {} if name == "torchtitan" else framework.facts["states"].get(framework.precision, {})
    if told and told != states.get("gradients", framework.deepspeed(0).accumulation_bytes):
        raise RefusedError(f"grad_dtype: {row['grad_dtype']} is not what {name} has in {framework.precision}")
    return framework


def _deepspeed(row: Row) -> DeepSpeedSettings:
    """A DeepSpeed config of what the columns say; what they do not say has DeepSpeed's defaults."""
    precision, accumulated = row["precision"], one_of(row, "grad_dtype", GRADIENTS)
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": whole(row, "zero"), **_noted(row, _ZERO)},
    }
    for column in ("tp", "pp", "vpp", "cp"):
        if whole(row, column, 1) > 1:
            raise RefusedError(f"{column}: {row[column]} with DeepSpeed's data parallelism")
    if precision != "fp32":
        config[one_of(row, "precision", {"bf16": "bf16", "fp16": "fp16"})] = {"enabled": True}
    if accumulated:
        config["data_types"] = {"grad_accum_dtype": "fp32" if accumulated == 4 else precision}
    return DeepSpeedSettings.from_config(config)


def _model(row: Row) -> ModelFacts:
    """A Hugging Face config with the same parameters: with rotary embeddings StarCoder2's is Megatron's GPT."""
    family = matched(row, "arch", ARCHITECTURES)
    if family == "gpt2" and "rotary" in _noted(row, {*_PROFILE, *_ZERO}):
        family = "starcoder2"
    if row["gated_mlp"] and flag(row, "gated_mlp") != (family == "llama"):
        raise RefusedError(f"gated_mlp: {row['gated_mlp']} with arch {row['arch']}")
    if family == "gpt2" and row["kv_heads"] != row["heads"]:
        raise RefusedError(f"kv_heads: {row['kv_heads']} with arch {row['arch']}")
    names = ("layers", "hidden", "heads", "ffn", "seq_len", "kv_heads", "vocab")
    return _built(family, flag(row, "tied_emb"), tuple(whole(row, name) for name in names))


@lru_cache(maxsize=512)
def _built(family: str, tied: bool, sizes: tuple[int, ...]) -> ModelFacts:
    gpt2 = ("n_layer", "n_embd", "n_head", "n_inner", "n_positions")
    others = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    names = gpt2 if family == "gpt2" else (*others, "num_key_value_heads")
    config: dict[str, Any] = {"model_type": family, "vocab_size": sizes[-1], "tie_word_embeddings": tied}
    return ModelFacts.from_config(config | dict(zip(names, sizes, strict=False)))


def _gpu(row: Row) -> Gpu:
    """`A100-80GB-SXM`: chip, memory, board. Memory that the catalogue's variant does not have takes its place."""
    told = re.fullmatch(r"([A-Z]+\d+)(?:-(\d+)GB)?(?:-(?:SXM\d?|HBM\S+))?", row["gpu"])
    if told is None:
        raise RefusedError(f"gpu: {row['gpu']}")
    found, size = gpu(told[1]), int(told[2] or 0)
    same = not size or abs(found.memory_bytes / 2**30 / size - 1) < 0.05
    return found if same else replace(found, memory_bytes=int(0.99 * size * 2**30))


def _stage(row: Row, layout: Layout) -> int | None:
    if row["pp_stage"]:
        stage = whole(row, "pp_stage")
        if stage >= layout.pp:
            raise RefusedError(f"pp_stage: {stage} of pp={layout.pp}")
        return stage
    return 0 if row["mem_rank"] == "0" else layout.pp - 1 if "last PP stage" in row["mem_rank"] else None


def _accumulation(row: Row, layout: Layout) -> int:
    if row["grad_accum"]:
        return whole(row, "grad_accum")
    samples, each = whole(row, "global_batch"), layout.dp * whole(row, "micro_batch")
    if samples % each:
        raise RefusedError(f"global_batch: {samples} is no multiple of dp x micro_batch = {each}")
    return samples // each


def _noted(row: Row, allowed: Collection[str]) -> dict[str, Any]:
    """What the notes set. Raises RefusedError for a phrase that is not known, or sets what is not `allowed`."""
    found: dict[str, Any] = {}
    for phrase in re.split(r"[;,]\s*", row["notes"].replace("flags: ", "")):
        settings = next((what for pattern, what in NOTES if re.fullmatch(pattern, phrase)), None)
        if settings is None or not settings.keys() <= set(allowed):
            raise RefusedError(f"notes: {phrase[:60]}")
        found |= settings
    return found


def matched(row: Row, column: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, meaning in patterns:
        if re.fullmatch(pattern, row[column]):
            return meaning
    raise RefusedError(f"{column}: {row[column]}")


def one_of(row: Row, column: str, meanings: Mapping[str, Any]) -> Any:
    if row[column] not in meanings:
        raise RefusedError(f"{column}: {row[column] or 'not told'}")
    return meanings[row[column]]


def flag(row: Row, column: str) -> bool:
    return bool(one_of(row, column, {"": False, "0": False, "1": True}))


def whole(row: Row, column: str, default: int | None = None) -> int:
    text = row[column]
    if not text and default is not None:
        return default
    if not text.isdigit() or (text == "0" and column not in ("zero", "pp_stage")):
        raise RefusedError(f"{column}: {text or 'not told'}")
    return int(text)
