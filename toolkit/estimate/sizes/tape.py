"""Tape: a forward and a backward pass on tensors without values, and the memory they use at every moment.

The rules are those of PyTorch's autograd. An operation allocates its result and keeps for backward what its derivative
needs; a view shares its base's storage; the engine runs nodes in the reverse order of their creation, accumulates
gradients in place if nothing else refers to them, and releases what a node had kept once it has run.
A storage is freed with the last tensor that refers to it, which CPython does immediately.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

Shape = tuple[int, ...]


class Storage:
    """A block of memory. `users`: tensors that refer to it."""

    __slots__ = ("bytes", "tape", "users")

    def __init__(self, tape: "Tape", size: int) -> None:
        self.tape, self.bytes, self.users = tape, size, 0
        tape.live += size
        tape.peak = max(tape.peak, tape.live)


class Tensor:
    """A view of a storage. `node` made it, as its output number `output`; None if it needs no gradient."""

    __slots__ = ("itemsize", "node", "output", "shape", "storage", "strides")

    def __init__(
        self, storage: Storage, shape: Shape, strides: Shape, itemsize: int, node: "Node | None" = None, output: int = 0
    ) -> None:
        self.storage, self.shape, self.strides, self.itemsize = storage, shape, strides, itemsize
        self.node, self.output = node, output
        storage.users += 1

    def __del__(self) -> None:
        storage = self.storage
        storage.users -= 1
        if not storage.users:
            storage.tape.live -= storage.bytes

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def tape(self) -> "Tape":
        return self.storage.tape

    def alias(self, shape: Shape | None = None, strides: Shape | None = None) -> "Tensor":
        """Return another tensor of the same storage, without a node."""
        own = shape is None or strides is None
        return Tensor(self.storage, *((self.shape, self.strides) if own else (shape, strides)), self.itemsize)  # type: ignore[arg-type]


Gradients = Sequence[Tensor | None]
Kept = Sequence[Tensor]
Backward = Callable[[Tensor, Kept], Gradients]
"""(gradient of the output, what was kept) -> gradients of the inputs."""
_NodeBackward = Callable[[Gradients, Kept], Gradients]


class Node:
    """One operation of the graph. `inputs`: node, output number and shape of each input that needs a gradient."""

    __slots__ = ("backward", "gradients", "inputs", "is_parameter", "kept")

    def __init__(
        self, inputs: list[tuple["Node", int, Shape] | None], kept: list[Tensor], backward: _NodeBackward, outputs: int
    ) -> None:
        self.inputs, self.kept, self.backward = inputs, kept, backward
        self.gradients: list[Tensor | None] = [None] * outputs
        self.is_parameter = False


class Tape:
    """One pass. `live` and `peak` are bytes of everything but parameters. `peak_until_kept`: up to the last operation
    that keeps something, where checkpointing stops its recomputation.

    `keeps_gradients`: a parameter's gradient stays; otherwise it is accumulated into an existing one, and freed.
    `autocast`: bytes of a weight's element if products run in 16 bits, as under torch.autocast; 0: no autocast.
    """

    def __init__(self, *, on_cpu: bool = False, keeps_gradients: bool = False, autocast: int = 0) -> None:
        self.live = self.peak = self.peak_until_kept = self._peak_at_record = 0
        self.on_cpu, self.keeps_gradients, self.autocast = on_cpu, keeps_gradients, autocast
        self.kinds: dict[Storage, str] = {}
        self.gradients: list[Tensor] = []
        self._nodes: list[Node] = []
        self._kind = ""
        self._records = True
        self._free = Storage(self, 0)

    def new(self, shape: Shape, itemsize: int, strides: Shape | None = None) -> Tensor:
        """Allocate a tensor; contiguous without `strides`."""
        return Tensor(Storage(self, prod(shape) * itemsize), shape, strides or contiguous(shape), itemsize)

    def parameter(self, shape: Shape, itemsize: int) -> Tensor:
        """Make a weight. Its memory is counted elsewhere."""
        node = Node([], [], _no_backward, 1)
        node.is_parameter = True
        return Tensor(self._free, shape, contiguous(shape), itemsize, node)

    def leaf(self, shape: Shape, itemsize: int) -> Tensor:
        """Make a tensor from outside that needs a gradient: the hidden state in front of a layer."""
        tensor = self.new(shape, itemsize)
        tensor.node = Node([], [], _no_backward, 1)
        return tensor

    @contextmanager
    def part(self, kind: str) -> Iterator[None]:
        """Attribute what is kept inside to this kind."""
        before, self._kind = self._kind, kind
        yield
        self._kind = before

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Record nothing inside."""
        before, self._records = self._records, False
        yield
        self._records = before

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Inside, operations run in the dtype of their inputs."""
        before, self.autocast = self.autocast, 0
        yield
        self.autocast = before

    def record(self, output: Tensor, inputs: Sequence[Tensor], kept: Sequence[Tensor], backward: Backward) -> Tensor:
        """Record an operation with one output, and return that. Backward runs it only if its output has a gradient."""

        def from_outputs(gradients: Gradients, kept: Kept) -> Gradients:
            assert gradients[0] is not None
            return backward(gradients[0], kept)

        self.record_outputs([output], inputs, kept, from_outputs)
        return output

    def record_outputs(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], kept: Sequence[Tensor], backward: _NodeBackward
    ) -> None:
        """Record an operation, some of whose outputs' gradients may be missing, if an input of it needs a gradient."""
        if not self._records or all(tensor.node is None for tensor in inputs):
            return
        edges = [None if x.node is None else (x.node, x.output, x.shape) for x in inputs]
        aliases = [tensor.alias() for tensor in kept]
        for tensor in aliases:
            self.kinds.setdefault(tensor.storage, self._kind)
        if aliases:
            # What is kept is saved before the operation makes its result, unless it is the result.
            saved = {tensor.storage for tensor in aliases}
            results = sum(storage.bytes for storage in {x.storage for x in outputs} - saved)
            self.peak_until_kept = max(self._peak_at_record, self.live - results)
        self._peak_at_record = self.peak
        node = Node(edges, aliases, backward, len(outputs))
        for number, tensor in enumerate(outputs):
            tensor.node, tensor.output = node, number
        self._nodes.append(node)

    def kept_bytes(self) -> dict[str, int]:
        """Return kind -> bytes kept for backward, counting every storage once."""
        found: dict[str, int] = {}
        for storage in self.kept_storages():
            kind = self.kinds[storage]
            found[kind] = found.get(kind, 0) + storage.bytes
        return found

    def kept_storages(self) -> dict[Storage, None]:
        """Return what is kept for backward, except parameters, in the order of the operations (a set has no order)."""
        found = dict.fromkeys(tensor.storage for node in self._nodes for tensor in node.kept)
        found.pop(self._free, None)
        return found

    def backward(self, output: list[Tensor], gradient: list[Tensor] | None = None) -> None:
        """Run the backward pass from the one tensor in `output`; its gradient is the one in `gradient`, or a new one.

        Both lists are emptied, so that no reference keeps used tensors alive.
        """
        tensor = output.pop()
        own = gradient.pop() if gradient else self.new(tensor.shape, tensor.itemsize)
        node, number = tensor.node, tensor.output
        assert node is not None
        node.gradients[number] = own
        del tensor, own
        with self.no_grad():
            while self._nodes:
                last = self._nodes.pop()
                if any(given is not None for given in last.gradients):
                    self._run(last)

    def replay(self, run: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
        """Run forward and backward of `run` inside a backward pass; return the gradients of its inputs."""
        outer, self._nodes = self._nodes, []
        before, self._records = self._records, True
        nodes = [Node([], [], _no_backward, 1) for _ in inputs]
        leaves = [tensor.alias() for tensor in inputs]
        for leaf, node in zip(leaves, nodes, strict=True):
            leaf.node = node
        del leaf
        result = [run(*leaves)]
        leaves.clear()
        self.backward(result, [gradient.alias()])
        self._nodes, self._records = outer, before
        return [node.gradients[0] for node in nodes]

    def _run(self, node: Node) -> None:
        incoming, node.gradients = node.gradients, []
        results = list(node.backward(incoming, node.kept))
        for number, edge in enumerate(node.inputs):
            gradient = results[number]
            if edge is not None and gradient is not None and gradient.shape != edge[2]:
                results[number] = self.new(edge[2], gradient.itemsize)  # summed over broadcast dims
        gradient = None
        incoming, node.kept = [], []
        for number, edge in enumerate(node.inputs):
            gradient, results[number] = results[number], None
            if edge is not None and gradient is not None:
                self._deliver(edge[0], edge[1], gradient)
            gradient = None

    def _deliver(self, node: Node, output: int, gradient: Tensor) -> None:
        if node.is_parameter:
            if self.keeps_gradients:
                self.gradients.append(gradient)
            return
        there = node.gradients[output]
        if there is None:
            node.gradients[output] = gradient
        elif there.storage.users > 1 or not _is_dense(there):
            node.gradients[output] = self.new(there.shape, there.itemsize, like(there))
        # else it is accumulated in place


def contiguous(shape: Shape) -> Shape:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def like(tensor: Tensor) -> Shape:
    """Strides of a new tensor with the memory order of `tensor`."""
    return of_order(tensor.shape, [tensor.strides], [tensor.shape])


def of_order(shape: Shape, strides: Sequence[Shape], shapes: Sequence[Shape]) -> Shape:
    """Strides that an elementwise operation gives its result: the order of the dims of its operands, the first decides.

    As PyTorch's TensorIterator::reorder_dimensions: an insertion sort that compares one operand after the other.
    """
    dims = len(shape)
    if all(s == contiguous(shape) for s in strides):
        return strides[0]
    padded = [_broadcast_strides(s, own, shape) for s, own in zip(strides, shapes, strict=True)]
    order = list(reversed(range(dims)))  # fastest first
    for i in range(1, dims):
        at = i
        for before in range(i - 1, -1, -1):
            swap = _should_swap(order[before], order[at], padded, shape)
            if swap > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif swap < 0:
                break
    result, step = [0] * dims, 1
    for dim in order:
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def _should_swap(a: int, b: int, strides: Sequence[Shape], shape: Shape) -> int:
    for operand in strides:
        first, second = operand[a], operand[b]
        if first == 0 or second == 0:
            continue
        if first != second:
            return -1 if first < second else 1
        if shape[a] > shape[b]:
            return 1
    return 0


def _broadcast_strides(strides: Shape, own: Shape, shape: Shape) -> Shape:
    missing = len(shape) - len(own)
    return (0,) * missing + tuple(
        0 if size == 1 and whole != 1 else stride
        for stride, size, whole in zip(strides, own, shape[missing:], strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a block of memory without gaps or overlaps."""
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.strides, tensor.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


def _no_backward(gradients: Sequence[Tensor | None], kept: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return ()
