"""The job of a distillation's teacher: its model in the layout of the run, with next to nothing that trains."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from toolkit.config.job import Job
from toolkit.config.objective_section import ObjectiveSection
from toolkit.config.recipe import ModelSection, OptimizerSection
from toolkit.config.router_rules import expert_count
from toolkit.errors import Refusal, Setting, ToolkitError
from toolkit.model_init.build_model import load_config

_ROUTING = ("router_aux_loss", "router_z_loss", "router_bias_update", "expert_capacity_factor")
"""Fields of `model` that only training reads, and that a teacher without experts may not have."""
_MODEL = "model."
_NAMED_FIELD = re.compile(r"(?<![\w./])model\.(\w+)")
"""What may be a field of `model` in words; `model.safetensors` is none."""
_TEACHER = "train.distill.teacher"


def teacher_job(job: Job, *, name: str | None = None, init: Literal["pretrained", "random"] = "pretrained") -> Job:
    """Return the job of the teacher, which takes no step. No router is balanced.

    `name`: of its model, in place of the recipe's; `init`: what weights it has.
    """
    recipe = job.recipe
    section = recipe.train.distill
    assert section is not None
    model: dict[str, Any] = {
        "name_or_path": name or section.teacher,
        "init": init,
        "overrides": {},
        "lora": None,
        "freeze": (),
        "train_only": (),
        "load_in_4bit": False,
        **{name: ModelSection.model_fields[name].default for name in _ROUTING},
    }
    with refused_as_teacher(section.teacher):
        has_experts = expert_count(load_config(recipe.model.model_copy(update=model)).to_dict()) > 0
    layout = job.layout.for_teacher(has_experts=has_experts)
    changed = recipe.changed(
        {
            "model": model,
            "train": {"distill": None, "objective": ObjectiveSection.model_construct()},
            "parallel": {"ulysses": 1, "ep": layout.ep, "experts": layout.experts},
        }
    )
    changed = changed.model_copy(update={"optimizer": OptimizerSection(name="adamw", lr=1e-4)})
    batch = replace(job.batch, dp=layout.dp)
    return replace(job, recipe=changed, layout=layout, batch=batch, shape=None)


def with_vectors_alone(job: Job, config: Any) -> Job:
    """Return the job with norms and biases alone as what trains; `config` is its model's."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    vectors = tuple(name for name, parameter in model.named_parameters() if parameter.ndim == 1)
    return replace(job, recipe=job.recipe.changed({"model": {"train_only": vectors}}))


@contextmanager
def refused_as_teacher(teacher: str) -> Iterator[None]:
    """Let what is refused while the teacher is built name the teacher, and not the fields of the student's model."""
    try:
        yield
    except ToolkitError as error:
        if not error.refusals:
            raise
        refusals = {str(refusal): refusal for refusal in error.refusals}
        raise type(error)(
            [_of_teacher(refusals[problem], teacher) if problem in refusals else problem for problem in error.problems]
        ) from error


def _of_teacher(refusal: Refusal, teacher: str) -> Refusal:
    """Return a refusal of the teacher's job in the fields that the recipe has."""
    others = tuple(setting for setting in refusal.settings if not _is_of_model(setting))
    advice = tuple(remedy for remedy in refusal.remedy if not _is_of_model(remedy))
    return replace(
        refusal,
        field=_TEACHER if refusal.field.startswith(_MODEL) else refusal.field,
        settings=(*others, (_TEACHER, teacher)),
        remedy=(*advice, ("train.distill", None)),
    )


def _is_of_model(setting: Setting | str) -> bool:
    """Whether a setting, or words that name a field, are of the section of the model that trains."""
    if isinstance(setting, str):
        return any(name in ModelSection.model_fields for name in _NAMED_FIELD.findall(setting))
    return setting[0].startswith(_MODEL)
