"""Region: the tensor-parallel region of a layer between f and g, where each rank computes its own heads or columns.

A region is entered once per block (attention, MLP) and left by its row-parallel layer. With sequence parallelism the
hidden state outside is sharded over the sequence: entering gathers it, leaving reduce-scatters.

Dropout. Outside, activations are replicated and ranks must drop the same ones; inside they differ, and one random
stream would drop head 0 of each rank alike. Entering draws a number from the common stream, which keeps the ranks in
sync, and seeds a rank's own stream with it and the rank; leaving restores the common one. With sequence parallelism
ranks hold different positions outside and already have their own streams there. A block that gathers its columns is the
opposite: all ranks compute the same inside, so under sequence parallelism they use the first rank's number. Everything
follows from the generator's state at the entrance, so recomputing a layer drops the same activations again.

Compiled layers. Two operations change the stream in the graph of a layer, and the hidden state passes through them. So
what is computed in a region is ordered by its data, and toolkit/engines/random_order.py orders what is drawn elsewhere.

In the backward pass the entrance sums the gradient of the hidden state, and computes the weight gradients of the
region's column-parallel layers meanwhile (toolkit/parallel/tensor/overlapped_gradients.py).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group

from toolkit.parallel.host_numbers import draw_number, number_of_first_rank
from toolkit.parallel.tensor import collectives as c
from toolkit.parallel.tensor.overlapped_gradients import OverlappedGradients

if TYPE_CHECKING:
    from toolkit.parallel.tensor.linear import ColumnParallelLinear

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: multiples of it are spread evenly over 64 bits."""
_outside: dict[torch.device, torch.Tensor] = {}
"""The state of the common stream of a device while the stream of a region is used, [bytes].

A backward pass may enter or leave once more to recompute a tensor, or enter and not leave, because it stops as soon as
it has all that it needs. Masks are kept, or drawn from the state that they were drawn from, and the next forward pass
seeds the streams.
"""


class Region:
    """State shared by the layers of one block of one model.

    `dropout`: whether the model has dropout. `gathers`: columns are gathered at once, so that every rank computes all
    heads and only the matrices are sharded. `place`: the region's number in its layer: it keeps compilers from taking
    two entrances of one hidden state for the same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        dropout: bool,
        gathers: bool = False,
        place: int = 0,
    ) -> None:
        self.group = group
        self.gathers = gathers
        self.sequence_parallel = sequence_parallel
        self.changes_stream = dropout and group.size() > 1 and gathers == sequence_parallel
        self.place = place
        self.columns: list[ColumnParallelLinear] = []
        """The column-parallel layers of the region."""
        self.later: OverlappedGradients | None = None
        """The weight gradients that the layers entered last leave for the backward pass; None where they leave none."""
        self._columns_of: dict[nn.Module, list[ColumnParallelLinear]] = {}
        self._group_name = group.group_name
        self._entrance: nn.Module | None = None
        """The module that an eager layer is in, of this region."""

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
        return self.change_stream(x, module)

    def change_stream(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Let dropout in `module`, of what follows from x, draw from a stream of this rank, or of the first rank where
        all compute the same. Return x, in a graph a copy."""
        if not (self.changes_stream and module.training):
            return x
        if torch.compiler.is_compiling():
            entered: torch.Tensor = _enter_own_stream(x, self._group_name, self.gathers, self.place)
            return entered
        # The same module once more: the last recomputation did not leave.
        if self._entrance in (None, module):
            self._entrance = module
            _outside[x.device] = _seed_own_stream(x.device, self.group, is_common=self.gathers)
        return x

    def restore_stream(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Let dropout draw from the stream before, once x is there. Return x, in a graph a copy."""
        if not (self.changes_stream and module.training):
            return x
        if torch.compiler.is_compiling():
            left: torch.Tensor = _leave_own_stream(x)
            return left
        self._entrance = None
        _restore_common_stream(x.device)
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

    def leave(self, partial: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Partial sum [b, s, h], with which `module` leaves -> the sum (with sequence parallelism [b, s/t, h])."""
        partial = self.restore_stream(partial, module)
        if self.sequence_parallel:
            return c.reduce_scatter_sequence(partial, self.group, dim=partial.dim() - 2)
        return c.reduce_from_tensor_ranks(partial, self.group)


def _seed_own_stream(device: torch.device, group: dist.ProcessGroup, *, is_common: bool) -> torch.Tensor:
    """Seed this rank's own stream, or with `is_common` the first rank's; return the state of the stream before it."""
    drawn = draw_number()
    if is_common:
        seed = number_of_first_rank(drawn, group, device)
    else:
        seed = (drawn + (group.rank() + 1) * _GOLDEN) % 2**63
    generator = _generator(device)
    state: torch.Tensor = generator.get_state()
    generator.manual_seed(seed)
    return state


def _restore_common_stream(device: torch.device) -> None:
    state = _outside.pop(device, None)
    if state is not None:
        _generator(device).set_state(state)


@torch.library.custom_op("dstk::enter_own_stream", mutates_args=())
def _enter_own_stream(x: torch.Tensor, group_name: str, is_common: bool, place: int) -> torch.Tensor:
    """Change the stream for what is computed from x; return a copy of x."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str
    _outside[x.device] = _seed_own_stream(x.device, group, is_common=is_common)
    return x.clone()


@torch.library.custom_op("dstk::leave_own_stream", mutates_args=())
def _leave_own_stream(partial: torch.Tensor) -> torch.Tensor:
    """Return to the common stream after all that `partial` is computed from; return a copy of it."""
    _restore_common_stream(partial.device)
    return partial.clone()


_enter_own_stream.register_fake(lambda x, group_name, is_common, place: torch.empty_like(x))
_leave_own_stream.register_fake(torch.empty_like)
_enter_own_stream.register_autograd(lambda _, gradient: (gradient, None, None, None))
_leave_own_stream.register_autograd(lambda _, gradient: gradient)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def drops_activations(config: Any) -> bool:
    """Whether a model of this config has dropout."""
    facts = config.get_text_config(decoder=True).to_dict()
    return any(isinstance(value, float) and value > 0 for name, value in facts.items() if "drop" in name)
