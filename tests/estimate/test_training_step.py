"""Two steps replayed on PyTorch's allocator: the tensors are those of the estimate, and what suffices does."""

from dataclasses import replace
from typing import Any

import pytest
from training_setups import memory_request

from toolkit.config.layout import Layout
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.caching_allocator import OutOfMemoryError
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.framework_profile import profile
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.training_step import TrainingStep
from toolkit.hardware import gpu
from toolkit.models.shape import find_config

STAGES = {"dp8-z1": {}, "dp8-z2": {}, "dp8-z3": {"accumulation_bytes": 2}, "dp2-tp4-z1": {}}


def breakdowns(layout: str, **work: Any) -> tuple[MemoryBreakdown, ...]:
    parsed = Layout.parse(layout, world_size=None)
    settings = DeepSpeedSettings(zero_stage=parsed.zero_stage, precision="bf16", **STAGES.get(layout, {}))
    model = ModelFacts.from_config(find_config("llama-3-8b") or {})
    asked = {"micro_batch_size": 1, "seq_len": 4096, **work}
    return memory_request(model, parsed, asked, settings, gpu("H100-80")).stages()


def step_of(stage: MemoryBreakdown) -> TrainingStep:
    assert stage.step is not None
    return stage.step


@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.parametrize("work", [{}, {"micro_batch_size": 3, "recompute": "full"}], ids=["one", "full"])
def test_the_most_that_is_allocated_is_the_estimate(layout: str, work: dict[str, Any]) -> None:
    (stage,) = breakdowns(layout, **work)
    allocator = step_of(stage).replay()
    assert allocator is not None
    assert allocator.peak_allocated == pytest.approx(stage.allocated, rel=2e-3)
    assert allocator.peak_allocated < allocator.peak_needed <= allocator.peak_reserved


@pytest.mark.parametrize("layout", ["dp8-z2", "dp8-z3", "dp2-tp4-z1"])
def test_what_suffices_does_and_less_does_not(layout: str) -> None:
    step = step_of(breakdowns(layout)[0])
    enough, reserved = step.footprint()
    assert enough <= reserved
    with_that = step.replay(enough)
    assert with_that is not None
    assert with_that.peak_reserved <= enough
    with pytest.raises(OutOfMemoryError):
        step.replay(int(0.97 * enough))


@pytest.mark.parametrize("layout", ["dp8-z3", "dp2-tp4-z1"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_longer_samples_never_need_less(layout: str, recompute: str) -> None:
    steps = [step_of(breakdowns(layout, seq_len=seq, recompute=recompute)[0]) for seq in (1024, 2048, 4096, 8192)]
    enough = [step.footprint()[0] for step in steps]
    assert enough == sorted(set(enough))


def test_a_replayed_breakdown_says_what_the_allocator_adds() -> None:
    (stage,) = breakdowns("dp8-z3")
    enough, reserved = step_of(stage).footprint()
    replayed = stage.replayed()
    assert (replayed.allocated, replayed.reserved) == (stage.allocated, reserved)
    assert replayed.total == enough + stage.framework + stage.nccl


def test_the_cache_is_no_need_on_a_gpu_without_room_for_it() -> None:
    (stage,) = breakdowns("dp8-z3")
    replayed = stage.replayed()
    assert replayed.cached > 0
    tight = replace(replayed, device_bytes=replayed.total + 1)
    assert tight.verdict == "tight"
    assert tight.reserved == tight.allocated + tight.margin + 1


def test_near_the_limit_a_replay_in_the_room_that_is_left_decides() -> None:
    (stage,) = breakdowns("dp8-z3")
    enough, _ = step_of(stage).footprint()
    needed = int((enough + stage.framework + stage.nccl) * (1 + stage.band[1]))
    assert replace(stage, device_bytes=int(1.001 * needed)).fits_in_replay
    assert not replace(stage, device_bytes=int(0.97 * needed)).fits_in_replay


def test_another_frameworks_stage_has_no_events_and_keeps_the_constant_margin() -> None:
    stage = replace(breakdowns("dp8-z3")[0], step=None)
    assert stage.replayed() is stage
    assert replace(stage, device_bytes=stage.total + 1).fits_in_replay == replace(stage, device_bytes=1).fits


def test_moments_and_gradients_are_there_from_the_first_step_on() -> None:
    """What one micro-batch leaves is what the engine says exists when gradients are complete."""
    (stage,) = breakdowns("dp8-z1", accumulation=1)
    step = step_of(stage)
    allocator = step.replay()
    assert allocator is not None
    assert allocator.allocated == pytest.approx(stage.static, rel=1e-3)


def test_another_framework_has_no_events_and_keeps_its_margin() -> None:
    model = ModelFacts.from_config(find_config("llama-3-8b") or {})
    work = {"micro_batch_size": 1, "seq_len": 4096, "attention": "flash"}
    layout = Layout.parse("dp8-tp4-pp2-z1", world_size=None)
    stages = memory_request(model, layout, work, profile("megatron"), gpu("H100-80")).stages()
    assert all(stage.margin > 0 and stage.replayed() is stage for stage in stages)
