"""ExpertShape: the numbers that define a mixture of experts, beside those of the layers around it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Routed experts: in every layer that has them a token goes through a few."""

    count: int
    per_token: int
    """Experts that a token goes through."""
    weights: int
    """Weights of one expert, in matrices."""
    ffn: int
    """Width inside an expert."""
    layers: int
    """Decoder layers that have experts; the others have a dense MLP."""
    always: int
    """Weights that every token multiplies in such a layer, besides attention: the router, shared experts."""

    biased: bool = False
    """Whether experts add biases to their products."""

    @property
    def routed(self) -> int:
        """Weights of all experts of a layer."""
        return self.count * self.weights
