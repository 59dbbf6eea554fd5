"""Rules for `parallel`: what it must agree on with the rest of a recipe, and with the model's config."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.config.router_rules import expert_count
from toolkit.errors import BatchError, LayoutError, Refusal, Setting
from toolkit.models.config_fields import text_config
from toolkit.models.families.registry import FAMILIES, own_attention
from toolkit.models.families.spec import SPELLINGS
from toolkit.models.shape import ModelShape
from toolkit.models.support import LIGER_FAMILIES, find, misfits, pipeline_misfit

ULYSSES_FAMILIES = tuple(model_type for model_type, spec in FAMILIES.items() if spec.ulysses_verified)
"""Families that train the same with and without DeepSpeed-Ulysses (tests/parity/test_ulysses.py)."""

_REVERSIBLE = ("reformer",)
"""Families whose layers are one function to autograd, which needs an input with a gradient."""
_MODEL = "model.name_or_path"
_ULYSSES = "parallel.ulysses"
_CONTEXT = "parallel.cp"
_PIPELINE = "parallel.pp"
_ATTENTION = "model.attn_implementation"
_ROTARY_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the largest position that a rank sees."""
_DEEPSPEED_ONLY = {
    "ep": (1, "shards experts"),
    "experts": ("whole", "parallelizes a model"),
    "cp": (1, "splits sequences"),
    "tp": (1, "parallelizes a model"),
    "pp": (1, "parallelizes a model"),
    "ulysses": (1, "splits sequences"),
    "sequence_parallel": (False, "splits sequences"),
    "offload_optimizer": ("none", "offloads"),
    "offload_params": ("none", "offloads"),
    "hpz": (1, "shards parameters"),
    "schedule": (None, "runs a pipeline"),
    "quantized_weights": (False, "quantizes them"),
    "quantized_gradients": (False, "quantizes them"),
    "offload_activations": (False, "offloads"),
    "tiled_mlp": (False, "tiles"),
}
"""Fields of `parallel` that other engines would silently ignore: the value that is off, and what DeepSpeed does."""


def setting_conflicts(recipe: Recipe, world_size: int | None) -> list[Refusal]:
    """Return what cannot run whatever the model is; with `world_size` also what does not fit that many ranks."""
    return [*_other_engines(recipe, world_size)] or [
        *_layout_and_batch(recipe, world_size),
        *_optimizer_settings(recipe),
        *_model_parallel_settings(recipe),
        *_schedule_settings(recipe),
        *_offload_settings(recipe),
        *_activation_settings(recipe),
        *_ulysses_settings(recipe),
        *_context_settings(recipe),
        *_blocks_settings(recipe),
        *_float8(recipe),
        *_liger(recipe),
    ]


def model_conflicts(recipe: Recipe, config: Mapping[str, Any] | None, shape: ModelShape | None) -> Iterator[Refusal]:
    """Yield what a model's config does not allow: parallelism, recomputation. Fewer rules apply where less is known."""
    yield from _recomputation(recipe, config)
    family = (config or {}).get("model_type")
    if recipe.model.kernels == "liger" and config is not None and family not in LIGER_FAMILIES:
        reason = f"Liger's kernels were tested for {', '.join(LIGER_FAMILIES)}"
        yield recipe.conflict("model.kernels", _MODEL, reason=reason, remedy=(("model.kernels", "torch"),))
    if recipe.parallel.tiled_mlp and config is not None and expert_count(config):
        field = "parallel.tiled_mlp"
        reason = "experts choose tokens of a whole micro-batch"
        yield recipe.conflict(field, _MODEL, reason=reason, remedy=((field, False),))
    yield from _precision_and_engine(recipe, config or {})
    if family in _REVERSIBLE:
        yield from _reversible(recipe)
    if recipe.train.engine != "deepspeed":
        return
    refused = [
        *_family(recipe, (config or {}).get("model_type")),
        *_ulysses_model(recipe, config),
        *_context_model(recipe, config or {}),
    ]
    yield from refused
    if shape is not None and not refused:
        section = recipe.parallel
        sizes = {name: getattr(section, name) for name in ("tp", "pp", "chunks", "ulysses", "ep")}
        for axis, reason, allowed in misfits(shape, **sizes, inner=section.experts == "inner"):
            field = f"parallel.{axis}"
            yield recipe.conflict(field, _MODEL, reason=reason, remedy=((field, allowed),))
    if shape is None and config is not None:
        yield from _experts(recipe, config)
        yield from _stages(recipe, config)
    if recipe.optimizer.name == "adamw8bit" and config is not None:
        yield from _moments_of_copies(recipe, shape)
    yield from _sequence_length(recipe, shape)


def _moments_of_copies(recipe: Recipe, shape: ModelShape | None) -> Iterator[Refusal]:
    """Copies that 8-bit moments would let drift apart: each is rounded by the largest of a block with its neighbors.

    Matrices that all tensor-parallel ranks have copies of are in blocks of their own (`parameter_groups`), and a tied
    embedding's moments are in fp32.
    """
    section = recipe.parallel
    if section.tp > 1 and (shape is None or shape.kv_heads % section.tp):
        reason = "ranks would round the moments of key-value heads that they share differently"
        allowed = 1 if shape is None else f"a divisor of {shape.kv_heads}"
        yield recipe.conflict(
            "optimizer.name", "parallel.tp", _MODEL, reason=reason, remedy=(("parallel.tp", allowed),)
        )


def _experts(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse experts that ranks cannot shard, where no more is known of a model than its config."""
    section = recipe.parallel
    count = expert_count(config)
    ranks = section.ep if section.experts == "inner" else section.ep * section.tp
    if count % ranks:
        reason = f"{count} experts cannot be shared equally by {ranks} ranks"
        remedy = f"choose a divisor of {count}"
        yield recipe.conflict("parallel.ep", "parallel.tp", _MODEL, reason=reason, remedy=(remedy,))


def _stages(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse more pipeline stages than decoder layers, where no more is known of a model than its config."""
    section = recipe.parallel
    fields = {**text_config(config), **recipe.model.overrides}
    layers = next((fields[name] for name in SPELLINGS["layers"] if name in fields), None)
    if section.pp == 1 or not isinstance(layers, int):
        return
    misfit = pipeline_misfit(layers, pp=section.pp, chunks=section.chunks)
    if misfit is not None:
        yield recipe.conflict(_PIPELINE, _MODEL, reason=misfit.reason, remedy=((_PIPELINE, misfit.allowed),))


def _family(recipe: Recipe, model_type: str | None) -> Iterator[Refusal]:
    """Refuse a family that was checked and cannot be parallelized. Others are examined when the model is built."""
    section = recipe.parallel
    blocks = _blocks_off(recipe)
    support = find(model_type) if blocks is not None or section.tp * section.pp * section.ep > 1 else None
    if support is None:
        return
    if blocks is not None and blocks[0] == _ATTENTION and support.context_refusal is not None:
        reason = f"the toolkit's attention does not serve the family {model_type} ({support.context_refusal})"
        yield recipe.conflict(_ATTENTION, _MODEL, reason=reason, remedy=(blocks, "see `dstk families`"))
    for name, off, refusal in (
        ("cp", 1, support.context_refusal),
        ("tp", 1, support.tensor_refusal),
        ("pp", 1, support.pipeline_refusal),
        # Where tp is refused, sequence parallelism is too, and the line about tp says why.
        ("sequence_parallel", False, None if support.tensor_refusal else support.sequence_refusal),
        ("experts", "whole", None if support.tensor_refusal else support.inner_refusal),
        ("ep", 1, support.ep_refusal),
    ):
        field = f"parallel.{name}"
        if recipe.value_of(field) != off and refusal is not None:
            reason = f"the family {model_type} does not support it ({refusal})"
            yield recipe.conflict(field, _MODEL, reason=reason, remedy=((field, off), "see `dstk families`"))


def _reversible(recipe: Recipe) -> Iterator[Refusal]:
    """Parts of a family whose layers get gradients only where the embedding before them does, and DDP."""
    if recipe.train.engine == "ddp":
        reason = "its backward pass runs layers again, and DDP counts their gradients twice"
        yield recipe.conflict("train.engine", _MODEL, reason=reason, remedy=(("train.engine", "deepspeed"),))
    for field in ("model.lora", "model.freeze", "model.train_only"):
        if recipe.value_of(field):
            reason = "its reversible layers have gradients only where all of the model trains"
            yield recipe.conflict(field, _MODEL, reason=reason, remedy=("leave it out",))


def _precision_and_engine(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Refusal]:
    """A family whose forward pass does not run in the recipe's precision, or that FSDP cannot shard."""
    model_type = config.get("model_type")
    support = find(model_type)
    if support is None:
        return
    engine = recipe.train.engine
    is_tied = config.get("tie_word_embeddings", True)
    if engine == "fsdp" and is_tied and support.fsdp_refusal is not None:
        remedy = (("train.engine", "deepspeed"), ("parallel.zero_stage", 3))
        yield recipe.conflict("train.engine", _MODEL, reason=support.fsdp_refusal, remedy=remedy)
    if recipe.precision == "fp32":
        return
    rounds_weights = engine == "fsdp" or (engine == "deepspeed" and recipe.parallel.zero_stage > 0)
    uses_autocast = engine in ("ddp", "fsdp") or (engine == "deepspeed" and recipe.parallel.zero_stage == 0)
    refusal = support.rounded_refusal if rounds_weights else None
    if refusal is None and uses_autocast:
        refusal = support.autocast_refusal
    if refusal is not None:
        reason = f"the code of the family {model_type} in transformers does not run so ({refusal})"
        stage = ("parallel.zero_stage",) if engine == "deepspeed" else ()
        yield recipe.conflict(
            "precision", "train.engine", *stage, _MODEL, reason=reason, remedy=(("precision", "fp32"),)
        )


def _recomputation(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Refusal]:
    """Refuse to recompute attention by itself where it cannot be. Unknown families are examined later."""
    if config is None or recipe.parallel.recompute != "selective":
        return
    reason = own_attention(config, recipe.model.attention)
    if reason is not None:
        field = "parallel.recompute"
        yield recipe.conflict(field, _MODEL, reason=reason, remedy=((field, "full or none"),))


def _other_engines(recipe: Recipe, world_size: int | None) -> Iterator[Refusal]:
    """Settings of DeepSpeed that another engine would silently ignore. The ZeRO stage has no meaning there."""
    engine = recipe.train.engine
    if engine == "deepspeed":
        return
    for name, (off, does) in _DEEPSPEED_ONLY.items():
        field = f"parallel.{name}"
        if recipe.value_of(field) != off:
            reason = f"only the engine deepspeed {does}"
            remedy = ((field, off), ("train.engine", "deepspeed"))
            yield recipe.conflict(field, "train.engine", reason=reason, remedy=remedy)
    if recipe.model.attn_implementation == "blocks" and engine != "reference":
        reason = "only the engine deepspeed has the toolkit's attention"
        remedy = ((_ATTENTION, "auto"), ("train.engine", "deepspeed"))
        yield recipe.conflict(_ATTENTION, "train.engine", reason=reason, remedy=remedy)
    if engine == "reference":
        yield from _reference(recipe, world_size)


def _reference(recipe: Recipe, world_size: int | None) -> Iterator[Refusal]:
    field = "train.engine"
    one_process = "the reference is one plain PyTorch process"
    if recipe.train.compile:
        reason = "the reference stays plain PyTorch"
        yield recipe.conflict("train.compile", field, reason=reason, remedy=(("train.compile", False),))
    if (recipe.parallel.dp or 1) > 1:
        yield recipe.conflict("parallel.dp", field, reason=one_process, remedy=(("parallel.dp", 1),))
    if world_size is not None and world_size > 1:
        settings = (("world_size", world_size), (field, "reference"))
        remedy = "launch 1 rank, for instance with `python`"
        yield Refusal(field=field, settings=settings, reason=one_process, remedy=(remedy,))


def _layout_and_batch(recipe: Recipe, world_size: int | None) -> Iterator[Refusal]:
    """Apply the rules of Layout and Batch; without a world size, those that hold for every world size."""
    fields = recipe.parallel.layout_fields
    if recipe.parallel.auto:
        return  # which the planner sees to
    if recipe.batch.micro_batch_size is None:
        field = "batch.micro_batch_size"
        reason = "only a plan chooses it"
        yield recipe.conflict(field, reason=reason, remedy=((field, "1 or more"), ("parallel", "auto")))
        return
    try:
        if world_size is None:
            layout = Layout(**{**fields, "dp": recipe.parallel.least_ranks // recipe.parallel.model_size})
        else:
            layout = Layout.resolve(world_size, **fields)
        Batch.resolve(**recipe.batch.model_dump(), dp=layout.dp)
    except (LayoutError, BatchError) as error:
        refusal = error.as_refusal()
        yield refusal.in_section("parallel") if isinstance(error, LayoutError) else refusal


def _optimizer_settings(recipe: Recipe) -> Iterator[Refusal]:
    field = "parallel.offload_optimizer"
    reason = {
        "muon": "the matrix products of Muon would run on the CPU",
        "adafactor": "ranks add up their parts of each matrix on GPUs",
        "adamw8bit": "bitsandbytes updates host memory without kernels, out of fp32 copies",
    }.get(recipe.optimizer.name)
    if reason is not None and recipe.value_of(field) != "none":
        yield recipe.conflict(
            "optimizer.name", field, reason=reason, remedy=((field, "none"), ("optimizer.name", "adamw"))
        )
    if recipe.optimizer.name != "adamw8bit":
        return
    if recipe.train.engine == "fsdp":
        reason = "bitsandbytes has no update of sharded tensors"
        yield recipe.conflict("optimizer.name", field := "train.engine", reason=reason, remedy=((field, "deepspeed"),))


def _model_parallel_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse what DeepSpeed does not do, or does wrongly, with tensor parallelism or a pipeline."""
    section = recipe.parallel
    precision = recipe.precision
    axes = [f"parallel.{axis}" for axis in ("tp", "pp") if getattr(section, axis) > 1]
    if axes and precision != "fp32" and section.zero_stage == 0:
        # Its 16-bit optimizers copy the parameters and lose the marks of tensor-parallel ones: the norm is wrong.
        field = "parallel.zero_stage"
        reason = "without ZeRO, DeepSpeed's 16-bit path forgets which parameters are tensor-parallel shards"
        yield recipe.conflict(field, *axes, "precision", reason=reason, remedy=((field, 1), ("precision", "fp32")))


def _schedule_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse what was not shown to train the same under a pipeline schedule of the toolkit's own."""
    field = "parallel.schedule"
    section = recipe.parallel
    if section.schedule is None:
        return
    off: Setting = (field, None)
    if section.schedule == "auto":  # which takes none that is refused
        if section.pp == 1 and not section.auto:
            reason = "a schedule orders the passes of a pipeline"
            yield recipe.conflict(field, "parallel.pp", reason=reason, remedy=(("parallel.pp", "2 or more"), off))
        return
    for condition, value, reason in (
        ("parallel.auto", False, "a plan chooses the schedule itself where that is auto"),
        ("parallel.offload_activations", False, "activations are fetched in the order of DeepSpeed's own instructions"),
        ("parallel.tiled_mlp", False, "MLPs in tiles were not tested with it"),
        ("model.float8", None, "float8 was not tested with it"),
        ("model.load_in_4bit", False, "4-bit weights were not tested with it"),
        ("model.kernels", "torch", "Liger's kernels were not tested with it"),
    ):
        if recipe.value_of(condition) != value:
            yield recipe.conflict(field, condition, reason=reason, remedy=(off, (condition, value)))
    unshown = {
        "adamw8bit": "its 8-bit moments amplify rounding, and it was not shown to train the same",
        "lion": "it takes the sign of its update, which rounding turns where that is near 0",
    }
    if recipe.optimizer.name in unshown:
        reason = unshown[recipe.optimizer.name]
        yield recipe.conflict(field, "optimizer.name", reason=reason, remedy=(off, ("optimizer.name", "adamw")))


def _offload_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse fields that are not part of a Layout: where NVMe is mounted, and what ZeRO++ quantizes."""
    section = recipe.parallel
    path = "parallel.nvme_path"
    on_nvme = [
        f"parallel.{name}" for name in ("offload_optimizer", "offload_params") if getattr(section, name) == "nvme"
    ]
    if on_nvme and section.nvme_path is None:
        remedy = (path, "a directory on a drive of each node"), (on_nvme[0], "cpu")
        yield recipe.conflict(path, on_nvme[0], reason="nothing says where the drive is mounted", remedy=remedy)
    if section.auto and (on_nvme or section.hpz > 1):
        field, instead = (on_nvme[0], "cpu") if on_nvme else ("parallel.hpz", "1")
        either: tuple[Setting, ...] = ((field, instead), ("parallel.auto", False))
        yield recipe.conflict(field, "parallel.auto", reason="a plan tries no layout with it", remedy=either)
    if recipe.train.compile and section.offload_params == "nvme":
        field = "parallel.offload_params"
        reason = "a compiled layer takes more weights at once than there are buffers"
        yield recipe.conflict(field, "train.compile", reason=reason, remedy=((field, "cpu"), ("train.compile", False)))
    for field in ("parallel.quantized_weights", "parallel.quantized_gradients"):
        if recipe.value_of(field) and section.zero_stage < 3:
            off = (("parallel.zero_stage", 3), (field, False))
            yield recipe.conflict(field, "parallel.zero_stage", reason="ZeRO++ is a part of ZeRO-3", remedy=off)
        axes = [f"parallel.{axis}" for axis in ("tp", "ulysses", "ep", "cp") if getattr(section, axis) > 1]
        if recipe.value_of(field) and axes:
            reason = "ZeRO++ groups ranks as if all of them were data-parallel"
            yield recipe.conflict(field, *axes, reason=reason, remedy=((field, False), (axes[0], 1)))


def _activation_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse to keep fewer activations in ways that do not work in a compiled layer or on a gathered sequence."""
    field = "parallel.tiled_mlp"
    if recipe.train.compile and recipe.parallel.tiled_mlp:
        reason = "its backward pass computes each tile again with other tensors in the place of the weights"
        remedy = ((field, False), ("train.compile", False))
        yield recipe.conflict(field, "train.compile", reason=reason, remedy=remedy)
    gathers = "parallel.sequence_parallel"
    if recipe.parallel.tiled_mlp and recipe.parallel.sequence_parallel:
        reason = (
            "sequence parallelism gathers a sequence before its MLP and scatters it in another order than tiles have"
        )
        yield recipe.conflict(field, gathers, reason=reason, remedy=((field, False), (gathers, False)))


def _float8(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse float8 where its scales would be computed from a part of a matrix or of a micro-batch."""
    field = "model.float8"
    if recipe.model.float8 is None:
        return
    own_scales = "a rank would scale its part of a matrix or of a sequence by itself"
    for condition, off, reason in (
        ("precision", "bf16", "float8 is for models in bf16"),
        ("train.engine", "deepspeed", "only the engine deepspeed was tested with it"),
        ("parallel.tp", 1, own_scales),
        ("parallel.ulysses", 1, own_scales),
        ("parallel.cp", 1, own_scales),
        ("model.lora", None, "adapters and the frozen layers beside them are not converted"),
    ):
        if recipe.value_of(condition) != off:
            yield recipe.conflict(field, condition, reason=reason, remedy=((condition, off), (field, None)))
    size = recipe.batch.micro_batch_size
    if size is not None and size * recipe.data.seq_len % 16:
        reason = "the tokens of a micro-batch must be a multiple of 16"
        yield recipe.conflict(field, "batch.micro_batch_size", "data.seq_len", reason=reason, remedy=((field, None),))


def _liger(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse Liger's kernels where they were not shown to compute what torch's do."""
    field = "model.kernels"
    if recipe.model.kernels == "torch":
        return
    for condition, off, reason in (
        ("train.engine", "deepspeed", "only the engine deepspeed was tested with Liger's kernels"),
        ("train.compile", False, "torch.compile was not tested around Liger's kernels"),
        ("model.float8", None, "float8 was not tested beside Liger's kernels"),
        ("model.load_in_4bit", False, "4-bit weights were not tested beside Liger's kernels"),
    ):
        if recipe.value_of(condition) != off:
            yield recipe.conflict(field, condition, reason=reason, remedy=((condition, off), (field, "torch")))


def _sequence_length(recipe: Recipe, shape: ModelShape | None) -> Iterator[Refusal]:
    """Refuse a sequence length that the number of ranks which hold equal parts of a sequence does not divide."""
    section = recipe.parallel
    seq_len = recipe.data.seq_len
    shards = section.tp if section.sequence_parallel else 1
    # A context-parallel rank has two chunks, which sequence parallelism splits again, at any place.
    slices = 1 if section.cp == 1 else math.lcm(2 * section.cp, section.cp * shards)
    for ranks, names, off in (
        (shards if section.cp == 1 else 1, ("sequence_parallel", "tp"), False),
        (section.ulysses, ("ulysses",), 1),
        (slices, ("cp", "sequence_parallel") if section.sequence_parallel else ("cp",), 1),
    ):
        if seq_len % ranks == 0:
            continue
        lower = seq_len // ranks * ranks
        upper = (seq_len // ranks + 1) * ranks
        longest = None if shape is None else shape.positions
        near = [str(length) for length in (lower, upper) if length and (longest is None or length <= longest)]
        fields = [f"parallel.{name}" for name in names]
        shorter = (("data.seq_len", " or ".join(near)),) if near else ()
        reason = "each rank takes an equal part of a sequence"
        if names[0] == "cp":
            reason = f"each rank takes two equal chunks of a sequence, so it must be a multiple of {ranks}"
        yield recipe.conflict("data.seq_len", *fields, reason=reason, remedy=(*shorter, (fields[0], off)))


def _context_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Settings that context parallelism has no part in, whatever the model is."""
    section = recipe.parallel
    if section.cp == 1 and section.cp_exchange != "auto":
        field = "parallel.cp_exchange"
        reason = "no ranks exchange keys and values"
        yield recipe.conflict(field, _CONTEXT, reason=reason, remedy=((_CONTEXT, "2 or more"), (field, "auto")))
    if section.cp == 1:
        return
    for field, off, reason in (
        ("model.attn_implementation", "auto", "context parallelism has an attention of its own"),
        ("model.expert_capacity_factor", None, "a rank would limit the experts of its part of a sequence"),
    ):
        value = recipe.value_of(field)
        if value != off and not (field == _ATTENTION and value in (None, "blocks")):
            yield recipe.conflict(field, _CONTEXT, reason=reason, remedy=((field, off), (_CONTEXT, 1)))


def _blocks_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Settings that the toolkit's attention has no part in, with context parallelism and without."""
    off = _blocks_off(recipe)
    if off is None:
        return
    for field, allowed, reason in (
        ("model.kernels", "torch", "Liger's kernels were not tested beside it"),
        ("model.load_in_4bit", False, "4-bit weights were not tested beside it"),
    ):
        if recipe.value_of(field) != allowed:
            yield recipe.conflict(field, off[0], reason=reason, remedy=((field, allowed), off))
    if recipe.parallel.recompute == "selective":
        field = "parallel.recompute"
        reason = "its attention keeps no scores that could be recomputed"
        yield recipe.conflict(field, off[0], reason=reason, remedy=((field, "none or full"),))
    if off[0] == _ATTENTION and recipe.parallel.ulysses > 1:
        reason = "DeepSpeed-Ulysses puts an attention of its own around transformers'"
        yield recipe.conflict(_ATTENTION, _ULYSSES, reason=reason, remedy=(off, (_ULYSSES, 1)))


def _blocks_off(recipe: Recipe) -> Setting | None:
    """Return the setting with which transformers' attention would compute; None where it does."""
    if recipe.parallel.cp > 1:
        return _CONTEXT, 1
    return (_ATTENTION, "auto") if recipe.model.attn_implementation == "blocks" else None


def _context_model(recipe: Recipe, config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse what the toolkit's attention cannot compute in a model's config."""
    off = _blocks_off(recipe)
    if off is None:
        return
    asked = off[0]
    if "auto_map" in config:
        reason = "it brings its own code, which may bypass the toolkit's attention"
        yield recipe.conflict(asked, _MODEL, reason=reason, remedy=(off,))
    if recipe.parallel.cp > 1 and (kind := _rotary_kind(config)) in _ROTARY_BY_LENGTH:
        reason = f"its rotary embedding ({kind}) depends on the length of a sequence, of which a rank sees a part"
        yield recipe.conflict(_CONTEXT, _MODEL, reason=reason, remedy=(off, "take a model with another one"))
    heads = config.get("num_attention_heads") or config.get("n_head")
    shares = recipe.parallel.cp_ulysses * recipe.parallel.tp
    if recipe.parallel.cp_ulysses > 1 and isinstance(heads, int) and heads % shares:
        field = "parallel.cp_ulysses"
        reason = f"its {heads} attention heads cannot be shared equally by {shares} ranks"
        yield recipe.conflict(field, "parallel.tp", _MODEL, reason=reason, remedy=((field, 1), "lower parallel.tp"))
    names = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
    dropped = next((name for name in names if config.get(name)), None)
    if dropped is not None:
        reason = f"its {dropped} of {config[dropped]} drops pairs of tokens, and the toolkit's attention drops none"
        remedy = (off, f"set model.overrides.{dropped}=0.0")
        yield recipe.conflict(asked, _MODEL, reason=reason, remedy=remedy)


def _ulysses_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Settings that DeepSpeed-Ulysses would ignore or train wrongly, whatever the model is.

    Its attention accepts almost any model and drops the masks that it makes, so whatever depends on one is refused by
    name. (The mask that keeps documents apart is made by toolkit/parallel/sequence/ulysses.py.)
    """
    if recipe.parallel.ulysses == 1:
        return
    off: Setting = (_ULYSSES, 1)
    axes = [f"parallel.{axis}" for axis in ("tp", "pp") if getattr(recipe.parallel, axis) > 1]
    if axes:
        reason = "DeepSpeed-Ulysses supports dp and any zero_stage, without tp and pp"
        remedy = f"set {' and '.join(f'{axis}=1' for axis in axes)}"
        yield recipe.conflict(_ULYSSES, *axes, reason=reason, remedy=(off, remedy))
    if recipe.model.attention == "eager":
        field = "model.attn_implementation"
        reason = "eager attention needs the mask that DeepSpeed-Ulysses drops"
        yield recipe.conflict(field, _ULYSSES, reason=reason, remedy=((field, "sdpa or flash_attention_2"), off))


def _ulysses_model(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Refusal]:
    """Refuse what DeepSpeed-Ulysses cannot train in a model's config; nothing while the config is not known."""
    obstacle = _ulysses_obstacle(config, recipe.data.seq_len) if config and recipe.parallel.ulysses > 1 else None
    if obstacle is not None:
        reason, remedy = obstacle
        yield recipe.conflict(_ULYSSES, _MODEL, reason=reason, remedy=((_ULYSSES, 1), remedy))


def _ulysses_obstacle(config: Mapping[str, Any], seq_len: int) -> tuple[str, Setting | str] | None:
    """Return why DeepSpeed-Ulysses cannot train the model, and a remedy; None where it can."""
    family = config.get("model_type")
    others = "take a model of another family, such as llama or qwen3 (dstk families lists them)"
    if "auto_map" in config:
        return "it brings its own code, which may bypass DeepSpeed-Ulysses", others
    if family not in ULYSSES_FAMILIES:
        return f"the family {family} was not found to train the same under DeepSpeed-Ulysses", others
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and seq_len > window:
        reason = f"DeepSpeed-Ulysses drops the mask of its sliding window of {window} tokens"
        return reason, ("data.seq_len", f"{window} or less")
    kinds = {str(layer) for layer in config.get("layer_types") or ()} - {"full_attention", "sliding_attention"}
    if kinds:
        return f"DeepSpeed-Ulysses drops the masks of its layers of type {', '.join(sorted(kinds))}", others
    kind = _rotary_kind(config)
    if kind in _ROTARY_BY_LENGTH:
        reason = f"its rotary embedding ({kind}) depends on the length of a sequence, of which a rank sees a part"
        return reason, "take a model with another one"
    return None


def _rotary_kind(config: Mapping[str, Any]) -> object:
    """The kind of a config's rotary embedding; None where it has none, or one for each kind of layer."""
    # transformers 5 writes the first, older versions the second.
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rotary.get("rope_type", rotary.get("type")) if isinstance(rotary, Mapping) else None
