"""MemoryBreakdown: one rank's memory at its peak, part by part, in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from toolkit.estimate.states import StateBytes
from toolkit.estimate.training_step import TrainingStep

_NEAR_SHARE = 0.2
"""Share of the GPU's memory: within so much of it, what PyTorch's allocator adds may decide what fits."""


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """The peak of a rank of one pipeline stage. The parts add up to `allocated`."""

    stage: int
    rank: int
    """The first rank of the stage."""
    layers: int
    parameter_count: int
    """Elements on the rank, after tensor and pipeline parallelism."""
    trained_count: int
    """Elements on the rank that train."""
    parameters: int
    gradients: int
    masters: int
    optimizer: int
    buckets: int
    """Communication and staging buffers, those of the pipeline included."""
    gathered: int
    """Weights gathered from other ranks under ZeRO-3, or cast to 16 bits under autocast."""
    model_buffers: int
    """Rotary tables, masks, norms and loss scales."""
    activations: Mapping[str, int]
    """Bytes by kind; `ends` are embedding, tables and final norm, `working` what is live only while one layer
    computes."""
    logits: int
    """Logits and loss, where the peak is at the head."""
    update: int
    """Bytes that the update or the reduction of gradients needs beyond the peak of the backward pass."""
    host: StateBytes
    nvme: StateBytes
    """The rank's states in files on a drive of its node."""
    host_loading: int
    """Host memory while the model is built, before it moves to the device."""
    static: int
    """Allocated between two steps: model states and persistent buffers."""
    reference: int = 0
    """A frozen copy of the weights that train; 0 unless an objective keeps one in memory."""
    teacher_pass: int = 0
    """Allocated at the peak of the pass of a distillation's teacher, before the student is built; 0 without one."""
    workspace: int = 0
    """cuBLAS's workspaces, which PyTorch allocates; 0 where no GPU was named."""
    framework: int = 0
    """CUDA context and kernels, which PyTorch does not allocate."""
    nccl: int = 0
    margin: int = 0
    """Room for the allocator's rounding and fragmentation: a constant share, or what a replay of the step found."""
    cached: int = 0
    """Freed blocks that the allocator keeps while there is room: not needed to fit."""
    device_bytes: int = 0
    """The GPU's memory; 0 where no GPU was named."""

    band: tuple[float, float] = (-0.03, 0.03)
    """Relative error of the estimate: four of five runs of this kind needed between (1 + band[0]) and (1 + band[1])
    times `total`.

    Of this toolkit's engines and of DeepSpeed, DDP and FSDP over Hugging Face's layers: the bound of the tests that
    compare peaks with PyTorch's. Of a framework's profile: benchmarks/published_memory.py, 10th and 90th percentile;
    set by hand for `torchtitan` (few runs) and `aleph-alpha-scaling` (known only whether they fit).
    """
    step: TrainingStep | None = field(default=None, repr=False, compare=False)
    """Input of a replay; None for other frameworks, of whose activations no events are known."""

    def replayed(self) -> "MemoryBreakdown":
        """The breakdown with what PyTorch's allocator adds in a replay; unchanged if no events are known."""
        if self.step is None:
            return self
        sufficient, reserved_with_room = self.step.footprint()
        enough = max(self.allocated, sufficient)
        reserved = max(self.allocated, reserved_with_room)
        return replace(self, margin=enough - self.allocated, cached=reserved - enough)

    @property
    def fits_in_replay(self) -> bool:
        """`fits`, by a replay where the total is near the GPU's memory and events are known."""
        room = int(self.device_bytes / (1 + self.band[1])) - self.framework - self.nccl
        if self.teacher_pass > room:
            return False
        is_near = abs(self.left) < _NEAR_SHARE * self.device_bytes
        return self.fits if self.step is None or not is_near else self.step.suffices(room)

    @property
    def activation_total(self) -> int:
        return sum(self.activations.values())

    @property
    def teacher(self) -> int:
        """Bytes that the teacher's pass takes beyond the peak of the steps."""
        return max(0, self.teacher_pass - self.allocated_in_steps)

    @property
    def allocated(self) -> int:
        """The peak of PyTorch's allocations: what `torch.cuda.max_memory_allocated` reports."""
        return self.allocated_in_steps + self.teacher

    @property
    def allocated_in_steps(self) -> int:
        """The peak of the steps, without the pass of a teacher before them."""
        states = self.parameters + self.reference + self.gradients + self.masters + self.optimizer
        buffers = self.buckets + self.gathered + self.model_buffers + self.workspace
        return states + buffers + self.activation_total + self.logits + self.update

    @property
    def reserved(self) -> int:
        """Bytes that PyTorch's allocator takes of the GPU: what `torch.cuda.max_memory_reserved` reports."""
        needed = self.allocated + self.margin
        return max(needed, min(needed + self.cached, self.device_bytes - self.framework - self.nccl))

    @property
    def occupied(self) -> int:
        """Bytes that the process takes of the GPU: what `nvidia-smi` reports."""
        return self.reserved + self.framework + self.nccl

    @property
    def total(self) -> int:
        """All memory that the process needs on the GPU."""
        return self.allocated + self.framework + self.nccl + self.margin

    @property
    def left(self) -> int:
        """Bytes left on the GPU; negative where it does not fit."""
        return self.device_bytes - self.total

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """`tight`: whether it fits depends on where in its band the need lies."""
        least, most = ((1 + error) * self.total for error in self.band)
        if most <= self.device_bytes:
            return "fits"
        return "tight" if least <= self.device_bytes else "does not fit"

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"
