"""What a plan and an estimate know of the teacher of a distillation: its pass before training."""

from dataclasses import replace

from toolkit.config.distill_section import DistillSection
from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.hardware import gpu
from toolkit.planner.run_memory import memory_request, recipe_of

TEACHER = "HuggingFaceTB/SmolLM2-1.7B-Instruct"
LAYOUT = Layout(dp=4, zero_stage=1)
BATCH = Batch(global_batch_size=16, micro_batch_size=1, dp=4)


def recipe_with(teacher: str | None, model: str = "smollm2-135m") -> Recipe:
    recipe = recipe_of(model, LAYOUT, micro_batch_size=1, seq_len=2048, accumulation=4, precision="bf16")
    return recipe if teacher is None else recipe.changed({"train": {"distill": DistillSection(teacher=teacher)}})


def test_a_large_teacher_decides_what_a_small_student_takes() -> None:
    alone, taught = (memory_request(recipe_with(name), LAYOUT, BATCH).peak() for name in (None, TEACHER))
    weights = 2 * 1_711_376_384
    assert alone.teacher_pass == 0
    assert taught.allocated_in_steps == alone.allocated
    assert taught.allocated == taught.teacher_pass
    assert weights < taught.teacher_pass < 1.3 * weights


def test_a_small_teacher_changes_no_peak() -> None:
    alone, taught = (
        memory_request(recipe_with(name, "smollm2-1.7b"), LAYOUT, BATCH).peak()
        for name in (None, "HuggingFaceTB/SmolLM2-135M")
    )
    assert 0 < taught.teacher_pass < alone.allocated == taught.allocated


def test_a_teacher_that_does_not_fit_fits_no_layout() -> None:
    room = gpu("A100-40")
    request = memory_request(recipe_with(TEACHER), LAYOUT, BATCH, gpu=room)
    assert request.peak().fits_in_replay
    assert not memory_request(recipe_with(TEACHER), LAYOUT, BATCH, gpu=replace(room, memory_bytes=2**32)).peak().fits


def test_a_teacher_whose_config_is_only_on_a_hub_is_not_counted() -> None:
    request = memory_request(recipe_with("some/teacher"), LAYOUT, BATCH)
    assert request.setup.teacher is None
    assert request.peak().teacher_pass == 0
