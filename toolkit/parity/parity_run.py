"""ParityRun: what one parity run records for a comparison, and how its tensors differ from another run's. No torch.

Ratio and cosine of each tensor say which one is wrong, and often why: a ratio that is the same everywhere is a scale
(loss, accumulation, clipping); norms and biases alone are a missing all-reduce; the embedding alone is weight tying;
one layer is a wrong shard.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from toolkit.parity.first_batch import FirstBatch
from toolkit.parity.sequence_facts import SequenceFacts

EMBEDDINGS = "embeddings"
"""The key in `ParityRun.outputs` of the input of the first decoder layer."""
BEFORE_EXPERTS = " before its experts"
"""Suffix of a layer's name in the key of the input of its experts."""

Tensors = Mapping[str, NDArray[np.floating]]
"""Hugging Face name -> full tensor, in the order of the model."""


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Loss (nats per token) and gradient norm of the steps of one run."""

    label: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    """Gradient norms of the steps; empty where they are not known."""
    steps: tuple[int, ...] = ()
    """Steps of the values; empty for 1, 2, …"""

    def __post_init__(self) -> None:
        assert len(self.grad_norms) in (0, len(self.losses))

    def step(self, place: int) -> int:
        """Return the step of the value at this place, from 1."""
        return self.steps[place - 1] if place <= len(self.steps) else place

    def __len__(self) -> int:
        return len(self.losses)

    @classmethod
    def from_steps(cls, label: str, steps: Iterable[tuple[float, float]]) -> Self:
        """Build a curve from (loss, gradient norm) pairs."""
        pairs = list(steps)
        return cls(label=label, losses=tuple(loss for loss, _ in pairs), grad_norms=tuple(norm for _, norm in pairs))


@dataclass(frozen=True, kw_only=True)
class ParityRun:
    """One run. Rank 0 has everything; the other ranks have the curve and empty mappings."""

    curve: LossCurve
    parameters: Tensors = field(default_factory=dict)
    """Parameters after the last step."""
    initial: Tensors = field(default_factory=dict)
    """Parameters before the first step."""
    first_gradients: Tensors = field(default_factory=dict)
    """Gradients of the first step, before clipping."""
    first_updates: Tensors = field(default_factory=dict)
    """Updates that `update_step` added to each parameter."""
    first_directions: Tensors = field(default_factory=dict)
    """What that update takes the signs of (toolkit/parity/signs.py); empty for optimizers that take none."""
    update_gradients: Tensors = field(default_factory=dict)
    """Gradients of `update_step`, before clipping; empty where that is the first step."""
    update_step: int = 1
    """The first step whose learning rate is not zero: a warm-up begins with zero and changes nothing."""
    outputs: Mapping[str, float] = field(default_factory=dict)
    """Root mean square over the first global batch of the first decoder layer's input (`embeddings`), of what its
    experts get, and of each layer's output, by the layer's name. Empty for families without layer outputs."""
    mean_outputs: tuple[Tensors, ...] = ()
    """Mean output [o] of each layer with a whole bias inside of decoder layers, by its name: in the first step, and in
    the one after the first update."""
    dtypes: frozenset[str] = frozenset()
    """Dtypes that the modules of decoder layers return in the first step."""
    positions: tuple[float, ...] = ()
    """Mean and mean square of the positions in the first step, as the first layer is told them; empty if unknown."""
    batches: tuple[str, ...] = ()
    """Fingerprint of each step's global batch: equal if the same samples were in the same places. `a!=b` if ranks that
    should have read the same samples did not."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates that the optimizer used; NaN if its parameter groups differ."""
    micro_losses: tuple[tuple[float, int], ...] = ()
    """Sum of token losses and number of target tokens of each sample of the first global batch. Reference only."""
    first_batch: FirstBatch = field(default_factory=FirstBatch)
    """More of the samples of the first global batch. Reference only."""
    sequences: SequenceFacts = field(default_factory=SequenceFacts)
    """What the first step of preference tuning knew of each completion."""
    later_sequences: SequenceFacts = field(default_factory=SequenceFacts)
    """What the step after the first update knew of each completion."""
    references: NDArray[np.float64] | None = None
    """Log-probabilities of the reference model for all pairs of the text, [pairs, 2]; None where none are stored."""
    micro_batch_size: int = 1
    replicas: int = 1
    """Data-parallel replicas, which share the samples of a global batch."""
    attention_fault: str = ""
    """What is wrong with the attention over sequences that ranks share; empty where nothing is, or none are shared."""
    mask_faults: tuple[str, ...] = ()
    """Faults of the dropout masks of the first steps (toolkit/parity/masks.py)."""
    masks_compared: int = 0
    """Number of masks that all ranks drew; 0 without dropout."""
    diverged_at_start: frozenset[str] = frozenset()
    """Parameters whose replicas should be equal to the bit on two ranks before the first step, and are not."""
    diverged: frozenset[str] = frozenset()
    """Parameters whose replicas should be equal to the bit on two ranks after the last step, and are not."""
    replicas_compared: int = 0
    """Number of replicas of parameters that were compared."""
    eval_loss: float | None = None
    inspected: Any = None
    """Value that the `inspect` callback returned on this rank."""

    def without_values(self) -> "ParityRun":
        """Return the same run with tensor names only, for when the files of the tensors are deleted."""
        empty: Tensors = {name: np.empty(0) for name in self.initial}
        gone = replace(self, parameters={}, initial=empty, first_gradients={}, first_updates={}, first_directions={})
        return replace(gone, update_gradients={}, first_batch=FirstBatch(), mean_outputs=())


class SavedTensors(Mapping[str, NDArray[np.floating]]):
    """Tensors in a folder, one .npy file each, read on access: a comparison has one in memory at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, str] = {}

    def add(self, name: str, value: NDArray[np.floating]) -> None:
        """Write one tensor."""
        file = f"{len(self._files):05d}.npy"
        np.save(self._folder / file, value)
        self._files[name] = file

    def __getitem__(self, name: str) -> NDArray[np.floating]:
        value: NDArray[np.floating] = np.load(self._folder / self._files[name], mmap_mode="r")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One tensor against the baseline's."""

    name: str
    ratio: float
    """||g|| / ||g_ref||; NaN if the tensor is missing or has another shape."""
    cosine: float
    """g . g_ref / (||g|| ||g_ref||)."""
    difference: float
    """||g - g_ref|| / the norm of all baseline tensors as one vector."""


def tensor_differences(tensors: Tensors, baseline: Tensors) -> list[TensorDifference]:
    """Compare every tensor of either side in float64. The largest difference comes first."""
    total = float(np.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in baseline.values()))) or 1.0
    names = baseline.keys() | tensors.keys()
    rows = [_difference(name, tensors.get(name), baseline.get(name), total) for name in names]
    return sorted(rows, key=lambda row: (-row.difference, row.name))


def tensor_table(rows: Sequence[TensorDifference], *, limit: int = 20) -> str:
    """Format the first `limit` rows as text: name, ratio, cosine, difference."""
    width = max([len(row.name) for row in rows[:limit]], default=4)
    lines = [f"{'parameter':{width}}  {'ratio':>10}  {'cosine':>10}  {'difference':>10}"]
    lines += [
        f"{row.name:{width}}  {row.ratio:10.6f}  {row.cosine:10.7f}  {row.difference:10.1e}" for row in rows[:limit]
    ]
    if len(rows) > limit:
        lines.append(f"and {len(rows) - limit} more with smaller differences")
    return "\n".join(lines)


def whole_difference(tensors: Tensors, baseline: Tensors) -> float:
    """||tensors - baseline|| / ||baseline||, all tensors as one vector, in float64; 0 if there are none."""
    if tensors.keys() != baseline.keys() or any(tensors[name].shape != baseline[name].shape for name in baseline):
        return float("inf")
    gap = sum(float(np.sum((tensors[k].astype(np.float64) - r.astype(np.float64)) ** 2)) for k, r in baseline.items())
    size = sum(float(np.sum(r.astype(np.float64) ** 2)) for r in baseline.values())
    return float(np.sqrt(gap / max(size, 1e-300))) if gap else 0.0


def _difference(
    name: str, tensor: NDArray[np.floating] | None, baseline: NDArray[np.floating] | None, total: float
) -> TensorDifference:
    if tensor is None or baseline is None or tensor.shape != baseline.shape:
        return TensorDifference(name=name, ratio=float("nan"), cosine=float("nan"), difference=float("inf"))
    a = tensor.astype(np.float64).ravel()
    b = baseline.astype(np.float64).ravel()
    gap = float(np.linalg.norm(a - b))
    size_a = float(np.linalg.norm(a))
    size_b = float(np.linalg.norm(b))
    if size_b:
        ratio = size_a / size_b
    else:
        ratio = float("inf") if size_a else 1.0
    return TensorDifference(
        name=name,
        ratio=ratio,
        cosine=float(a @ b) / (size_a * size_b) if size_a and size_b else float(size_a == size_b),
        difference=gap / total if np.isfinite(gap) else float("inf"),
    )
