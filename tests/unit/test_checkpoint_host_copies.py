"""Host memory for snapshots: whatever shape and dtype, and the same memory again."""

import torch

from toolkit.checkpoint.host_copies import HostCopies

TENSORS = [
    torch.tensor(3),
    torch.tensor([True]),
    torch.empty(0, 3),
    torch.randn(3, 5).T,
    torch.randn(7).bfloat16(),
    torch.arange(3),
]


def copied(copies: HostCopies, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    copies.clear(sum(tensor.nbytes for tensor in tensors), len(tensors))
    return [copies.copy(tensor) for tensor in tensors]


def test_copies_are_equal_and_lie_beside_each_other() -> None:
    made = copied(HostCopies(), TENSORS)
    for tensor, copy in zip(TENSORS, made, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy, tensor)


def test_a_copy_does_not_follow_its_tensor() -> None:
    tensor = torch.ones(4)
    (copy,) = copied(HostCopies(), [tensor])
    tensor.zero_()
    assert torch.equal(copy, torch.ones(4))


def test_the_memory_is_used_again() -> None:
    copies = HostCopies()
    places = [copied(copies, [torch.ones(size)])[0].data_ptr() for size in (100, 100, 10)]
    assert len(set(places)) == 1
