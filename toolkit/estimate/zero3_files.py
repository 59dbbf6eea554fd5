"""StateFiles: model states of ZeRO-3 that are written to files on NVMe (deepspeed/runtime/swap_tensor).

Sub-groups of masters and moments, a parameter's gradients and shards have files if they have `file_bytes`, padded to
the alignment. Gradients are written up to the last multiple of it: the rest, and with it the memory of all, waits on
the device for the update.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.states import StateBytes

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """Model states in files, and what files leave in memory, in bytes."""

    written: StateBytes
    """Bytes in files, padding included."""
    moved: StateBytes
    """Bytes in host memory that files save, less what stands there for weights in files."""
    staging: int
    """Buffers in host memory, through which files are read and written."""
    waiting_gradients: int
    """Gradients that wait on the device."""

    @classmethod
    def of(cls, settings: DeepSpeedSettings, params: RankParameters, dp: int, sub_groups: Sequence[int]) -> Self:
        """Return the files of a rank, which updates its parameters in `sub_groups` of so many elements."""
        files = cls(written=StateBytes(), moved=StateBytes(), staging=0, waiting_gradients=0)
        if settings.nvme_optimizer:
            files = files._with_optimizer(settings, params, dp, sub_groups)
        if settings.nvme_params:
            files = files._with_weights(settings, params, dp)
        return files

    def left_of(self, on_host: StateBytes) -> StateBytes:
        """Return what is left in host memory of states that would be there without files."""
        return replace(
            on_host,
            parameters=on_host.parameters - self.moved.parameters,
            gradients=on_host.gradients - self.moved.gradients,
            masters=on_host.masters - self.moved.masters,
            optimizer=on_host.optimizer - self.moved.optimizer,
            buckets=self.staging,
        )

    def _with_optimizer(
        self, settings: DeepSpeedSettings, params: RankParameters, dp: int, sub_groups: Sequence[int]
    ) -> Self:
        """Return these files with those of masters, moments and gradients."""
        filed_numels = [numel for numel in sub_groups if _FP32_BYTES * numel >= settings.file_bytes]
        masters = sum(_padded_bytes(settings, numel, _FP32_BYTES) for numel in filed_numels)
        moved = _FP32_BYTES * sum(filed_numels)
        gradients = _GradientFiles.of(settings, params, dp)
        return replace(
            self,
            written=replace(
                self.written,
                masters=masters,
                optimizer=settings.moments * masters,
                gradients=gradients.written,
            ),
            moved=replace(self.moved, masters=moved, optimizer=settings.moments * moved, gradients=moved),
            staging=self.staging + settings.optimizer_buffers * _padded_bytes(settings, max(sub_groups), _FP32_BYTES),
            waiting_gradients=gradients.waiting,
        )

    def _with_weights(self, settings: DeepSpeedSettings, params: RankParameters, dp: int) -> Self:
        """Return these files with those of the shards of weights."""
        weight_bytes = settings.model_bytes
        written = 0
        moved = 0
        for group in (*params.groups, params.frozen):
            for numel, count in group.shards(dp):
                if weight_bytes * numel >= settings.file_bytes:
                    written += _padded_bytes(settings, numel, weight_bytes) * count
                    moved += weight_bytes * numel * count
        stand_ins = weight_bytes * len(params.groups) + 2
        # The buffers for reading, and one for writing back what the largest sub-group updates.
        reading = _padded_bytes(settings, settings.param_buffer_elements, weight_bytes)
        writing = _largest_padded_sub_group(settings, params, dp, weight_bytes)
        return replace(
            self,
            written=replace(self.written, parameters=written),
            moved=replace(self.moved, parameters=moved - stand_ins),
            staging=self.staging + reading + writing,
        )


@dataclass(frozen=True, kw_only=True)
class _GradientFiles:
    """Bytes of a rank's fp32 gradients where the optimizer's states are in files."""

    written: int
    """Bytes in files."""
    waiting: int
    """Bytes on the device that wait for the update."""

    @classmethod
    def of(cls, settings: DeepSpeedSettings, params: RankParameters, dp: int) -> Self:
        """Count the gradients of each parameter's shard."""
        written = 0
        waiting = 0
        for group in params.groups:
            for numel, count in group.shards(dp):
                size = _FP32_BYTES * numel
                unwritten = size
                if size >= settings.file_bytes:
                    unwritten = size % settings.file_alignment
                written += (size - unwritten) * count
                if unwritten > 0 and settings.device != "cpu":
                    waiting += size * count
        return cls(written=written, waiting=waiting)


def _padded_bytes(settings: DeepSpeedSettings, numel: int, element_bytes: int) -> int:
    """Return the bytes of elements, padded to the alignment of files."""
    unit = settings.file_alignment // element_bytes
    return element_bytes * -(-numel // unit) * unit


def _largest_padded_sub_group(settings: DeepSpeedSettings, params: RankParameters, dp: int, element_bytes: int) -> int:
    """Return the bytes of the largest sub-group where each shard is padded to the alignment of files."""
    largest_numel = 0
    largest_bytes = 0
    for group in params.groups:
        numel = 0
        padded_bytes = 0
        for parameter_numel in group:
            shard = -(-parameter_numel * group.ep // dp)
            numel += shard
            padded_bytes += _padded_bytes(settings, shard, element_bytes)
            if numel > largest_numel:
                largest_numel = numel
                largest_bytes = padded_bytes
            if numel >= settings.sub_group_size:
                numel = 0
                padded_bytes = 0
    return largest_bytes
