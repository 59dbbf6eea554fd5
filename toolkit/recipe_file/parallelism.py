"""What `parallel` must agree on with the rest of a recipe, and with the numbers of its model."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.batch import Batch
from toolkit.division import misfits
from toolkit.errors import ToolkitError
from toolkit.families.own_attention import REMEDY, own_attention
from toolkit.families.support import find
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.recipe_file.finding import Finding
from toolkit.recipe_file.ulysses import ulysses_family, ulysses_settings
from toolkit.shape import ModelShape


def placement(recipe: Recipe, world_size: int | None) -> list[Finding]:
    """What cannot run whatever the model is; with `world_size` also what does not fit that many ranks."""
    return [*_other_engines(recipe, world_size)] or [
        *_layout_and_batch(recipe, world_size),
        *_cut_settings(recipe),
        *ulysses_settings(recipe),
    ]


def cut_findings(recipe: Recipe, config: Mapping[str, Any] | None, shape: ModelShape | None) -> Iterator[Finding]:
    """What a model's config says against cutting or recomputing it; less where less of it is known."""
    section = recipe.parallel
    yield from _recomputation(recipe, config)
    if recipe.train.engine != "deepspeed":
        return
    refused = [*_family(recipe, (config or {}).get("model_type")), *ulysses_family(recipe, config)]
    yield from refused
    if shape is not None and not refused:
        for axis, reason, allowed in misfits(shape, tp=section.tp, pp=section.pp, ulysses=section.ulysses):
            yield Finding(
                ("parallel", axis),
                f"parallel.{axis}={getattr(section, axis)} with model.name_or_path={recipe.model.name_or_path}: "
                f"{reason}. Set parallel.{axis} to {allowed}.",
            )
    yield from _sequence(recipe, shape)


def _family(recipe: Recipe, model_type: str | None) -> Iterator[Finding]:
    """A family that was tried and cannot be cut. One that nobody tried is examined when the model is built."""
    section = recipe.parallel
    support = find(model_type) if model_type is not None and section.tp * section.pp > 1 else None
    if support is None:
        return
    for field, off, refusal in (
        ("tp", 1, support.tensor_refusal),
        ("pp", 1, support.pipeline_refusal),
        # Without tensor parallelism there is none of the sequence either, and tp says why.
        ("sequence_parallel", False, None if support.tensor_refusal else support.sequence_refusal),
    ):
        value = getattr(section, field)
        if value != off and refusal is not None:
            yield Finding(
                ("parallel", field),
                f"parallel.{field}={_yaml(value)} with model.name_or_path={recipe.model.name_or_path}: the family "
                f"{model_type} cannot be cut that way ({refusal}). Set parallel.{field}={_yaml(off)}, or see "
                "`dstk families`.",
            )


def _recomputation(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Attention that cannot be computed again by itself. Of a family that nobody tried, its model will say."""
    if config is None or recipe.parallel.recompute != "selective":
        return
    reason = own_attention(config, recipe.model.attn_implementation)
    if reason is not None:
        yield Finding(
            ("parallel", "recompute"),
            f"parallel.recompute=selective with model.name_or_path={recipe.model.name_or_path}: {reason}. {REMEDY}.",
        )


def _other_engines(recipe: Recipe, world_size: int | None) -> Iterator[Finding]:
    """Settings of DeepSpeed that another engine would silently ignore. The ZeRO stage has no meaning there."""
    engine, section = recipe.train.engine, recipe.parallel
    if engine == "deepspeed":
        return
    for field, off, does in (
        ("tp", 1, "cuts a model"),
        ("pp", 1, "cuts a model"),
        ("ulysses", 1, "shares a sequence"),
        ("sequence_parallel", False, "cuts a sequence"),
        ("offload_optimizer", "none", "offloads"),
        ("offload_params", "none", "offloads"),
    ):
        value = getattr(section, field)
        if value != off:
            yield Finding(
                ("parallel", field),
                f"parallel.{field}={_yaml(value)} with train.engine={engine}: only the engine deepspeed {does}. "
                f"Set parallel.{field}={_yaml(off)}, or train.engine=deepspeed.",
            )
    if engine == "reference":
        yield from _reference(recipe, world_size)


def _reference(recipe: Recipe, world_size: int | None) -> Iterator[Finding]:
    if recipe.train.compile:
        yield Finding(
            ("train", "compile"),
            "train.compile=true with train.engine=reference: the reference stays plain PyTorch. "
            "Set train.compile=false.",
        )
    if (recipe.parallel.dp or 1) > 1:
        yield Finding(
            ("parallel", "dp"),
            f"parallel.dp={recipe.parallel.dp} with train.engine=reference: the reference is one plain PyTorch "
            "process. Set parallel.dp=1.",
        )
    if world_size is not None and world_size > 1:
        yield Finding(
            ("train", "engine"),
            f"{world_size} ranks with train.engine=reference: the reference is one plain PyTorch process. "
            "Launch 1 rank, for instance with `python`.",
        )


def _layout_and_batch(recipe: Recipe, world_size: int | None) -> Iterator[Finding]:
    """The rules of Layout and Batch; without a world size, as far as they hold for every one."""
    fields = recipe.parallel.model_dump()
    try:
        if world_size is None:
            layout = Layout(**{**fields, "dp": recipe.parallel.dp or 1})
        else:
            layout = Layout.resolve(world_size, **fields)
    except ToolkitError as error:
        # Layout's messages open with the field that is wrong; those about the world size do not.
        name = str(error).partition("=")[0]
        yield Finding(("parallel", name) if name in fields else ("parallel",), str(error))
        return
    try:
        Batch.resolve(global_size=recipe.batch.global_size, micro_size=recipe.batch.micro_size, dp=layout.dp)
    except ToolkitError as error:
        yield Finding(("batch", "global_size"), str(error))


def _cut_settings(recipe: Recipe) -> Iterator[Finding]:
    """What DeepSpeed does not do, or does wrongly, once tp or pp cuts the model."""
    section, precision = recipe.parallel, recipe.precision
    on = " ".join(f"{axis}={getattr(section, axis)}" for axis in ("tp", "pp") if getattr(section, axis) > 1)
    if not on:
        return
    if precision == "fp16" and section.pp > 1:
        yield Finding(
            ("precision",),
            f"precision=fp16 with parallel.pp={section.pp}: pipelines have no loss scaling in this version. "
            "Set precision=bf16 or fp32, or parallel.pp=1.",
        )
    elif precision != "fp32" and section.zero_stage == 0:
        # Its 16-bit optimizers copy the parameters and lose the marks of tensor-parallel ones: the norm is wrong.
        yield Finding(
            ("parallel", "zero_stage"),
            f"parallel.zero_stage=0 with {on} and precision={precision}: without ZeRO, DeepSpeed's 16-bit path loses "
            "track of how a model is cut. Set parallel.zero_stage=1, or precision=fp32.",
        )
    if recipe.train.compile:
        yield Finding(
            ("train", "compile"),
            f"train.compile=true with {on}: a cut model is not compiled in this version. Set train.compile=false.",
        )


def _sequence(recipe: Recipe, shape: ModelShape | None) -> Iterator[Finding]:
    """Where ranks take equal parts of a sequence, its length must divide."""
    tp, ulysses = recipe.parallel.tp, recipe.parallel.ulysses
    if recipe.parallel.sequence_parallel:
        yield from _parts(recipe, shape, tp, f"sequence_parallel=true and tp={tp}", "sequence_parallel=false")
    if ulysses > 1:
        yield from _parts(recipe, shape, ulysses, f"ulysses={ulysses}", "ulysses=1")


def _parts(recipe: Recipe, shape: ModelShape | None, parts: int, given: str, remedy: str) -> Iterator[Finding]:
    seq_len = recipe.data.seq_len
    if seq_len % parts == 0:
        return
    lower, upper = seq_len // parts * parts, (seq_len // parts + 1) * parts
    longest = None if shape is None else shape.positions
    near = [str(length) for length in (lower, upper) if length and (longest is None or length <= longest)]
    remedies = [f"data.seq_len={' or '.join(near)}"] * bool(near) + [f"parallel.{remedy}"]
    yield Finding(
        ("data", "seq_len"),
        f"data.seq_len={seq_len} with parallel.{given}: each rank takes an equal part of a sequence. "
        f"Set {', or '.join(remedies)}.",
    )


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
