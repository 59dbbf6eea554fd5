"""What `dstk memory` is asked: a model, a layout, a step's work and a GPU, from options or from a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import config_file
from toolkit.cli.memory_refusal import refuse, refuse_options
from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.memory import Framework, MemoryModel, Workload
from toolkit.hardware import Gpu
from toolkit.hardware import gpu as find_gpu
from toolkit.layout import Layout
from toolkit.planner.run_memory import Implementation, framework_of, model_config, recipe_of, workload_of
from toolkit.recipe import Recipe
from toolkit.shape import find_config

_SEQ_LEN = 2048
_IMPLEMENTATIONS: dict[str | None, Implementation] = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
"""The options' names of attention, and a recipe's."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One layout of one model. `recipe` is what would be trained."""

    name: str
    config: Mapping[str, Any]
    model: MemoryModel
    recipe: Recipe
    layout: Layout
    work: Workload
    gpu: Gpu | None
    from_options: bool
    """Whether the recipe was made from options: then errors name them."""
    notes: tuple[str, ...] = ()
    """What the user should know beside the answer."""

    @property
    def title(self) -> str:
        """Model, layout and batch on one line."""
        w, engine = self.work, self.recipe.train.engine
        ranks = str(self.layout) if engine == "deepspeed" else f"{engine}, dp{self.layout.dp}"
        parts = [self.name, ranks, self.recipe.precision, f"micro-batch {w.micro_batch_size} x {w.seq_len}"]
        if w.accumulation > 1:
            parts.append(f"accumulation {w.accumulation}")
        parts.append(w.attention)
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

    def check(self) -> None:
        """Raise LayoutError for what training refuses."""
        shape = self.model.architecture.shape
        if self.from_options:
            refuse_options(self.recipe, self.layout, self.config, shape)
        else:
            refuse(self.recipe, self.config, shape)

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
        "model.attn_implementation": _IMPLEMENTATIONS.get(options["attention"]),
        "parallel.recompute": options["recompute"],
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
    work = workload_of(recipe, recipe.resolve_batch(layout))
    if options["accumulation"] is not None:
        work = replace(work, accumulation=options["accumulation"])
    config = model_config(recipe)
    model = MemoryModel.from_config(config)
    if options["attention"] is None and not model.style.sdpa:
        work = replace(work, attention="eager")  # all that transformers has for this family
    question = Question(
        name=recipe.model.name_or_path,
        config=config,
        model=model,
        recipe=recipe,
        layout=layout,
        work=work,
        gpu=_gpu(options),
        from_options=False,
    )
    return _with_notes(question, guessed=not (world_size or recipe.world_size))


def from_model(options: Mapping[str, Any]) -> Question:
    """A model and a layout, with the toolkit's own DeepSpeed config for them."""
    config = read_config(options["model"])
    layout = replace(
        Layout.parse(options["layout"], world_size=options["world_size"]),
        sequence_parallel=options["sequence_parallel"],
        offload_optimizer="cpu" if options["offload_optimizer"] else "none",
        offload_params="cpu" if options["offload_params"] else "none",
        recompute=options["recompute"] or "none",
    )
    name, model = _name_of(options["model"]), MemoryModel.from_config(config)
    shape = model.architecture.shape
    seq_len = options["seq"] or min(_SEQ_LEN, shape.positions or _SEQ_LEN)
    recipe = recipe_of(
        options["model"],
        layout,
        micro_batch_size=options["micro"] or 1,
        seq_len=seq_len,
        accumulation=options["accumulation"] or 4 * layout.pp,
        precision=options["precision"] or "bf16",
        # eager is all that transformers has for some families
        attention=_IMPLEMENTATIONS[options["attention"] or ("sdpa" if model.style.sdpa else "eager")],
    )
    if shape.learned_positions and shape.positions is not None and seq_len > shape.positions:
        raise LayoutError(f"{seq_len} tokens: {name} has {shape.positions} positions. Lower --seq.")
    question = Question(
        name=name,
        config=config,
        model=model,
        recipe=recipe,
        layout=layout,
        work=workload_of(recipe, recipe.resolve_batch(layout)),
        gpu=_gpu(options),
        from_options=True,
    )
    return _with_notes(question, guessed=False)


def _gpu(options: Mapping[str, Any]) -> Gpu | None:
    return None if options["gpu_name"] is None else find_gpu(options["gpu_name"])


def _with_notes(question: Question, *, guessed: bool) -> Question:
    notes, gpu = [], question.gpu
    if guessed:
        ranks = question.layout.world_size
        many = "1 rank" if ranks == 1 else f"{ranks} ranks"
        notes.append(f"for {many}, as neither --world-size nor parallel.dp says how many.")
    if gpu is not None and gpu.bf16_flops is None and question.recipe.precision == "bf16":
        notes.append(f"{gpu.name} has no bf16 units, and training refuses bf16 there: --precision fp16 or fp32.")
    return replace(question, notes=tuple(notes))


def _name_of(model: str) -> str:
    path = Path(model)
    return path.resolve().parent.name if path.name == "config.json" else path.name


def read_config(name: str) -> dict[str, Any]:
    """The config of a known shape, of a directory, or of a config.json. Raises ModelError where there is none."""
    path = Path(name).expanduser()
    if path.is_file():
        return config_file.read(path)
    known = find_config(name)
    if known is None:
        raise ModelError(
            f"model {name}: not a known shape or local directory, and nothing is fetched from a hub. Name a directory "
            "with a config.json, or one of the catalogue, for instance gpt2."
        )
    return known
