"""ActivationShares: how the activations at the worst moment of a stage divide by what they belong to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from toolkit.estimate.recorded.activations import Activations


@dataclass(frozen=True, kw_only=True)
class ActivationShares:
    """How the activations at the worst moment divide, in bytes."""

    by_kind: Mapping[str, int]
    """Bytes that decoder layers keep, by the part of the layer."""
    logits: int
    """Logits and loss, where the moment is at the head."""
    working: int
    """Bytes that are live only while one layer computes."""
    ends: int
    """All else: embedding, tables and final norm."""

    @classmethod
    def of(
        cls, recorded: Activations, layers: range, *, in_flight: int, peak: int, on_host: int, has_head: bool
    ) -> Self:
        """Divide the activations at the worst moment of a stage, `peak` bytes of `in_flight` micro-batches.

        `on_host`: bytes of a micro-batch's layers that are on the host. `has_head`: whether the stage has the LM head.
        """
        by_kind = _kept_on_device(recorded, layers, in_flight=in_flight, on_host=on_host)
        on_device = sum(by_kind.values())
        if on_device > peak:
            # Gradients grow as layers finish their backward pass: layers may keep little at the worst moment.
            by_kind = {kind: size * peak // on_device for kind, size in by_kind.items()}
        outside_layers = peak - sum(by_kind.values())
        at_head = recorded.at_head(layers)
        of_other_micro_batches = (in_flight - 1) * recorded.kept(layers) - in_flight * on_host
        if has_head and of_other_micro_batches + at_head == peak:
            logits = min(outside_layers, at_head - recorded.trunk(layers))
        else:
            logits = 0
        working = 0
        if logits == 0:
            beyond_kept = max(0, peak - of_other_micro_batches - recorded.kept(layers))
            working = min(outside_layers, beyond_kept)
        return cls(by_kind=by_kind, logits=logits, working=working, ends=outside_layers - logits - working)

    def shown(self, unrecorded: Mapping[str, int]) -> dict[str, int]:
        """Return them by kind as a MemoryBreakdown has them, with what the recording lacks, and without the logits."""
        by_kind = {**self.by_kind, "working": self.working, "ends": self.ends}
        for kind, size in unrecorded.items():
            if size:
                by_kind[kind] = by_kind.get(kind, 0) + size
        return by_kind


def _kept_on_device(recorded: Activations, layers: range, *, in_flight: int, on_host: int) -> dict[str, int]:
    """Return the bytes of each kind that layers keep on the device; each kind has an equal share of it on the host."""
    by_kind = {kind: max(0, size) * in_flight for kind, size in recorded.layer_kinds(layers).items()}
    kept = max(1, sum(by_kind.values()))
    return {kind: size - size * on_host * in_flight // kept for kind, size in by_kind.items()}
