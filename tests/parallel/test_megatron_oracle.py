"""Our layers against Megatron-LM's own: the same weights and inputs, the same outputs and gradients.

megatron-core runs on CPU ranks here; it asks CUDA only on which device to put its buffers, and is told the CPU.
"""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nonempty import nonempty
from torch import nn

from toolkit.parallel.shard import Block
from toolkit.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, sum_over_ranks
from toolkit.parallel.tensor.region import Region
from toolkit.parallel.tensor.vocabulary import VocabularyShard, shard_embedding, vocab_parallel_token_loss_sum

Ranks = Callable[..., list[Any]]
SIZES = pytest.mark.parametrize("size", [2, 4])
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence-parallel"])


@pytest.fixture(scope="module")
def megatron(ranks: Ranks) -> ModuleType:
    """megatron.core.tensor_parallel, imported before ranks are forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and Apex, which it can do without
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
        from megatron.core import tensor_parallel

    module: ModuleType = tensor_parallel
    return module


@pytest.fixture(autouse=True)
def buffers_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs).double()
    with torch.no_grad():
        layer.weight.copy_(draw(outputs, inputs))
        layer.bias.copy_(draw(outputs, seed=1))
    return layer


def config(*, sequence_parallel: bool = False) -> Any:
    """Megatron's config, once its process groups are there."""
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig

    size = dist.get_world_size()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    return ModelParallelConfig(
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        perform_initialization=False,
    )


def own_positions(x: torch.Tensor) -> torch.Tensor:
    """[b, s, h] -> this rank's positions [b, s/t, h]."""
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def swapped(x: torch.Tensor) -> torch.Tensor:
    """[b, s, h] -> Megatron's [s, b, h], or back."""
    return x.transpose(0, 1).contiguous()


def assert_alike(
    ours: nn.Module, theirs: Any, x: torch.Tensor, gradient: torch.Tensor, *, parameters: tuple[str, ...]
) -> None:
    """Both layers give the same on x [b, s, i], and their inputs and parameters learn the same."""
    x, their_x = x.clone().requires_grad_(), swapped(x).requires_grad_()
    y = ours(x)
    their_y, _ = theirs(their_x)
    y.backward(gradient)
    their_y.backward(swapped(gradient))
    torch.testing.assert_close(y, swapped(their_y))
    assert their_x.grad is not None
    torch.testing.assert_close(x.grad, swapped(their_x.grad))
    for name in parameters:
        torch.testing.assert_close(ours.get_parameter(name).grad, theirs.get_parameter(name).grad)


@SIZES
@SEQUENCE
def test_a_column_layer_is_megatrons(megatron: ModuleType, ranks: Ranks, size: int, sequence_parallel: bool) -> None:
    def check() -> bool:
        place = Region(dist.group.WORLD, sequence_parallel=sequence_parallel, dropout=False)
        ours = ColumnParallelLinear(linear(5, 12), [Block(units=12)], name="layer", region=place, enters=True)
        theirs = megatron.ColumnParallelLinear(
            5, 12, config=config(sequence_parallel=sequence_parallel), init_method=nn.init.zeros_
        )
        theirs.load_state_dict(ours.state_dict(), strict=False)
        x, gradient = draw(2, 8, 5, seed=2), draw(2, 8, 12 // size, seed=dist.get_rank())
        x = own_positions(x) if sequence_parallel else x
        assert_alike(ours, theirs, x, gradient, parameters=("weight", "bias"))
        return True

    assert all(nonempty(ranks(check, size)))


@SIZES
def test_a_gathering_column_layer_is_megatrons(megatron: ModuleType, ranks: Ranks, size: int) -> None:
    def check() -> bool:
        place = Region(dist.group.WORLD, sequence_parallel=False, dropout=False)
        ours = ColumnParallelLinear(
            linear(5, 12), [Block(units=12)], name="layer", region=place, enters=True, gather_output=True
        )
        theirs = megatron.ColumnParallelLinear(5, 12, config=config(), init_method=nn.init.zeros_, gather_output=True)
        theirs.load_state_dict(ours.state_dict(), strict=False)
        assert_alike(ours, theirs, draw(2, 8, 5, seed=2), draw(2, 8, 12, seed=3), parameters=("weight", "bias"))
        return True

    assert all(nonempty(ranks(check, size)))


@SIZES
@SEQUENCE
def test_a_row_layer_is_megatrons(megatron: ModuleType, ranks: Ranks, size: int, sequence_parallel: bool) -> None:
    def check() -> bool:
        place = Region(dist.group.WORLD, sequence_parallel=sequence_parallel, dropout=False)
        ours = RowParallelLinear(linear(12, 5), [Block(units=12)], name="layer", region=place)
        theirs = megatron.RowParallelLinear(
            12,
            5,
            config=config(sequence_parallel=sequence_parallel),
            init_method=nn.init.zeros_,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        theirs.load_state_dict(ours.state_dict(), strict=False)
        if sequence_parallel:
            # Megatron sums what it marked after the backward pass, in finalize_model_grads.
            assert theirs.bias.sequence_parallel
            sum_over_ranks(theirs.bias, dist.group.WORLD)
            assert ours.bias is not None
            sum_over_ranks(ours.bias, dist.group.WORLD)
        gradient = draw(2, 8, 5, seed=3)
        gradient = own_positions(gradient) if sequence_parallel else gradient
        x = draw(2, 8, 12 // size, seed=dist.get_rank())
        assert_alike(ours, theirs, x, gradient, parameters=("weight", "bias"))
        return True

    assert all(nonempty(ranks(check, size)))


@SIZES
def test_a_split_embedding_is_megatrons(megatron: ModuleType, ranks: Ranks, size: int) -> None:
    def check() -> bool:
        ours = nn.Embedding(12, 5).double()
        with torch.no_grad():
            ours.weight.copy_(draw(12, 5))
        shard_embedding(ours, "embed", dist.group.WORLD)
        theirs = megatron.VocabParallelEmbedding(12, 5, init_method=nn.init.zeros_, config=config())
        theirs.load_state_dict(ours.state_dict(), strict=False)
        ids, gradient = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(0)), draw(2, 8, 5, seed=1)
        y, their_y = ours(ids), theirs(ids)
        torch.testing.assert_close(y, their_y, rtol=0, atol=0)
        y.backward(gradient)
        their_y.backward(gradient)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
        return True

    assert all(nonempty(ranks(check, size)))


@SIZES
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_split_loss_is_megatrons(megatron: ModuleType, ranks: Ranks, size: int, scale: float) -> None:
    def check() -> bool:
        config()
        shard = VocabularyShard.of(12, dist.group.WORLD)
        logits = (draw(2, 8, 12, dtype=torch.float32) * scale)[..., shard.start : shard.start + shard.rows]
        labels = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(1))
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        loss = vocab_parallel_token_loss_sum(ours, labels, shard, dist.group.WORLD)
        # It writes into the logits that it is given.
        their_loss = megatron.vocab_parallel_cross_entropy(theirs * 1.0, labels).sum()
        torch.testing.assert_close(loss, their_loss)
        (0.5 * loss).backward()
        (0.5 * their_loss).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        return True

    assert all(nonempty(ranks(check, size)))
