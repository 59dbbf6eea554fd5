"""ModelStates: the bytes that a rank's model, gradients and optimizer take, on its device and in host memory."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What one memory holds between two steps."""

    parameters: int = 0
    """The weights that the forward pass uses; under ZeRO-3 this rank's shards and the small ones that stay whole."""
    gradients: int = 0
    """Gradient buffers that stay allocated between steps."""
    masters: int = 0
    """fp32 weights, where the model's own are in 16 bits or flat copies are updated."""
    optimizer: int = 0
    """Moments, and the optimizer's step counters."""
    buckets: int = 0
    """Communication and staging buffers that stay allocated."""
    model_buffers: int = 0
    """Rotary tables, masks."""
    counters: int = 0
    """Norms, loss scales and the like: a few bytes."""

    @property
    def total(self) -> int:
        """All of it."""
        states = self.parameters + self.gradients + self.masters + self.optimizer
        return states + self.buckets + self.model_buffers + self.counters


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """A rank's states between steps, and what comes and goes within one; everything else than `host` on the device."""

    held: Bytes
    """Between two steps, on the device."""
    host: Bytes = Bytes()
    """Between two steps, in host memory."""
    accumulated: int = 0
    """Gradients, beyond `held`, that are there while the last micro-batch computes."""
    fresh_layer: int = 0
    """Gradients of one decoder layer, where they only come to exist in this backward pass; 0 where they exist."""
    buckets: int = 0
    """Communication buffers, beyond `held`, during the backward pass."""
    gathered: int = 0
    """Weights gathered from other ranks while layers compute."""
    reduction: int = 0
    """All beyond `held` while gradients are reduced behind the backward pass."""
    complete: int = 0
    """Gradients, beyond `held`, when they are reduced and the update has not begun."""
    complete_buckets: int = 0
    """Communication buffers that those gradients keep alive."""
    host_complete: int = 0
    """Gradients and their norms in host memory then, beyond `host`."""
    step: int = 0
    """All beyond `held` during the update, at most."""
