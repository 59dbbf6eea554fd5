"""Support: which families of Hugging Face's causal LMs support which parallelism, and why the others do not.

`support.json` has what docs/generate_families.py found when it partitioned a tiny model of every family and compared
loss and gradients with the whole model (tests/support/family_check.py). It is read without torch.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from toolkit.models.shape import ModelShape
from toolkit.units import english_list, plural

PATH = Path(__file__).parent / "support.json"
KINDS = ("pipeline", "tensor", "sequence")
"""Kinds of parallelism; `sequence` is sequence parallelism on top of tensor parallelism."""
EXPERT_KINDS = ("ep", "inner")
"""Kinds for mixtures of experts: whole experts shared out over replicas, and over tensor-parallel ranks a part of each.

Whole experts shared out over tensor-parallel ranks are part of `tensor`.
"""
OTHER_KINDS = ("rounded", "autocast", "fsdp")
"""Precisions and engines that all families but a few support; the file has those few alone."""
LIGER_FAMILIES = (
    *("exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense", "llama", "ministral"),
    *("mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"),
)
"""Families that `model.kernels: liger` was tested for (tests/model_init/test_liger.py): Liger knows more."""
NO_EXPERTS = "it has no experts"


@dataclass(frozen=True, kw_only=True)
class Support:
    """Results of the checks of one family. A refusal says why not; None means that the result is exact."""

    model_type: str
    pipeline_refusal: str | None
    tensor_refusal: str | None
    sequence_refusal: str | None
    ep_refusal: str | None = NO_EXPERTS
    inner_refusal: str | None = NO_EXPERTS
    context_refusal: str | None = None
    """Reason why ranks cannot share its sequences with the attention of context parallelism; None where they can."""
    attention: tuple[str, ...] = ("eager", "sdpa", "flash")
    """Implementations that its transformers class declares."""
    loss_refusal: str | None = None
    """Reason why its loss cannot be computed inside the head, over chunks of tokens; None where it can."""
    rounded_refusal: str | None = None
    """Reason why its forward pass does not run with weights that are rounded to 16 bits; None where it does."""
    autocast_refusal: str | None = None
    """Reason why its forward pass does not run with fp32 weights under torch.autocast; None where it does."""
    fsdp_refusal: str | None = None
    """Reason why FSDP cannot shard it; None where it can."""
    rounds_buffers: bool = False
    """Whether weights in 16 bits need buffers in 16 bits beside them, as transformers has them."""
    logits: str = ""
    """Formula of the logits from the products of its head (toolkit/models/chunked_head.py); empty: they are these."""

    def refusal(self, kind: str) -> str | None:
        """Return why it does not support a kind (of KINDS, EXPERT_KINDS, OTHER_KINDS, or context); None if it does."""
        reason: str | None = getattr(self, f"{kind}_refusal")
        return reason

    def supports(self, kind: str) -> bool:
        """Whether it supports a kind of parallelism (of KINDS or EXPERT_KINDS)."""
        return self.refusal(kind) is None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of parallelism that it could support: those of experts only if it has some."""
        return KINDS if self.ep_refusal == NO_EXPERTS else (*KINDS, *EXPERT_KINDS)


def find(model_type: object) -> Support | None:
    """Return what was found about the `model_type` of a config; None if transformers has no such causal LM."""
    return all_families().get(model_type) if isinstance(model_type, str) else None


def attention_kinds(model_type: object) -> tuple[str, ...]:
    """Return the implementations of attention that a family has: `eager`, `sdpa`, `flash`; all where it is unknown."""
    support = find(model_type)
    return Support.attention if support is None else support.attention


def all_families() -> Mapping[str, Support]:
    """Return every family by its model type, in alphabetical order."""
    return _stored()[1]


def checked_version() -> str:
    """Return the version of transformers whose families were checked."""
    return _stored()[0]


def encoded(families: Mapping[str, Support], version: str) -> str:
    """Return the text of support.json."""
    rows = {
        name: {kind: support.refusal(kind) or True for kind in support.kinds}
        | {kind: support.refusal(kind) for kind in OTHER_KINDS if not support.supports(kind)}
        | {"context": support.context_refusal or True}
        | {"attention": " ".join(support.attention), "loss": support.loss_refusal or True}
        | ({"rounds_buffers": True} if support.rounds_buffers else {})
        | ({"logits": support.logits} if support.logits else {})
        for name, support in sorted(families.items())
    }
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f'{{\n  "transformers": {json.dumps(version)},\n  "families": {{\n{lines}\n  }}\n}}\n'


@functools.cache
def _stored() -> tuple[str, Mapping[str, Support]]:
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return content["transformers"], {
        name: Support(
            model_type=name,
            attention=tuple(row["attention"].split()),
            rounds_buffers=row.get("rounds_buffers", False),
            logits=row.get("logits", ""),
            **{f"{kind}_refusal": None if row[kind] is True else str(row[kind]) for kind in row if kind not in _FACTS},
        )
        for name, row in content["families"].items()
    }


_FACTS = ("attention", "rounds_buffers", "logits")
_SHOWN = 6


class Misfit(NamedTuple):
    """A number of ranks that a model does not allow."""

    axis: Literal["tp", "pp", "ulysses", "ep"]
    reason: str
    allowed: str
    """The numbers that are allowed, in words."""


def misfits(
    shape: ModelShape,
    *,
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    ulysses: int = 1,
    ep: int = 1,
    inner: bool = False,
) -> Iterator[Misfit]:
    """Yield why `shape` does not allow these numbers of ranks: at most one misfit per axis.

    `chunks`: stages of each pipeline rank. `inner`: whether tp shards every expert instead of handing out whole ones.
    """
    reason = _tensor_misfit(shape, tp, inner=inner)
    if reason is not None:
        yield Misfit("tp", reason, _nearest(tensor_parallel_sizes(shape, inner=inner), tp))
    too_many_stages = pipeline_misfit(shape.layers, pp=pp, chunks=chunks)
    if too_many_stages is not None:
        yield too_many_stages
    reason = _heads_misfit(shape, ulysses)
    if reason is not None:
        sizes = [size for size in range(1, shape.heads + 1) if _heads_misfit(shape, size) is None]
        yield Misfit("ulysses", reason, _nearest(sizes, ulysses))
    sizes = expert_parallel_sizes(shape, tp=tp)
    if ep not in sizes:
        count = 0 if shape.experts is None else shape.experts.count
        reason = (
            f"{plural(count, 'expert')} cannot be shared equally by {ep * tp} ranks" if count else "it has no experts"
        )
        yield Misfit("ep", reason, _nearest(sizes, ep))


def pipeline_misfit(layers: int, *, pp: int, chunks: int) -> Misfit | None:
    """Return why a model has too few decoder layers for a pipeline with `chunks` stages on each rank, or None."""
    stages = pp * chunks
    if stages <= layers:
        return None
    most = max(1, layers // chunks)
    ranks = f", {chunks} on each of {pp} ranks" if chunks > 1 else ""
    reason = f"{plural(layers, 'decoder layer')} cannot fill {stages} stages{ranks}"
    return Misfit("pp", reason, f"{most} or less" if most > 1 else "1")


def tensor_parallel_sizes(shape: ModelShape, *, inner: bool = False) -> list[int]:
    """Return every tp that the model allows, from 1."""
    return [tp for tp in range(1, shape.heads + 1) if _tensor_misfit(shape, tp, inner=inner) is None]


def expert_parallel_sizes(shape: ModelShape, *, tp: int = 1) -> list[int]:
    """Return every ep that the model allows beside so many tensor-parallel ranks with whole experts, from 1."""
    count = 0 if shape.experts is None else shape.experts.count
    return [ep for ep in range(1, count + 1) if count % (ep * tp) == 0] or [1]


def _tensor_misfit(shape: ModelShape, tp: int, *, inner: bool) -> str | None:
    reason = _heads_misfit(shape, tp)
    experts = shape.experts
    if reason is None and shape.ffn % tp and (experts is None or experts.layers < shape.layers):
        return f"an MLP of width {shape.ffn} cannot be shared equally by {tp} ranks"
    if reason is None and experts is not None and (experts.ffn if inner else experts.count) % tp:
        shared = f"experts of width {experts.ffn}" if inner else plural(experts.count, "expert")
        return f"{shared} cannot be shared equally by {tp} ranks"
    return reason


def _heads_misfit(shape: ModelShape, ranks: int) -> str | None:
    if shape.heads % ranks:
        return f"{plural(shape.heads, 'attention head')} cannot be shared equally by {ranks} ranks"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        heads = plural(shape.kv_heads, "key-value head")
        return f"{heads} can neither be shared equally by {ranks} ranks nor be repeated equally often on them"
    return None


def _nearest(sizes: list[int], asked: int) -> str:
    """Write sizes as `1, 2 or 4`; of many, those nearest to the one that was asked for."""
    nearest = sorted(sorted(sizes, key=lambda size: abs(size - asked))[:_SHOWN])
    return english_list([*map(str, nearest)], "or")
