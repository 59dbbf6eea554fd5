"""Region: the tensor-parallel region of a layer between f and g, where each rank computes its own heads or columns.

A region is entered once per block (attention, MLP) and left by its row-parallel layer. With sequence parallelism the
hidden state outside is sharded over the sequence: entering gathers it, leaving reduce-scatters.

Dropout. Outside, activations are replicated and ranks must drop the same ones; inside they differ, and one random
stream would drop head 0 of each rank alike. Entering draws a number from the common stream, which keeps the ranks in
sync, and seeds a rank's own stream with it and the rank; leaving restores the common one. With sequence parallelism
ranks hold different positions outside and already have their own streams there. A block that gathers its columns is the
opposite: all ranks compute the same inside, so under sequence parallelism they use the first rank's number. Everything
follows from the generator's state at the entrance, so recomputing a layer drops the same activations again.

Compiled layers. Compilers order operations by their data alone. Where all that draws from the stream in a layer is one
chain of data (`is_chain`), two operations change the stream in the graph of the layer, and the hidden state passes
through them. Elsewhere graphs end where the stream is changed: a mask that is drawn beside a region could move into it.

In the backward pass the entrance sums the gradient of the hidden state, and computes the weight gradients of the
region's column-parallel layers meanwhile (toolkit/parallel/tensor/overlapped_gradients.py).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

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
CHAINS = ("biogpt", "gpt2", "gpt_bigcode", "openai-gpt", "opt", "seed_oss", "xglm")
"""Families with dropout by default whose decoder layers draw all masks in one chain of data."""
_Method = TypeVar("_Method", bound=Callable[..., None])


def _uncompiled(method: _Method) -> _Method:
    """Keep torch.compile out of a method, and say why where that breaks a graph."""
    reason = "tensor-parallel dropout changes the random stream"
    eager: _Method = torch.compiler.disable(method, reason=reason)
    return eager


class Region:
    """State shared by the layers of one block of one model.

    `dropout`: whether the model has dropout. `gathers`: columns are gathered at once, so that every rank computes all
    heads and only the matrices are sharded. `is_chain`: whether each mask of a decoder layer is applied to what follows
    from the result of the mask before it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        dropout: bool,
        gathers: bool = False,
        is_chain: bool = False,
    ) -> None:
        self.group = group
        self.gathers = gathers
        self.sequence_parallel = sequence_parallel
        self.changes_stream = dropout and group.size() > 1 and gathers == sequence_parallel
        self.is_chain = is_chain
        self.columns: list[ColumnParallelLinear] = []
        """The column-parallel layers of the region."""
        self.later: OverlappedGradients | None = None
        """The weight gradients that the layers entered last leave for the backward pass; None where they leave none."""
        self._columns_of: dict[nn.Module, list[ColumnParallelLinear]] = {}
        self._group_name = group.group_name
        self._outside: torch.Tensor | None = None
        """The state of the common stream while this rank's own is used, [bytes]."""
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
        if self.is_chain and torch.compiler.is_compiling():
            if self.changes_stream and module.training:
                x = _enter_own_stream(x, self._group_name, self.gathers)
        else:
            self.change_stream(x.device, module)
        return x

    def change_stream(self, device: torch.device, module: nn.Module) -> None:
        """Let dropout in `module` draw from a stream of this rank, or of the first rank where all compute the same."""
        if module is self._entrance:
            # The last recomputation did not leave: it stops as soon as the backward pass has all that it needs.
            self._outside = None
        if self.changes_stream and module.training:
            self._change_stream(device, module)

    def restore_stream(self, device: torch.device) -> None:
        """Let dropout draw from the stream that was there before."""
        if self._outside is not None:
            self._restore_stream(device)

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
        if self.is_chain and torch.compiler.is_compiling():
            if self.changes_stream and module.training:
                partial = _leave_own_stream(partial)
        else:
            self.restore_stream(partial.device)
        if self.sequence_parallel:
            return c.reduce_scatter_sequence(partial, self.group, dim=partial.dim() - 2)
        return c.reduce_from_tensor_ranks(partial, self.group)

    @_uncompiled
    def _change_stream(self, device: torch.device, module: nn.Module) -> None:
        if self._outside is None:
            self._entrance = module
            self._outside = _seed_own_stream(device, self.group, is_common=self.gathers)

    @_uncompiled
    def _restore_stream(self, device: torch.device) -> None:
        assert self._outside is not None
        _generator(device).set_state(self._outside)
        self._outside = None


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


_outside_of_graphs: dict[torch.device, torch.Tensor] = {}
"""The state of the common stream of a device while a compiled layer is in a region.

A compiled backward pass may enter or leave once more to recompute a tensor. Masks are kept, or drawn from the state
that they were drawn from, and the next forward pass seeds the streams.
"""


@torch.library.custom_op("dstk::enter_own_stream", mutates_args=())
def _enter_own_stream(x: torch.Tensor, group_name: str, is_common: bool) -> torch.Tensor:
    """Change the stream for what is computed from x; return a copy of x."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str
    _outside_of_graphs[x.device] = _seed_own_stream(x.device, group, is_common=is_common)
    return x.clone()


@torch.library.custom_op("dstk::leave_own_stream", mutates_args=())
def _leave_own_stream(partial: torch.Tensor) -> torch.Tensor:
    """Return to the common stream after all that `partial` is computed from; return a copy of it."""
    state = _outside_of_graphs.pop(partial.device, None)
    if state is not None:
        _generator(partial.device).set_state(state)
    return partial.clone()


_enter_own_stream.register_fake(lambda x, group_name, is_common: torch.empty_like(x))
_leave_own_stream.register_fake(torch.empty_like)
_enter_own_stream.register_autograd(lambda _, gradient: (gradient, None, None))
_leave_own_stream.register_autograd(lambda _, gradient: gradient)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def drops_activations(config: Any) -> bool:
    """Whether a model of this config has dropout."""
    facts = config.get_text_config(decoder=True).to_dict()
    return any(isinstance(value, float) and value > 0 for name, value in facts.items() if "drop" in name)
