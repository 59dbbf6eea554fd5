"""Numbers of a compiled layer are drawn in the order of its code, which keeps dropout masks those of the eager layer.

Compilers order operations by their data alone. Where attention and MLP have the same input, a mask of one could be
drawn before those of the other, or from the other's stream under tensor parallelism. A pass over the graph, still in
the order of the code, lets all that draws from the random streams or changes them follow from each other by data: where
it does not, an input goes through an operation that takes the result of the draw before as well. In a layer whose draws
are one chain already (GPT-2, OPT) that adds nothing; elsewhere each such place costs a copy of the input.
"""

import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from toolkit.errors import ModelError

_CHANGES = ("dstk::enter_own_stream", "dstk::leave_own_stream", "dstk::run_experts")
"""Operations of the toolkit that change a random stream. Blocks of experts may have regions of tensor parallelism."""


@torch.library.custom_op("dstk::draw_after", mutates_args=())
def _draw_after(x: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
    """Return a copy of x, once `earlier` is there."""
    return x.clone()


_draw_after.register_fake(lambda x, earlier: torch.empty_like(x))


class RandomOrder(CustomGraphPass):
    """A pass of TorchInductor over the joint graph of a forward and a backward pass."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Chain all draws of the graph in their order. Raises ModelError for a draw without a tensor as input."""
        earlier: torch.fx.Node | None = None
        draws = 0
        last_draw: dict[torch.fx.Node, int] = {}
        """The last draw that a node follows from, counted from 1; 0 for none. It follows from those before as well."""
        for node in list(graph.nodes):
            last_draw[node] = max((last_draw[each] for each in node.all_input_nodes), default=0)
            if not draws_numbers(node):
                continue
            if earlier is not None and last_draw[node] < draws:
                _let_follow(graph, node, earlier)
            draws += 1
            last_draw[node] = draws
            earlier = node

    def uuid(self) -> Any:
        """Return what a cached graph depends on besides its operations."""
        return get_hash_for_files((__file__,))


def draws_numbers(node: torch.fx.Node) -> bool:
    """Whether a node of a graph draws from a random stream, or changes it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.name in _CHANGES


def _let_follow(graph: torch.fx.Graph, node: torch.fx.Node, earlier: torch.fx.Node) -> None:
    """Let the first tensor that `node` takes wait for the first that `earlier` returns."""
    taken = next((each for each in node.args if _is_tensor(each)), None)
    if not isinstance(taken, torch.fx.Node):
        reason = f"{node.target} draws numbers in a decoder layer, in an order that no compiler keeps"
        raise ModelError.of("train.compile", True, reason, ("train.compile", False))
    # A copy is recomputed where its draw is.
    recomputation = {
        name: node.meta[name] for name in ("recompute", "ac_graph_id", "partitioner_tag") if name in node.meta
    }
    with graph.inserting_before(node):
        if not _is_tensor(earlier):
            values = earlier.meta["val"]
            place = next(i for i, value in enumerate(values) if isinstance(value, torch.Tensor))
            earlier = graph.call_function(operator.getitem, (earlier, place))
            earlier.meta = recomputation | {"val": values[place]}
        copy = graph.call_function(torch.ops.dstk.draw_after.default, (taken, earlier))
    copy.meta = recomputation | {"val": torch.empty_like(taken.meta["val"])}
    node.args = tuple(copy if each is taken else each for each in node.args)


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor)
