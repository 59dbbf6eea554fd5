"""What attention allocates in its backward pass: the closed form, against the code on tensors without memory."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.context_exchange import ExchangeKind
from toolkit.config.layout import Layout
from toolkit.estimate.attention_moment import bytes_in_attention
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.parallel.context import exchange
from toolkit.parallel.context.attention import SequenceView, attend
from toolkit.parallel.context.kernels import TileMask
from toolkit.parallel.context.sequence import SequenceSlice
from toolkit.recorder.rehearsal.live_bytes import LiveBytes

HEADS = 16
HEAD_DIM = 64
POSITIONS = 4096


class NoTransfers:
    """Stands in for `torch.distributed`. It keeps no tensor, as a mock would."""

    isend = irecv = None
    P2POp = staticmethod(lambda *arguments: None)
    batch_isend_irecv = staticmethod(lambda operations: [])
    get_global_rank = staticmethod(lambda group, rank: rank)
    all_gather_into_tensor = staticmethod(lambda *tensors, **options: mock.Mock())
    reduce_scatter_tensor = staticmethod(lambda *tensors, **options: None)


def bias_without_memory(mask: TileMask, like: torch.Tensor) -> torch.Tensor | None:
    """Stand in for the bias of a tile, which a CPU's kernel takes; a GPU has no such tensor."""
    if mask.offset is None or mask.is_causal:
        return None
    return torch.empty(1, dtype=like.dtype).expand(1, 1, mask.queries, mask.keys)


class Allocations(TorchDispatchMode):
    """Counts bytes of what operations inside return, and of what a GPU's kernels allocate meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes(on_gpu=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live.see(func, args, kwargs or {}, result)
        return result


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A layer's attention on one of the ranks that share each sequence."""

    kind: ExchangeKind
    ranks: int
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    samples: int = 2

    def estimated_bytes(self, model_type: str = "mistral", **more: Any) -> int:
        config = {
            "model_type": model_type,
            "hidden_size": HEADS * HEAD_DIM,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": self.kv_heads,
            "sliding_window": self.window,
            "vocab_size": 512,
            **more,
        }
        setup = TrainingSetup(
            model=ModelFacts.from_config(config),
            layout=Layout(cp=self.ranks),
            micro_batch_size=self.samples,
            seq_len=self.ranks * POSITIONS,
            cp_exchange=self.kind,
            blocks=self.ranks == 1,
        )
        return bytes_in_attention(setup, self.dtype.itemsize)

    def allocated_bytes(self) -> int:
        """Return the most that the backward pass allocates on a rank beyond the gradients that it returns."""
        return max(self._allocated_bytes(rank) for rank in (0, self.ranks - 1))

    def _allocated_bytes(self, rank: int) -> int:
        group = mock.Mock(rank=lambda: rank, size=lambda: self.ranks)
        with (
            mock.patch.object(exchange, "dist", NoTransfers),
            mock.patch.object(TileMask, "bias", bias_without_memory),
            FakeTensorMode(),
            Allocations() as allocations,
        ):
            query, key, value = (
                torch.empty(self.samples, POSITIONS, heads, HEAD_DIM, dtype=self.dtype).transpose(1, 2).requires_grad_()
                for heads in (HEADS, self.kv_heads, self.kv_heads)
            )
            starts = ((0,),) * self.samples
            view = SequenceView(
                sequence=SequenceSlice(rank=rank, ranks=self.ranks, length=self.ranks * POSITIONS, starts=starts),
                exchange=exchange.make_exchange(None if self.ranks == 1 else group, self.kind),
                window=self.window,
            )
            output, _ = attend(torch.nn.Identity(), query, key, value, view.with_token())
            gradient = torch.empty_like(output)
            before = allocations.live.bytes
            allocations.live.peak = before
            gradients = torch.autograd.grad(output, (query, key, value), gradient)
            return allocations.live.peak - before - sum(each.nbytes for each in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_attention_allocates_what_the_closed_form_says(
    kind: ExchangeKind, ranks: int, kv_heads: int, dtype: torch.dtype
) -> None:
    setup = Setup(kind=kind, ranks=ranks, kv_heads=kv_heads, dtype=dtype)
    assert setup.estimated_bytes() == setup.allocated_bytes()


@pytest.mark.parametrize("window", [256, 1500, 4096])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_attention_in_windows_allocates_what_the_closed_form_says(kind: ExchangeKind, ranks: int, window: int) -> None:
    setup = Setup(kind=kind, ranks=ranks, kv_heads=4, window=window)
    assert setup.estimated_bytes() == pytest.approx(setup.allocated_bytes(), rel=0.01)


@pytest.mark.parametrize("samples", [2, 16])
def test_layers_without_a_window_count_where_some_have_one(samples: int) -> None:
    """A window of 16 takes more than whole rows with few samples, and less with many."""
    without = Setup(kind="ring", ranks=4, kv_heads=4, samples=samples).estimated_bytes()
    windowed = Setup(kind="ring", ranks=4, kv_heads=4, samples=samples, window=16)
    in_all_layers = windowed.estimated_bytes()
    assert (in_all_layers > without) == (samples == 2)
    most = max(without, in_all_layers)
    assert windowed.estimated_bytes("gemma3_text", head_dim=HEAD_DIM) == most
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    assert windowed.estimated_bytes("qwen3", head_dim=HEAD_DIM, **mixed) == most
    assert windowed.estimated_bytes("qwen3", head_dim=HEAD_DIM, use_sliding_window=False) == without
