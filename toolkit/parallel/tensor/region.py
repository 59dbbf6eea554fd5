"""Region: the tensor-parallel region of a layer between f and g, where each rank computes its own heads or columns.

A region is entered once per block (attention, MLP) and left by its row-parallel layer. With sequence parallelism the
hidden state outside is sharded over the sequence: entering gathers it, leaving reduce-scatters.

Dropout. Outside, activations are replicated and ranks must drop the same ones; inside they differ, and one random
stream would drop head 0 of each rank alike. Entering draws a number from the common stream, which keeps the ranks in
sync, and seeds a rank's own stream with it and the rank; leaving restores the common one. With sequence parallelism
ranks hold different positions outside and already have their own streams there. A block that gathers its columns is the
opposite: all ranks compute the same inside, so under sequence parallelism they use the first rank's number. Everything
follows from the generator's state at the entrance, so recomputing a layer drops the same activations again.

In the backward pass the entrance sums the gradient of the hidden state, and computes the weight gradients of the
region's column-parallel layers meanwhile (toolkit/parallel/tensor/overlapped_gradients.py).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from toolkit.parallel.host_numbers import draw_number, number_of_first_rank
from toolkit.parallel.tensor import collectives as c
from toolkit.parallel.tensor.overlapped_gradients import OverlappedGradients

if TYPE_CHECKING:
    from toolkit.parallel.tensor.linear import ColumnParallelLinear

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: multiples of it are spread evenly over 64 bits."""
_Method = TypeVar("_Method", bound=Callable[..., None])


def _uncompiled(method: _Method) -> _Method:
    """Keep torch.compile out of a method, and say why where that breaks a graph."""
    reason = "tensor-parallel dropout changes the random stream"
    eager: _Method = torch.compiler.disable(method, reason=reason)
    return eager


class Region:
    """State shared by the layers of one block of one model.

    `dropout`: whether the model has dropout. `gathers`: columns are gathered at once, so that every rank computes all
    heads and only the matrices are sharded.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, sequence_parallel: bool, dropout: bool, gathers: bool = False
    ) -> None:
        self.group = group
        self.gathers = gathers
        self.sequence_parallel = sequence_parallel
        self.dropout = dropout
        self.columns: list[ColumnParallelLinear] = []
        """The column-parallel layers of the region."""
        self.later: OverlappedGradients | None = None
        """The weight gradients that the layers entered last leave for the backward pass; None where they leave none."""
        self._columns_of: dict[nn.Module, list[ColumnParallelLinear]] = {}
        self._outside: tuple[torch.Generator, torch.Tensor] | None = None
        self._entrance: nn.Module | None = None

    def enter(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Hidden state [b, s, h] (with sequence parallelism [b, s/t, h]) -> [b, s, h], whose gradient is summed.

        A family may flatten it to [b * s, h] before an MLP, where the order of the positions does not matter.
        """
        later = None
        # The compiler puts products and sums in order by itself, and recomputes nothing that changes an object.
        if not torch.compiler.is_compiling():
            later = OverlappedGradients.of(x, self._column_weights(x, module), self.group)
            self.later = later
        if self.sequence_parallel:
            x = c.gather_sequence(x, self.group, dim=x.dim() - 2, later=later)
        else:
            x = c.copy_to_tensor_ranks(x, self.group, later)
        if module is self._entrance:
            # The last recomputation did not leave: it stops as soon as the backward pass has all that it needs.
            self._outside = None
        if self.dropout and module.training and self.group.size() > 1 and self.gathers == self.sequence_parallel:
            self._change_stream(x.device, module)
        return x

    def _column_weights(self, x: torch.Tensor, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield the weights of the region's column-parallel layers in `module`, through which x enters it.

        A weight whose gradient belongs to the W of a split backward pass is left out.
        """
        if module not in self._columns_of:
            inside = set(module.modules())
            self._columns_of[module] = [column for column in self.columns if column in inside]
        for column in self._columns_of[module]:
            if column.split is None or column.split.taking(x, column.weight) is None:
                yield column.weight

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Partial sum [b, s, h] -> the sum [b, s, h] (with sequence parallelism [b, s/t, h])."""
        if self._outside is not None:
            self._restore_stream()
        if self.sequence_parallel:
            return c.reduce_scatter_sequence(partial, self.group, dim=partial.dim() - 2)
        return c.reduce_from_tensor_ranks(partial, self.group)

    @_uncompiled
    def _restore_stream(self) -> None:
        assert self._outside is not None
        generator, state = self._outside
        generator.set_state(state)
        self._outside = None

    @_uncompiled
    def _change_stream(self, device: torch.device, module: nn.Module) -> None:
        if self._outside is not None:
            return
        self._entrance = module
        drawn = draw_number()
        if self.gathers:
            seed = number_of_first_rank(drawn, self.group, device)
        else:
            seed = (drawn + (self.group.rank() + 1) * _GOLDEN) % 2**63
        generator = _generator(device)
        self._outside = generator, generator.get_state()
        generator.manual_seed(seed)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def drops_activations(config: Any) -> bool:
    """Whether a model of this config has dropout."""
    facts = config.get_text_config(decoder=True).to_dict()
    return any(isinstance(value, float) and value > 0 for name, value in facts.items() if "drop" in name)
