"""Muon, with AdamW for what is no hidden matrix: the same update in every layout, its work shared out over ranks.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum M of a weight matrix by the
nearest orthogonal one, U V^T of M = U S V^T, approximately. That takes whole matrices, while a rank may hold a part of
a flat partition of a tensor-parallel shard. What is done element by element (momentum, weight decay, the update)
happens where the elements are; `toolkit/parallel/matrix_exchange.py` brings each matrix to the one rank that
orthogonalizes it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from toolkit.config.recipe import AdjustLr
from toolkit.engines.optimizer_states import local_part
from toolkit.models.hidden_matrices import is_hidden_matrix
from toolkit.parallel.matrix_exchange import Fragment, MatrixExchange, Part, fragments_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return approximately U V^T of each matrix U S V^T, [n, rows, columns].

    Newton-Schulz iterations x -> a x + b (x x^T) x + c (x x^T)^2 x, whose coefficients raise small singular values as
    fast as possible: five bring all but the smallest between 0.7 and 1.2, not to 1. A batch is one product a term.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_LEAST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def adjustment(kind: AdjustLr, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix.

    An orthogonal update has a root mean square of 1 / sqrt(longer side). `match_rms_adamw` (Liu et al. 2025, "Muon is
    Scalable for LLM Training") makes it 0.2, as AdamW's usually is, so both have one learning rate; `original` makes
    it grow with the root of rows / columns.
    """
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for the groups that are marked `muon`. `connect` says where their elements are, before a step."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        adjust_lr: AdjustLr,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self.momentum = momentum
        self.adjust_lr = adjust_lr
        self.dtype = dtype
        self._fragments: dict[int, list[Fragment]] = defaultdict(list)
        self._group: dist.ProcessGroup | None = None
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    def connect(self, parts: Iterable[Part], group: dist.ProcessGroup | None) -> None:
        """Set where the elements of every parameter are, and the ranks that share out the matrices among them."""
        self._group = group
        for part in parts:
            if is_hidden_matrix(part.shard.name, part.shard.shape):
                self._fragments[id(part.tensor)] += fragments_of(
                    part.shard, start=part.start, length=part.length, tensor=0, offset=part.offset
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. Collective for groups with matrices, over the ranks of `connect`."""
        groups = self.param_groups
        # DeepSpeed hands over one group at a time, and none that is complete before `connect`.
        self.param_groups = [group for group in groups if not group.get("muon")]
        try:
            loss: float | None = super().step(closure) if self.param_groups else None
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("muon") and group["params"] and self._fragments:
                self._update_matrices(group)
        return loss

    def _update_matrices(self, group: Mapping[str, Any]) -> None:
        tensors: list[torch.Tensor] = group["params"]
        weights = []
        moments = []
        gradients = []
        for tensor in tensors:
            if "momentum_buffer" not in self.state[tensor]:
                self.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
            # Every rank must take part, so a gradient that nothing contributed to is zero, as ZeRO has it.
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            moment = self.state[tensor]["momentum_buffer"]
            local_part(moment).lerp_(local_part(gradient), 1 - self.momentum)
            local_part(tensor).mul_(1 - group["lr"] * group["weight_decay"])
            weights.append(local_part(tensor).view(-1))
            moments.append(local_part(moment).view(-1))
            gradients.append(local_part(gradient).reshape(-1))

        def read(fragment: Fragment) -> torch.Tensor:
            moment = fragment.view(moments[fragment.tensor])
            gradient = fragment.view(gradients[fragment.tensor])
            return gradient.lerp(moment, self.momentum).to(self.dtype)  # Nesterov's

        def write(fragment: Fragment, update: torch.Tensor) -> None:
            rate = group["lr"] * adjustment(self.adjust_lr, *fragment.part.shape)
            fragment.view(weights[fragment.tensor]).add_(update, alpha=-rate)

        like = weights[0].new_empty(0, dtype=self.dtype)
        self._exchange(tensors).run(read, _orthogonalize_all, write, like)

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> MatrixExchange:
        key = tuple(map(id, tensors))
        if key not in self._exchanges:
            fragments = [
                replace(fragment, tensor=index)
                for index, tensor_id in enumerate(key)
                for fragment in self._fragments.get(tensor_id, ())
            ]
            self._exchanges[key] = MatrixExchange(fragments, self._group)
        return self._exchanges[key]


def _orthogonalize_all(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Orthogonalize those of one shape together."""
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for position, matrix in enumerate(matrices):
        alike[matrix.shape].append(position)
    done: dict[int, torch.Tensor] = {}
    for positions in alike.values():
        done |= zip(positions, orthogonalize(torch.stack([matrices[i] for i in positions])).unbind(), strict=True)
    return [done[position] for position in range(len(matrices))]
