"""Model states of a rank: weights, gradients, master weights, moments and buffers, and what a framework keeps of each.

DeepSpeed's engines are modeled to the byte (`deepspeed_states`). Those of accelerate shard more simply: `TorchStates`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.config.update_chunk import UPDATE_CHUNK_ELEMENTS
from toolkit.estimate.rank_parameters import RankParameters

_LEAST_8BIT = 4096
"""Elements of the smallest tensor whose moments take one byte each."""
_BLOCK = 256
"""Elements that share a scale."""
_CODES = 256
"""Numbers that a byte stands for."""


def moments_8bit(tensors: Iterable[tuple[int, int]]) -> int:
    """Bytes of an 8-bit AdamW's moments, of (elements, how many tensors of that size).

    Two of one byte an element, and for each a scale in fp32 per block; small tensors keep fp32; besides, one table of
    codes for each moment. Source: bitsandbytes 0.50, optim/optimizer.py, Optimizer2State.init_state. torchao 0.18
    (optim/adam.py, _new_buffer) has a table for every tensor, and keeps what is no multiple of a block as it is.
    """
    total = 2 * 4 * _CODES
    for numel, count in tensors:
        if numel < _LEAST_8BIT:
            tensor_bytes = 2 * 4 * numel
        else:
            tensor_bytes = 2 * numel + 2 * 4 * -(-numel // _BLOCK)
        total += tensor_bytes * count
    return total


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes in one memory between two steps."""

    parameters: int = 0
    """The weights that the forward pass uses; under ZeRO-3 this rank's shards and small replicated ones."""
    gradients: int = 0
    """Gradient buffers that stay allocated between steps."""
    masters: int = 0
    """fp32 weights, where the model's own are in 16 bits or flat copies are updated."""
    optimizer: int = 0
    """Moments, and the optimizer's step counters."""
    buckets: int = 0
    """Communication and staging buffers that stay allocated."""
    reference: int = 0
    """A frozen copy of the weights that train, for an objective that compares with them in each step."""
    model_buffers: int = 0
    """Rotary tables and masks of the model."""
    counters: int = 0
    """Norms, loss scales and the like: a few bytes."""
    activations: int = 0
    """Activations that are offloaded, at the end of a forward pass."""

    @property
    def total(self) -> int:
        states = self.parameters + self.gradients + self.masters + self.optimizer + self.activations
        return states + self.reference + self.buckets + self.model_buffers + self.counters


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """A rank's states between steps, and what is allocated within one; all but `host` is on the device."""

    resident: StateBytes
    """States on the device between two steps."""
    host: StateBytes = StateBytes()
    """States in host memory between two steps."""
    nvme: StateBytes = StateBytes()
    """States in files, gradients included, which are written over in each step."""
    accumulated: int = 0
    """Gradients, beyond `resident`, that exist while the last micro-batch computes."""
    fresh_layer: int = 0
    """Gradients of one decoder layer, if this backward pass allocates them; 0 if they exist before."""
    buckets: int = 0
    """Communication buffers, beyond `resident`, during the backward pass."""
    gathered: int = 0
    """Weights gathered from other ranks while layers compute."""
    last_gradient: int = 0
    """The largest gradient, and the buckets and copies while it is reduced: the embedding's is complete last, when the
    activations are gone. `buckets` are those of the time before."""
    reduction: int = 0
    """Bytes beyond `resident` while gradients are reduced after the backward pass."""
    complete: int = 0
    """Gradients, beyond `resident`, when they are reduced and the update has not begun."""
    complete_buckets: int = 0
    """Communication buffers that those gradients keep alive."""
    host_complete: int = 0
    """Gradients and their norms in host memory then, beyond `host`."""
    step: int = 0
    """Bytes beyond `resident` during the update, at most."""


def update_of_factored(params: RankParameters) -> int:
    """Temporaries of Adafactor: of a run of elements three copies (toolkit/engines/optimizers/adafactor.py)."""
    return 12 * min(UPDATE_CHUNK_ELEMENTS, params.largest_trained)


@dataclass(frozen=True, kw_only=True)
class TorchStates:
    """A PyTorch optimizer over the weights, on every rank or sharded by FSDP2.

    AdamW over fp32 takes 4 + 4 + 8 bytes a parameter.
    """

    weight_bytes: int = 4
    """Bytes of an element of weights, gradients and moments, which all have one dtype."""
    trained_bytes: int = 0
    """Bytes of an element that trains, where it differs (peft keeps adapters in fp32); 0: `weight_bytes`."""
    moments: int = 2
    """Moments that the optimizer keeps of an element: AdamW 2, Lion 1, SGD 0 or, with momentum, 1."""
    in_8_bits: bool = False
    """Whether moments take one byte each, as `moments_8bit` counts them."""
    hidden_in_8_bits: bool = False
    """Whether the moments of decoder layers' matrices alone take one byte each: the 8-bit AdamW of recipes."""
    fp32_embeddings: bool = False
    """Moments of embeddings keep fp32, as the Trainer asks of bitsandbytes (trainer.py, `create_optimizer`)."""
    muon: bool = False
    """torch.optim.Muon for the matrices of decoder layers, which keeps one momentum; `moments` are of all the rest.

    Its update orthogonalizes one matrix at a time: the momentum's step in the weights' dtype, two copies in bf16 and
    two products of its shorter side (torch/optim/_muon.py of 2.13). FSDP2 gathers them: all temporaries are whole.
    """

    factored: bool = False
    """Adafactor: whole rows and columns on every rank, and no moments."""
    gathered_bytes: int = 0
    """Bytes of an element of the weights that FSDP2 gathers; 0 where every rank has all of them.

    One layer is gathered ahead. The root group (embedding, final norm, head) stays gathered from the first layer to the
    last: fully_shard does not shard it again behind the forward pass. Source: PyTorch, torch/distributed/fsdp/
    _fully_shard: _fsdp_state.py (_lazy_init), _fsdp_param_group.py.
    """
    autocast: bool = False
    """Whether products run in 16 bits under torch.autocast."""
    has_buckets: bool = False
    """DDP has buckets of the gradients' whole size besides: gradient_as_bucket_view is off by default."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the weights that a layer computes with, and of activations that autocast leaves."""
        return self.gathered_bytes or self.weight_bytes

    def states(self, params: RankParameters, *, shards: int, accumulation: int = 2) -> ModelStates:
        """Return the states of one rank whose replicas are `shards` ranks, with `accumulation` micro-batches a step."""
        trained_numel = self._trained_numel(params, shards)
        frozen_numel = -(-params.frozen.numel // shards) if self._is_sharded else params.frozen.numel
        # Of the weights that train, and as many of their gradients.
        bytes_of_trained = self._trained_itemsize * trained_numel
        outside = params.numel - sum(params.layer_numels)
        largest_unit = min(max(params.trained_layer, params.largest_trained), params.trained)
        makes_gradients = accumulation == 1 and not self._is_sharded
        return ModelStates(
            resident=StateBytes(
                parameters=bytes_of_trained + self.weight_bytes * frozen_numel,
                optimizer=self._moment_bytes(params, trained_numel, shards),
                buckets=self._trained_itemsize * params.trained if self.has_buckets else 0,
                model_buffers=params.buffer_bytes,
            ),
            accumulated=bytes_of_trained if accumulation > 1 else 0,
            fresh_layer=self._trained_itemsize * params.trained_layer if makes_gradients else 0,
            # A layer's gradients while they are reduce-scattered, as they come and in the weights' dtype.
            buckets=(self.gathered_bytes + self._trained_itemsize) * largest_unit if self._is_sharded else 0,
            gathered=self.gathered_bytes * min(outside + 2 * params.layer_numel, params.numel),
            complete=bytes_of_trained,
            step=bytes_of_trained + self._update_bytes(params),
        )

    @property
    def _is_sharded(self) -> bool:
        """Whether FSDP2 shards weights, gradients and moments."""
        return self.gathered_bytes > 0

    @property
    def _trained_itemsize(self) -> int:
        """Bytes of an element that trains, and of its gradient."""
        return self.trained_bytes or self.weight_bytes

    def _trained_numel(self, params: RankParameters, shards: int) -> int:
        """Return the elements that train which a rank keeps: all of its own, or its shards of them."""
        if not self._is_sharded:
            return params.trained
        # Experts that replicas share out are sharded over those that have the same ones.
        of_experts = [group for group in params.groups if group.ep > 1]
        expert_numel = sum(group.numel for group in of_experts)
        expert_shards = max([1, *(shards // group.ep for group in of_experts)])
        return -(-(params.trained - expert_numel) // shards) + -(-expert_numel // expert_shards)

    def _moment_bytes(self, params: RankParameters, trained_numel: int, shards: int) -> int:
        """Return the bytes of the moments of a rank that keeps so many elements that train."""
        if self.in_8_bits or self.hidden_in_8_bits:
            return self._moments_in_8_bits(params, trained_numel, shards)
        if self.factored:
            return self._trained_itemsize * params.factors
        matrices = 0
        if self.muon:
            matrices = sum(matrix.numel * matrix.count for matrix in params.hidden_matrices)
        if self._is_sharded:
            matrices = -(-matrices // shards)
        return self._trained_itemsize * (self.moments * (trained_numel - matrices) + matrices)

    def _moments_in_8_bits(self, params: RankParameters, trained_numel: int, shards: int) -> int:
        """Return the bytes of moments of which some take one byte an element, and all others fp32."""
        groups = [group for group in params.groups if self.in_8_bits or group.is_hidden]
        runs = [run for group in groups for run in group.runs]
        if self.fp32_embeddings:
            runs = runs[1:]  # the first ones are matrices in front of the layers
        tensors = []
        for sizes, times in runs:
            for size in sizes:
                tensors.append((-(-size // shards) if self._is_sharded else size, times))
        in_fp32 = max(0, trained_numel - sum(size * times for size, times in tensors))
        return moments_8bit(tensors) + 8 * in_fp32

    def _update_bytes(self, params: RankParameters) -> int:
        """Return the bytes of the update's temporaries, beside the gradients."""
        if self.factored:
            return update_of_factored(params)
        if not self.muon:
            return 0
        updates = (
            (self._trained_itemsize + 4) * matrix.numel + 4 * matrix.side**2 for matrix in params.hidden_matrices
        )
        return max(updates, default=0)
