"""Accounting: what any training framework keeps per parameter, in a few numbers.

DeepSpeed's engines are followed to the byte (`deepspeed_states`). Others shard more simply: of each parameter so many
bytes whole, so many divided over data-parallel ranks, and buffers by a rule.
"""

from dataclasses import dataclass
from typing import Literal

from toolkit.estimate.parameters import Holdings
from toolkit.estimate.states.model_states import Bytes, ModelStates


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes per parameter: `whole` on every data-parallel rank, `sharded` divided over them."""

    whole: float = 0
    sharded: float = 0

    def of(self, elements: int, shards: int) -> int:
        """Bytes on one rank; a rank's share of elements is rounded up."""
        return round(self.whole * elements + self.sharded * -(-elements // shards))


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """One framework's way of keeping model states."""

    name: str
    source: str
    """Where one can read that it is so."""
    parameters: Kept
    gradients: Kept
    """Allocated throughout, or from the first backward pass on: `gradients_persist`."""
    masters: Kept = Kept()
    optimizer: Kept
    gradients_persist: bool = True
    gathers: Literal["nothing", "layer", "root and layers"] = "nothing"
    """Weights that sharded frameworks gather: for the layer at work; or for it, the next one, and throughout for all
    that lies outside the layers."""
    gathered_bytes: float = 2
    """Per element gathered."""
    scatters: float = 0
    """Bytes per element of one layer's whole gradients on their way to shards."""
    bucket_elements: int = 0
    """Of communication buffers beside the gradients."""
    bucket_bytes: float = 0
    fresh_gradients: Kept = Kept()
    """Of one micro-batch, beside those: gone once its backward pass is over and they have been added."""
    step_per_parameter: Kept = Kept()
    """Temporaries of the update."""

    def states(self, held: Holdings, *, shards: int, accumulation: int = 2) -> ModelStates:
        """The states of one rank whose replicas are `shards` ranks."""
        elements = held.numel
        gradients = self.gradients.of(elements, shards)
        outside = elements - held.layers * held.layer_numel
        unit = min(max(held.layer_numel, held.largest), elements)
        at_once = {"nothing": 0, "layer": unit, "root and layers": outside + 2 * held.layer_numel}[self.gathers]
        gathered = round(self.gathered_bytes * min(at_once, elements))
        buckets = round(self.bucket_bytes * min(self.bucket_elements, elements))
        late = 0 if self.gradients_persist else gradients
        fresh_bytes = self.fresh_gradients.whole + (self.gradients.whole if late and accumulation == 1 else 0)
        return ModelStates(
            held=Bytes(
                parameters=self.parameters.of(elements, shards),
                gradients=gradients if self.gradients_persist else 0,
                masters=self.masters.of(elements, shards),
                optimizer=self.optimizer.of(elements, shards),
                buckets=buckets,
                model_buffers=held.buffer_bytes,
            ),
            accumulated=late if accumulation > 1 else 0,
            fresh_layer=round(fresh_bytes * held.layer_numel),
            buckets=round(self.scatters * unit),
            gathered=gathered,
            complete=late + self.fresh_gradients.of(elements, shards),
            step=late + self.step_per_parameter.of(elements, shards),
        )


def megatron(*, distributed_optimizer: bool, precision: Literal["bf16", "fp16"] = "bf16") -> Accounting:
    """Megatron-LM: 18 bytes a parameter in bf16 with fp32 main gradients, or 6 + 12 / D with its distributed optimizer.

    In fp16 main gradients are in fp16 too: 16, or 4 + 12 / D, and the optimizer's fp32 copies of them, 4 or 4 / D, from
    the update until the next step begins.
    """

    def of_optimizer(size: float) -> Kept:
        return Kept(sharded=size) if distributed_optimizer else Kept(whole=size)

    return Accounting(
        name="megatron-distributed" if distributed_optimizer else "megatron",
        source="Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py, megatron/core/optimizer/optimizer.py",
        parameters=Kept(whole=2),
        gradients=Kept(whole=4 if precision == "bf16" else 2),
        masters=of_optimizer(4),
        optimizer=of_optimizer(8),
        step_per_parameter=Kept() if precision == "bf16" else of_optimizer(4),
    )


def fsdp2(*, precision: Literal["fp32", "bf16"] = "bf16", reduce_bytes: int = 4) -> Accounting:
    """PyTorch's fully_shard, layer by layer: fp32 shards of all; bf16 layers gathered, one of them ahead.

    The root group (embedding, final norm, head) stays gathered from the first layer to the last: fully_shard does not
    shard it again behind the forward pass.
    """
    low = 4 if precision == "fp32" else 2
    return Accounting(
        name="fsdp2",
        source="PyTorch, torch/distributed/fsdp/_fully_shard: _fsdp_state.py (_lazy_init), _fsdp_param_group.py",
        parameters=Kept(sharded=4),
        gradients=Kept(sharded=4),
        optimizer=Kept(sharded=8),
        gradients_persist=False,
        gathers="root and layers",
        gathered_bytes=low,
        scatters=low + reduce_bytes,
    )


def plain(*, with_buckets: bool = False) -> Accounting:
    """PyTorch's AdamW over fp32 weights: 16 bytes a parameter. DDP has buckets of the gradients' whole size besides."""
    return Accounting(
        name="ddp" if with_buckets else "plain",
        source="PyTorch, torch/nn/parallel/distributed.py: gradient_as_bucket_view is off by default",
        parameters=Kept(whole=4),
        gradients=Kept(whole=4),
        optimizer=Kept(whole=8),
        gradients_persist=False,
        bucket_elements=2**62 if with_buckets else 0,
        bucket_bytes=4,
    )


def nanotron(*, zero_stage: Literal[0, 1] = 1, accumulates_in_fp32: bool = True) -> Accounting:
    """nanotron in bf16: fp32 masters and moments over D with ZeRO-1; gradients accumulated in fp32 beside bf16 ones.

    Without ZeRO DDP has buckets of all gradients in bf16. With it the update ends in copies of all weights: flat, once
    its own and once in PyTorch's all_gather of a list, and flat of the rank's share.
    """
    share = Kept(sharded=4) if zero_stage else Kept(whole=4)
    return Accounting(
        name=f"nanotron-zero{zero_stage}",
        source="nanotron, src/nanotron/optim: zero.py, gradient_accumulator.py; trainer.py; distributed.py",
        parameters=Kept(whole=2),
        gradients=Kept(whole=4 if accumulates_in_fp32 else 2),
        fresh_gradients=Kept(whole=2 if accumulates_in_fp32 else 0),
        masters=share,
        optimizer=Kept(whole=2 * share.whole, sharded=2 * share.sharded),
        bucket_elements=0 if zero_stage else 2**62,
        bucket_bytes=2,
        step_per_parameter=Kept(whole=4, sharded=2) if zero_stage else Kept(),
    )
