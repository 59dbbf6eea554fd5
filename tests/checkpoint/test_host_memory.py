"""Host memory for snapshots: any shape and dtype, in memory that is reused."""

import torch
from nonempty import nonempty

from toolkit.checkpoint.tensor_source import SnapshotMemory

TENSORS = [
    torch.tensor(3),
    torch.tensor([True]),
    torch.empty(0, 3),
    torch.randn(3, 5).T,
    torch.randn(7).bfloat16(),
    torch.arange(3),
]


def copied(copies: SnapshotMemory, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    copies.clear(sum(tensor.nbytes for tensor in tensors), len(tensors))
    return [copies.copy(tensor) for tensor in tensors]


def test_copies_equal_their_tensors() -> None:
    made = copied(SnapshotMemory(), TENSORS)
    for tensor, copy in nonempty(zip(TENSORS, made, strict=True)):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy, tensor)


def test_a_copy_does_not_change_with_its_tensor() -> None:
    tensor = torch.ones(4)
    (copy,) = copied(SnapshotMemory(), [tensor])
    tensor.zero_()
    assert torch.equal(copy, torch.ones(4))


def test_the_memory_is_reused() -> None:
    copies = SnapshotMemory()
    places = [copied(copies, [torch.ones(size)])[0].data_ptr() for size in (100, 100, 10)]
    assert len(set(places)) == 1
