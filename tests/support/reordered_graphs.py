"""A compiler that runs what is last in the code first, as far as data allows: any order may be that of a compiler."""

from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from toolkit.engines.random_order import RandomOrder


def reordering_backend(*, keeps_draws: bool = True) -> Any:
    """Return a backend of torch.compile. `keeps_draws`: with the pass of the toolkit that lets draws follow each other.

    Only forward passes are put in another order: that of collectives in a backward pass may matter.
    """

    def partition(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if keeps_draws:
            RandomOrder()(graph.graph)
        return min_cut_rematerialization_partition(graph, inputs, **options)

    return aot_autograd(fw_compiler=_reorder, bw_compiler=lambda graph, _: graph, partition_fn=partition)


def _reorder(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
    """Move the operations of a graph: of those whose inputs are there, the last of the code comes first."""
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    remaining = dict(places)
    done: set[torch.fx.Node] = set()
    last: torch.fx.Node | None = None
    while remaining:
        ready = [node for node in remaining if done.issuperset(node.all_input_nodes)]
        inner = [node for node in ready if node.op not in ("placeholder", "output")]
        inputs = [node for node in ready if node.op == "placeholder"]
        chosen = inputs[0] if inputs else max(inner or ready, key=places.__getitem__)
        if last is not None:
            last.append(chosen)
        last = chosen
        done.add(chosen)
        del remaining[chosen]
    graph.graph.lint()
    graph.recompile()
    return graph
