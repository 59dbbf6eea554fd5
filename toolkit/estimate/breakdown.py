"""MemoryBreakdown: one rank's memory at its worst moment, part by part, in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.estimate.states import Bytes


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """The peak of a rank of one pipeline stage. The parts add up to `allocated`."""

    stage: int
    rank: int
    """The first rank of the stage."""
    layers: int
    parameter_count: int
    """Elements that the rank holds, tensor-parallel share counted."""
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
    """By kind; `ends` are embedding, tables and final norm, `working` what lives only while one layer computes."""
    logits: int
    """Logits and loss, where the peak is at the head."""
    update: int
    """What the update or the reduction of gradients takes beyond the peak of the backward pass."""
    host: Bytes
    host_loading: int
    """Host memory while the model is built, before it moves to the device."""
    static: int
    """Allocated between two steps: model states and buffers that stay."""
    workspace: int = 0
    """cuBLAS's workspaces, which PyTorch allocates; 0 where no GPU was named."""
    framework: int = 0
    """CUDA context and kernels: not PyTorch's."""
    nccl: int = 0
    margin: int = 0
    """For the allocator's rounding and fragmentation: stated, not computed."""
    device_bytes: int = 0
    """The GPU's memory; 0 where no GPU was named."""

    @property
    def activation_total(self) -> int:
        """All kinds."""
        return sum(self.activations.values())

    @property
    def allocated(self) -> int:
        """The peak of PyTorch's allocations: what `torch.cuda.max_memory_allocated` reports."""
        states = self.parameters + self.gradients + self.masters + self.optimizer
        buffers = self.buckets + self.gathered + self.model_buffers + self.workspace
        return states + buffers + self.activation_total + self.logits + self.update

    @property
    def total(self) -> int:
        """All that the process takes of the GPU: what `nvidia-smi` reports."""
        return self.allocated + self.framework + self.nccl + self.margin

    @property
    def left(self) -> int:
        """Bytes left on the GPU; negative where it does not fit."""
        return self.device_bytes - self.total

    @property
    def fits(self) -> bool:
        """Whether the rank fits on the GPU."""
        return self.left >= 0
