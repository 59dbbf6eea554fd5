"""The shared expert runs while rows are on their way, forward and backward, and once."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from toolkit.parallel.experts import dispatch
from toolkit.parallel.experts.compiled_experts import number_experts
from toolkit.parallel.experts.sharding import ExpertSharder
from toolkit.parallel.tiny_model import tiny_config


@dataclass
class Echo:
    """Ranks that send what they get: what arrives is what was sent. Notes what happens when."""

    events: list[str] = field(default_factory=list)

    def exchange(self, out: torch.Tensor, x: torch.Tensor, *sizes: Any, async_op: bool = False, **named: Any) -> Any:
        out.copy_(x)
        if async_op:
            self.events.append("start")
            return self
        return None

    def wait(self) -> None:
        self.events.append("wait")


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Echo]:
    echo = Echo()
    monkeypatch.setattr(dispatch.dist, "all_to_all_single", echo.exchange)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    # As in CompiledLayers.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield echo
    dist.destroy_process_group()


def train_step(
    family: str, echo: Echo, *, overlaps: bool, recomputes: bool, compiles: bool = False
) -> tuple[list[str], list[torch.Tensor]]:
    """What happens in the last layer, and the loss with all gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, num_hidden_layers=2), dtype=torch.float32)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sharder = ExpertSharder(model, dist.new_group([0]), dist.new_group([0, 1]), overlaps=overlaps)
    last = model.model.layers[1]
    sharder.shard_layer(last, "last")
    (shared,) = (module for name, module in last.named_modules() if name.endswith(("shared_expert", "shared_experts")))
    if not (compiles and family == "hy_v3"):  # there the shared expert is part of the graph
        shared.register_forward_hook(lambda *_: echo.events.append("shared"))
        shared.register_full_backward_hook(lambda *_: echo.events.append("shared backward"))
    if compiles:
        torch.compiler.reset()
        number_experts(last.get_submodule("mlp.experts"))
        last.forward = torch.compile(last.forward, backend="aot_eager", fullgraph=True)
    echo.events.clear()
    tokens = torch.arange(24).view(2, 12) % 90
    loss = model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return echo.events.copy(), [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# Called after the experts: with the block's input, with a view of it; before them: behind a gate, without one.
@pytest.mark.parametrize("family", ["deepseek_v3", "hy_v3", "qwen2_moe", "ernie4_5_moe"])
@pytest.mark.parametrize(
    ("recomputes", "compiles"),
    [(False, False), (True, False), (True, True), pytest.param(False, True, marks=pytest.mark.whole)],
)
def test_it_runs_during_the_exchange(family: str, recomputes: bool, compiles: bool, echo: Echo) -> None:
    _, expected = train_step(family, echo, overlaps=False, recomputes=recomputes)
    events, trained = train_step(family, echo, overlaps=True, recomputes=recomputes, compiles=compiles)
    forward = ["start", "shared", "wait", "start", "wait"]
    backward = ["start", "wait", "start", "shared backward", "wait"]
    if compiles and family == "hy_v3":
        forward.remove("shared")
        backward.remove("shared backward")
    assert events == forward + (forward if recomputes else []) + backward
    torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-7)
