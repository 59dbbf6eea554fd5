"""Query of `dstk memory`: a model, a layout, a step's work and a GPU, from options or from a recipe."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.cli import guess_note
from toolkit.cli.memory.frameworks import FrameworkSetup, framework_setup
from toolkit.cli.plan.auto_recipe import explicit
from toolkit.config.layout import Layout
from toolkit.config.parallel_rules import model_conflicts, setting_conflicts
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import layout_text, parse_layout
from toolkit.errors import LayoutError, Refusal, spell_setting
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.memory_request import Framework, MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.states import TorchStates
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.files import expanded
from toolkit.hardware import Gpu, variant_note, variants
from toolkit.hardware import gpu as find_gpu
from toolkit.models.config_fields import read_config_json
from toolkit.models.shape import local_config
from toolkit.planner.run_memory import Implementation, framework_of, model_config, recipe_of, training_setup
from toolkit.units import LARGEST_COUNT

_SEQ_LEN = 2048
_IMPLEMENTATIONS: dict[str | None, Implementation] = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
"""The options' names of attention, and a recipe's."""
_OPTIONS: dict[str, str] = json.loads(Path(__file__).with_name("flags.json").read_text(encoding="utf-8"))
"""Fields of a recipe -> options of this command."""


@dataclass(frozen=True, kw_only=True)
class MemoryQuery:
    """One layout of one model. `recipe` is what would be trained."""

    name: str
    config: Mapping[str, Any]
    model: ModelFacts
    recipe: Recipe
    ranks: int
    gpu: Gpu | None
    from_options: bool
    """Whether the recipe was made from options: then errors name them."""
    other_setup: FrameworkSetup | None = None
    """Another framework's setup, instead of that of the recipe's engine; None without one."""
    computed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Computation that override what follows from the recipe; a change to it does not reach them."""
    is_guess: bool = False
    """Whether nothing says the number of ranks."""
    remarks: tuple[str | None, ...] = ()
    """Remarks about options that were taken differently from how they were given."""

    @cached_property
    def layout(self) -> Layout:
        """The layout that the recipe asks for. Raises LayoutError where that cannot run."""
        return self.recipe.layout(self.ranks)

    @cached_property
    def setup(self) -> TrainingSetup:
        """What is trained. Raises LayoutError and BatchError where that cannot run."""
        setup = training_setup(self.recipe, self.layout, self.recipe.resolve_batch(self.layout), self.model)
        computation = replace(setup.computation, **self.computed)
        chunked_loss = setup.chunked_loss and self.other_setup is None
        return replace(setup, computation=computation, chunked_loss=chunked_loss)

    @cached_property
    def framework(self) -> Framework:
        """What keeps the model states in this layout: the recipe's engine, or another framework."""
        if self.other_setup is not None:
            return self.other_setup.framework
        batch = self.recipe.resolve_batch(self.layout)
        return framework_of(self.recipe, self.layout, batch, shape=self.model.shape)

    @property
    def memory_request(self) -> MemoryRequest:
        """The memory estimate's input."""
        return MemoryRequest(setup=self.setup, framework=self.framework, gpu=self.gpu)

    @property
    def notes(self) -> list[str]:
        """Notes that the user should know beside the answer."""
        notes = [guess_note(self.layout.world_size)] if self.is_guess else []
        notes += filter(None, self.remarks)
        if "auto_map" in self.config:
            family = f"transformers' own {self.config['model_type']}"
            notes.append(f"config.json names code of its own (auto_map), which does not run here: this is {family}.")
        positions_note = self.model.positions_note(self.name, seq_len=self.setup.seq_len)
        if positions_note is not None:
            notes.append(positions_note)
        section = self.recipe.train.distill
        if section is not None and self.setup.teacher is None:
            reason = "the size of the teacher is not known here, and its pass before training is not counted"
            notes.append(f"{section.teacher}: {reason}; name a directory with its config.json.")
        if self.gpu is not None and self.gpu.bf16_flops is None and self.recipe.precision == "bf16":
            reason = f"{self.gpu.name} has no bf16 units, and training refuses bf16 there"
            notes.append(f"{reason}: --precision fp16 or fp32.")
        return notes

    @property
    def engine(self) -> str:
        """Name of the engine or framework that trains."""
        return self.recipe.train.engine if self.other_setup is None else self.other_setup.name

    @property
    def has_zero_stages(self) -> bool:
        """Whether the layout chooses the ZeRO stage: with the recipe's DeepSpeed, or in another framework's profile."""
        if self.other_setup is not None and not isinstance(self.other_setup.framework, FrameworkProfile):
            return False
        return self.recipe.train.engine == "deepspeed"

    @property
    def title(self) -> str:
        """Model, layout and batch on one line."""
        return self.title_without(())

    def title_without(self, swept: Collection[str]) -> str:
        """Model, layout and batch on one line, without what the axes of a sweep vary."""
        setup = self.setup
        parts = [self.name, self._ranks_without(swept), self.recipe.precision, *_sizes(setup, swept)]
        if setup.accumulation > 1:
            parts.append(f"accumulation {setup.accumulation}")
        parts.append(setup.attention)
        if setup.layout.recompute != "none" and "recompute" not in swept:
            parts.append(f"recompute {setup.layout.recompute}")
        return ", ".join([*parts, *self._computation_words, *_layout_words(setup)])

    def _ranks_without(self, swept: Collection[str]) -> str:
        """Return the layout for a title, with the engine where that is not this toolkit's DeepSpeed."""
        layout = self.layout
        ranks = f"dp{layout.dp}" if isinstance(self.framework, TorchStates) else str(layout)
        if "zero" in swept:
            ranks = ranks.removesuffix(f"-z{layout.zero_stage}")
        return ranks if self.engine == "deepspeed" else f"{self.engine}, {ranks}"

    @property
    def _computation_words(self) -> list[str]:
        """What trains, and how the loss is computed, for a title."""
        setup = self.setup
        computation = setup.computation
        words = []
        if computation.trainable:
            words.append(f"trainable {computation.trainable}")
        if computation.loss_chunk:
            words.append(f"loss of {computation.loss_chunk} tokens at once")
        if self.other_setup is None and not setup.chunked_loss:
            words.append("full logits")
        return words

    def global_batch_size(self, micro_batch_size: int) -> int:
        """Samples of a step with another micro-batch and the same accumulation. Raises LayoutError for too many."""
        return _samples(micro_batch_size, self.setup.accumulation, self.layout)

    def changed(self, recipe: Mapping[str, Mapping[str, Any]], computed: Mapping[str, Any]) -> "MemoryQuery":
        """Return the query with other values in the recipe, by section, and in `computed`."""
        return replace(self, recipe=self.recipe.changed(recipe), computed={**self.computed, **computed})

    def check(self) -> None:
        """Raise LayoutError for what training refuses, in terms of the recipe or of the options."""
        refusal = self._first_conflict() if self.other_setup is None else None
        if refusal is None:
            return
        if not self.from_options:
            raise LayoutError(refusal)
        refusal = replace(
            refusal, settings=tuple(setting for setting in refusal.settings if setting[0] != "model.name_or_path")
        )
        raise LayoutError(refusal.render(self._spell_option, verb="use"), [refusal])

    def _first_conflict(self) -> Refusal | None:
        """Return a conflict with the model if there is one: no other stage or precision resolves it."""
        for refusal in model_conflicts(self.recipe, self.config, self.model.shape):
            return refusal
        for refusal in reversed(setting_conflicts(self.recipe, None)):  # the axes before the stages and precisions
            return refusal
        return None

    def _spell_option(self, field: str, value: Any) -> str:
        """Write a recipe's setting as an option of this command."""
        name = field.rpartition(".")[2]
        if name == "zero_stage" and value != self.layout.zero_stage:
            return f"--layout {layout_text(replace(self.layout, zero_stage=value))}"
        if name not in _OPTIONS:
            return spell_setting(name, value)
        words = value.replace("flash_attention_2", "flash") if isinstance(value, str) else value
        return spell_setting(_OPTIONS[name], words)

    def answer(self) -> tuple[MemoryBreakdown, ...]:
        """Every stage; with what PyTorch's allocator adds if a GPU is named, whose memory it takes."""
        stages = self.memory_request.stages()
        return stages if self.gpu is None else tuple(stage.replayed() for stage in stages)

    def peak(self) -> MemoryBreakdown:
        """The stage that takes most."""
        return self.memory_request.peak()

    def largest_micro_batch(self) -> int | None:
        """Samples; None where no GPU is named."""
        return None if self.gpu is None else self.memory_request.largest_micro_batch()


def _layout_words(setup: TrainingSetup) -> list[str]:
    """Return what of a layout its name does not say, for a title."""
    layout = setup.layout
    words = []
    if layout.sequence_parallel:
        words.append("sequence parallel")
    if layout.experts == "inner":
        words.append("every expert sharded")
    if setup.computation.imbalance != 1:
        words.append(f"imbalance {setup.computation.imbalance:g}")
    places = {"cpu": "the host", "nvme": "NVMe"}
    offloaded = []
    if layout.offload_optimizer != "none":
        offloaded.append(f"optimizer on {places[layout.offload_optimizer]}")
    if layout.offload_params != "none":
        offloaded.append(f"params on {places[layout.offload_params]}")
    if offloaded:
        words.append(" and ".join(offloaded))
    if layout.offload_activations:
        words.append("activations on the host")
    if layout.tiled_mlp:
        words.append("tiled MLPs")
    return words


def _sizes(setup: TrainingSetup, swept: Collection[str]) -> list[str]:
    """Return the sizes of a micro-batch for a title, without what the axes of a sweep vary."""
    if "micro" in swept:
        return [] if "seq" in swept else [f"samples of {setup.seq_len} tokens"]
    sizes = f"micro-batch {setup.micro_batch_size}"
    return [sizes if "seq" in swept else f"{sizes} x {setup.seq_len}"]


def from_recipe(path: str, options: Mapping[str, Any]) -> MemoryQuery:
    """The query that a recipe asks; options beside it take the place of its own fields."""
    from toolkit.config import load_rounded  # and with it YAML, which a query without a recipe does not wait for

    changes = {
        "batch.micro_batch_size": options["micro"],
        "data.seq_len": options["seq"],
        "precision": options["precision"],
        "model.attn_implementation": _IMPLEMENTATIONS.get(options["attention"]),
        "parallel.recompute": options["recompute"],
        "parallel.sequence_parallel": "true" if options["sequence_parallel"] else None,
        "parallel.offload_optimizer": "cpu" if options["offload_optimizer"] else None,
        "parallel.offload_params": "cpu" if options["offload_params"] else None,
    }
    overrides = [f"{field}={value}" for field, value in changes.items() if value is not None]
    world_size = options["world_size"]
    rounds = options["micro"] is not None
    recipe, remark = load_rounded(path, overrides, world_size=world_size, rounds=rounds, layout=options["layout"])
    recipe = explicit(recipe, world_size, options["gpu_name"])
    section = recipe.parallel
    ranks = world_size or recipe.world_size or section.model_size
    if options["accumulation"] is not None:
        size = _samples(recipe.batch.micro_batch_size or 1, options["accumulation"], recipe.layout(ranks))
        recipe = recipe.changed({"batch": {"global_batch_size": size}})
    config = model_config(recipe)
    return MemoryQuery(
        name=recipe.model.name_or_path,
        config=config,
        model=ModelFacts.from_config(config),
        recipe=recipe,
        ranks=ranks,
        gpu=_gpu(options) or _listed_gpu(recipe),
        from_options=False,
        computed={"imbalance": options["imbalance"] or 1.0},
        is_guess=not (world_size or recipe.world_size),
        remarks=(remark if options["accumulation"] is None else None, variant_note(options["gpu_name"])),
    )


def from_model(options: Mapping[str, Any]) -> MemoryQuery:
    """A model and a layout, with the toolkit's own DeepSpeed config for them."""
    options = _with_micro_of_layout(options)
    config = read_config(options["model"])
    name = _name_of(options["model"])
    model = ModelFacts.from_config(config)
    shape = model.shape
    named_layout = parse_layout(options["layout"], world_size=options["world_size"])
    other_setup = framework_setup(options, named_layout, shape.hidden)
    layout = _with_options(named_layout, options, other_setup)
    seq_len = options["seq"] or min(_SEQ_LEN, shape.positions or _SEQ_LEN)
    micro_batch_size = options["micro"] or (1 if other_setup is None else other_setup.micro_batch_size)
    accumulation = _accumulation(layout, options, other_setup)
    _samples(micro_batch_size, accumulation, layout)
    imbalance = options["imbalance"] or 1.0
    model.check_options(name, seq_len=seq_len, imbalance=imbalance)
    recipe = recipe_of(
        options["model"],
        layout,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        accumulation=accumulation,
        precision=options["precision"] or "bf16" if other_setup is None else other_setup.precision,
        engine=options["engine"] or "deepspeed",
        optimizer="adamw" if other_setup is not None else options["optimizer"] or "adamw",
        attention=_IMPLEMENTATIONS.get(options["attention"]),
    )
    computed = {"imbalance": imbalance}
    remarks = [variant_note(options["gpu_name"])]
    if other_setup is not None:
        computed |= other_setup.computed
        remarks += other_setup.notes
    return MemoryQuery(
        name=name,
        config=config,
        model=model,
        recipe=recipe,
        ranks=layout.world_size,
        gpu=_gpu(options),
        from_options=True,
        computed=computed,
        remarks=tuple(remarks),
        other_setup=other_setup,
    )


def _with_micro_of_layout(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with the micro-batch that a layout of `dstk plan` ends in, `-m2`; --micro goes before it."""
    match = re.fullmatch(r"(.+)-m([1-9][0-9]{0,9})", options["layout"])
    if match is None:
        return options
    return {**options, "layout": match[1], "micro": options["micro"] or int(match[2])}


def _with_options(layout: Layout, options: Mapping[str, Any], other_setup: FrameworkSetup | None) -> Layout:
    """Return the layout with what its name does not say, of which another framework's setup has the last word."""
    changes: dict[str, Any] = {name: "cpu" for name in ("offload_optimizer", "offload_params") if options[name]}
    changes |= {name: options[name] for name in ("recompute", "sequence_parallel") if options[name]}
    if other_setup is not None:
        changes |= other_setup.layout
    return replace(layout, **changes)


def _accumulation(layout: Layout, options: Mapping[str, Any], other_setup: FrameworkSetup | None) -> int:
    """Return the micro-batches of a step: as asked for, another framework's, or four for each pipeline stage."""
    accumulation: int | None = options["accumulation"]
    if accumulation is None and other_setup is not None:
        accumulation = other_setup.accumulation
    return 4 * layout.pp if accumulation is None else accumulation


def _samples(micro_batch_size: int, accumulation: int, layout: Layout) -> int:
    """Samples of a step. Raises LayoutError for more than are counted."""
    samples = micro_batch_size * accumulation * layout.dp
    if samples > LARGEST_COUNT:
        factors = (("--micro", micro_batch_size), ("--accumulation", accumulation), ("dp", layout.dp))
        reason = f"{samples} samples of a step are out of range; up to {LARGEST_COUNT} are counted"
        raise LayoutError.between(factors, reason, "lower one of them")
    return samples


def _gpu(options: Mapping[str, Any]) -> Gpu | None:
    return None if options["gpu_name"] is None else find_gpu(options["gpu_name"])


def _listed_gpu(recipe: Recipe) -> Gpu | None:
    """The GPU that the name of the recipe's layout says; None for one that is not known."""
    gpus = [gpu for name in recipe.layouts for gpu in variants(name.partition("x")[2])]
    return gpus[0] if gpus else None


def _name_of(model: str) -> str:
    path = Path(model)
    return path.resolve().parent.name if path.name == "config.json" else path.name


def read_config(name: str) -> dict[str, Any]:
    """The config of a known shape, of a directory, or of a config.json. Raises ModelError where there is none."""
    path = expanded(name)
    return read_config_json(path) if path.is_file() else local_config(name)
