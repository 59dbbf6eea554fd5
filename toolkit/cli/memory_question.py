"""What `dstk memory` is asked: a model, a layout, a step's work and a GPU, from options or from a recipe."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.memory import Framework, MemoryModel, Workload
from toolkit.families.own_attention import own_attention
from toolkit.hardware import Gpu
from toolkit.hardware import gpu as find_gpu
from toolkit.layout import Layout
from toolkit.planner.run_memory import framework_of, model_config, recipe_of, workload_of
from toolkit.recipe import Precision, Recipe
from toolkit.shape import ModelShape, find_config

_SEQ_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Question:
    """One layout of one model. `asked` holds the recipe from which other layouts are derived."""

    name: str
    config: Mapping[str, Any]
    model: MemoryModel
    recipe: Recipe
    layout: Layout
    work: Workload
    gpu: Gpu | None

    @property
    def title(self) -> str:
        """Model, layout and batch on one line."""
        w = self.work
        parts = [self.name, str(self.layout), self.recipe.precision, f"micro-batch {w.micro_batch_size} x {w.seq_len}"]
        if w.recompute != "none":
            parts.append(f"recompute {w.recompute}")
        if self.layout.sequence_parallel:
            parts.append("sequence parallel")
        offloaded = [
            what
            for what, device in (("optimizer", self.layout.offload_optimizer), ("params", self.layout.offload_params))
            if device != "none"
        ]
        if offloaded:
            parts.append(f"{' and '.join(offloaded)} on the host")
        return ", ".join(parts)

    def framework(self) -> Framework:
        """How the recipe's engine keeps states in this layout."""
        batch = self.recipe.resolve_batch(self.layout)
        return framework_of(self.recipe, self.layout, batch, hidden_size=self.model.architecture.shape.hidden)

    def answer(self) -> tuple[MemoryBreakdown, ...]:
        """Every stage."""
        return self.model.breakdowns(self.layout, self.work, self.framework(), self.gpu)

    def peak(self) -> MemoryBreakdown:
        """The stage that takes most."""
        return self.model.peak(self.layout, self.work, self.framework(), self.gpu)

    def largest_micro_batch(self) -> int | None:
        """Samples; None where no GPU is named."""
        if self.gpu is None:
            return None
        return self.model.largest_micro_batch(self.layout, self.work, self.framework(), self.gpu)


def from_recipe(path: str, options: Mapping[str, Any]) -> Question:
    """The question that a recipe asks; options beside it take the place of its own fields."""
    from toolkit import recipe_file  # YAML and all its rules, which a question without a recipe does not wait for

    given = {
        "batch.micro_size": options["micro"],
        "data.seq_len": options["seq"],
        "precision": options["precision"],
        "parallel.sequence_parallel": "true" if options["sequence_parallel"] else None,
        "parallel.offload_optimizer": "cpu" if options["offload_optimizer"] else None,
        "parallel.offload_params": "cpu" if options["offload_params"] else None,
    }
    overrides = [f"{field}={value}" for field, value in given.items() if value is not None]
    world_size = options["world_size"]
    recipe = recipe_file.load(path, overrides, world_size=world_size)
    section = recipe.parallel
    ranks = world_size or recipe.world_size or section.tp * section.pp * section.ulysses
    layout = recipe.layout(ranks)
    batch = recipe.resolve_batch(layout)
    work = workload_of(recipe, batch)
    return _with_options(recipe.model.name_or_path, model_config(recipe), recipe, layout, work, options)


def from_model(options: Mapping[str, Any]) -> Question:
    """A model and a layout, with the toolkit's own DeepSpeed config for them."""
    config = read_config(options["model"])
    layout = replace(
        Layout.parse(options["layout"], world_size=options["world_size"]),
        sequence_parallel=options["sequence_parallel"],
        offload_optimizer="cpu" if options["offload_optimizer"] else "none",
        offload_params="cpu" if options["offload_params"] else "none",
    )
    positions = ModelShape.from_config(config).positions
    micro, seq_len = options["micro"] or 1, options["seq"] or min(_SEQ_LEN, positions or _SEQ_LEN)
    accumulation = options["accumulation"] or 4 * layout.pp
    precision: Precision = options["precision"] or "bf16"
    recipe = recipe_of(
        options["model"],
        layout,
        micro_batch_size=micro,
        seq_len=seq_len,
        accumulation=accumulation,
        precision=precision,
    )
    work = Workload(micro_batch_size=micro, seq_len=seq_len, accumulation=accumulation)
    return _with_options(_name_of(options["model"]), config, recipe, layout, work, options)


def _name_of(model: str) -> str:
    path = Path(model)
    return path.resolve().parent.name if path.name == "config.json" else path.name


def read_config(name: str) -> dict[str, Any]:
    """The config of a known shape, of a directory, or of a config.json. Raises ModelError where there is none."""
    path = Path(name).expanduser()
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"{name} is not JSON: {error}. Name a config.json.") from None
        if not isinstance(found, dict):
            raise ModelError(f"{name} holds a {type(found).__name__}: a config is a JSON object.")
        return found
    known = find_config(name)
    if known is None:
        raise ModelError(
            f"model {name}: not a known shape or local directory, and nothing is fetched from a hub. Name a directory "
            "with a config.json, or one of the catalogue, for instance gpt2."
        )
    return known


def _with_options(
    name: str, config: dict[str, Any], recipe: Recipe, layout: Layout, work: Workload, options: Mapping[str, Any]
) -> Question:
    if options["attention"] is not None:
        work = replace(work, attention=options["attention"])
    if options["recompute"] is not None:
        work = replace(work, recompute=options["recompute"])
    if options["accumulation"] is not None:
        work = replace(work, accumulation=options["accumulation"])
    model = MemoryModel.from_config(config)
    if options["attention"] is None and not model.style.sdpa:
        work = replace(work, attention="eager")  # all that transformers has for this family
    refuse_selective(config, work)
    shape = model.architecture.shape
    if shape.learned_positions and shape.positions is not None and work.seq_len > shape.positions:
        raise LayoutError(f"{work.seq_len} tokens: {name} has {shape.positions} positions. Lower --seq.")
    return Question(
        name=name,
        config=config,
        model=model,
        recipe=recipe,
        layout=layout,
        work=work,
        gpu=None if options["gpu_name"] is None else find_gpu(options["gpu_name"]),
    )


def refuse_selective(config: Mapping[str, Any], work: Workload) -> None:
    """Raise ModelError for selective recomputation of a family that cannot be trained with it."""
    reason = own_attention(config, work.attention) if work.recompute == "selective" else None
    if reason is not None:
        raise ModelError(f"recompute=selective: {reason}. Set --recompute to full or none.")
