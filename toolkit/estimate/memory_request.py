"""MemoryRequest: the memory of every pipeline stage of a training setup, from a config.json alone.

Which moments may be a rank's peak says `rank_breakdown`; `stage_breakdown` finds them for an engine's own schedule,
`scheduled_breakdown` for a schedule of the toolkit's, and `profile_breakdown` for another framework.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from toolkit.config.layout_fit import check_layout_fit
from toolkit.config.stage_balance import GPU_FLOPS_PER_BYTE
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.overhead import beside
from toolkit.estimate.profile_activations import stage_layers
from toolkit.estimate.profile_breakdown import profile_breakdown
from toolkit.estimate.rank_states import Engine
from toolkit.estimate.scheduled_breakdown import scheduled_breakdown
from toolkit.estimate.stage_bounds import bounds_of
from toolkit.estimate.stage_breakdown import stage_breakdown
from toolkit.estimate.teacher_pass import teacher_pass_bytes
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.hardware import Gpu

Framework = Engine | FrameworkProfile
"""What keeps model states, and in which precision it computes: an engine of Hugging Face's layers, or a profile."""


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """A training setup, what keeps its model states, and the GPU that it is to fit on."""

    setup: TrainingSetup
    framework: Framework
    gpu: Gpu | None = None
    """The GPU; None: only what PyTorch allocates is estimated."""
    stand_ins: bool = False
    """Whether a pass that is not recorded takes the recording of one that hardly needs less, so that none is made."""
    flops_per_byte: float = GPU_FLOPS_PER_BYTE
    """FLOPs in the time of a byte of memory traffic: training on CPUs chooses other stages."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """The stage bounds that training chooses: stage k has layers [bounds[k], bounds[k + 1])."""
        return bounds_of(self.setup, flops_per_byte=self.flops_per_byte)

    def stages(self) -> tuple[MemoryBreakdown, ...]:
        """Estimate every pipeline stage, or every rank of a pipeline whose ranks have several.

        Raises LayoutError for a layout that the model's shape does not allow.
        """
        layers = self._stage_layers()
        if self.setup.layout.schedule is not None:
            breakdowns = [self._scheduled_breakdown(rank, layers) for rank in range(self.setup.layout.pp)]
        else:
            breakdowns = [self._breakdown(stage, own_layers) for stage, own_layers in enumerate(layers)]
        return tuple(self._after_teacher(breakdowns))

    def peak(self) -> MemoryBreakdown:
        """Estimate the stage that needs most memory.

        Of inner stages with the same layers only the first is computed: it has the most micro-batches in flight.
        """
        if self.setup.layout.schedule is not None:
            return max(self.stages(), key=lambda breakdown: breakdown.allocated)
        breakdowns = [self._breakdown(stage, layers) for stage, layers in self._distinct_stages().items()]
        return max(self._after_teacher(breakdowns), key=lambda breakdown: breakdown.allocated)

    def largest_micro_batch(self) -> int:
        """Return the largest micro-batch size that fits on every stage of the GPU; 0 if not even one sample fits."""
        if not self._fits_micro_batch(1):
            return 0
        size = 1
        while self._fits_micro_batch(2 * size):
            size *= 2
        fitting = size
        too_large = 2 * size
        while too_large - fitting > 1:
            middle = (fitting + too_large) // 2
            if self._fits_micro_batch(middle):
                fitting = middle
            else:
                too_large = middle
        return fitting

    def _fits_micro_batch(self, size: int) -> bool:
        """Whether micro-batches of so many samples fit on every stage."""
        request = replace(self, setup=replace(self.setup, micro_batch_size=size))
        return request.peak().fits_in_replay

    def _distinct_stages(self) -> dict[int, range]:
        """Return the layers of each stage that may need most, by stage: of inner stages that are alike the first."""
        pattern = self.setup.model.parameters.pattern
        last = self.setup.layout.pp - 1
        distinct: dict[int, range] = {}
        kinds_of_inner: set[tuple[int, ...]] = set()
        for stage, layers in enumerate(self._stage_layers()):
            kinds = tuple(pattern[index] for index in layers)
            is_inner = 0 < stage < last
            if is_inner and kinds in kinds_of_inner:
                continue
            if is_inner:
                kinds_of_inner.add(kinds)
            distinct[stage] = layers
        return distinct

    def _stage_layers(self) -> list[range]:
        """Return the decoder layers of each stage. Raises LayoutError where the model cannot be split so."""
        setup = self.setup
        layout = setup.layout
        check_layout_fit(setup.model.shape, layout)
        if isinstance(self.framework, FrameworkProfile):
            layout.refuse_schedule("another framework's schedule is part of its profile")
            return stage_layers(self.framework, setup.model, layout.pp)
        return [range(start, stop) for start, stop in pairwise(self.bounds)]

    def _breakdown(self, stage: int, layers: range) -> MemoryBreakdown:
        """Break down the peak of one stage with these layers."""
        if isinstance(self.framework, FrameworkProfile):
            return profile_breakdown(self.setup, self.framework, self.gpu, stage, layers)
        return stage_breakdown(self.setup, self.framework, self.gpu, stage, layers, stand_ins=self.stand_ins)

    def _scheduled_breakdown(self, pipe: int, stage_layers: Sequence[range]) -> MemoryBreakdown:
        """Break down the peak of a pipeline rank that runs a schedule of the toolkit's own."""
        assert isinstance(self.framework, DeepSpeedSettings), "only the toolkit's engine has schedules of its own"
        return scheduled_breakdown(self.setup, self.framework, self.gpu, pipe, stage_layers, stand_ins=self.stand_ins)

    def _after_teacher(self, breakdowns: Sequence[MemoryBreakdown]) -> Iterator[MemoryBreakdown]:
        """Yield the breakdowns of ranks, with what the teacher of a distillation takes before the student is built."""
        if self.setup.teacher is None or isinstance(self.framework, FrameworkProfile):
            yield from breakdowns
            return
        of_teacher = replace(self, setup=self.setup.of_teacher())
        stage_layers = of_teacher._stage_layers()
        for breakdown in breakdowns:
            pass_bytes = teacher_pass_bytes(
                of_teacher.setup,
                self.framework,
                breakdown.stage,
                stage_layers,
                top_k=self.setup.teacher.top_k,
                stand_ins=self.stand_ins,
            )
            with_teacher = replace(breakdown, teacher_pass=pass_bytes + breakdown.workspace)
            if with_teacher.teacher:
                # What does not come from PyTorch's allocator depends on how much it allocates.
                with_teacher = replace(with_teacher, **beside(self.setup.layout, self.gpu, with_teacher.allocated))
            yield with_teacher
