"""Megatron-Core on CPU ranks: it trains by its own pipeline and distributed optimizer, saves, and loads what we export.

megatron-core asks CUDA where to put its buffers and which random numbers to use; here it is told the CPU, and there is
no dropout.
"""

import contextlib
import queue
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

POSITIONS = 64
HIDDEN, FFN, LAYERS, HEADS, GROUPS, EXPERTS = 32, 64, 4, 4, 2, 4
"""Sizes of the model. Heads have 8 features."""
EXPERT_FFN = 24
"""The width of an expert, in the family where it is another one than that of a dense layer."""


@dataclass(frozen=True, kw_only=True)
class MegatronLayout:
    """Ranks that share a layer, pipeline stages, and ranks that share the experts."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks it takes at least."""
        return self.pp * max(self.tp, self.ep)


TWO_STAGES = MegatronLayout(tp=2, pp=2)
"""The layout in which checkpoints are written."""


METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
"""How Megatron-LM saves an optimizer with `--dist-ckpt-optim-fully-reshardable`."""


class _OnCpu(TorchFunctionMode):
    """Whatever asks for CUDA gets the CPU, and tensors say that they are CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Threads:
    """Stands for multiprocessing: ranks of a test may not start processes, and write their files in threads."""

    Queue = JoinableQueue = queue.Queue

    def Manager(self) -> "_Threads":
        return self

    def Process(self, **given: Any) -> threading.Thread:
        return threading.Thread(**given)


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **given: Any) -> torch.nn.Module:
    """PyTorch's norm, which Megatron-Core refuses beside sequence parallelism, with the mark that its own norms have.

    Gradients of marked weights are summed over tensor-parallel ranks, each of which has other positions.
    """
    norm = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    made = norm(hidden_size, eps=eps)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


def import_megatron() -> None:
    """Import what ranks need, before they are forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing, optimizer, pipeline_parallel  # noqa: F401
        from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401


@contextlib.contextmanager
def _on_cpu(layout: MegatronLayout) -> Iterator[None]:
    """Megatron-Core with this layout over all ranks, told that there is CUDA. A collective call."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    nothing = lambda *given, **named: contextlib.nullcontext()  # noqa: E731
    with (
        warnings.catch_warnings(),
        _OnCpu(),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "synchronize", lambda *given: None),
        patch.object(moe_utils, "te_general_gemm", None, create=True),  # which is missing without Transformer Engine
        patch.object(random.CudaRNGStatesTracker, "fork", nothing),
        patch.object(filesystem_async.mp, "get_context", lambda kind: _Threads()),
        patch.object(WrappedTorchNorm, "__new__", _norm),
    ):
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, create_gloo_process_groups=True
        )
        yield


def train_with_megatron(
    folder: str,
    family: str,
    steps: list[torch.Tensor],
    saved_step: int | None,
    vocabulary: int,
    *,
    load: str = "",
    layout: MegatronLayout = TWO_STAGES,
    metadata: dict[str, Any] = METADATA,
) -> list[float]:
    """Train a model; `steps`: [samples, s + 1] token ids of each. Return the losses. A collective call.

    Save to `folder` before step `saved_step`, in the way that `metadata` says. Where `load` names a checkpoint,
    Megatron-Core begins with its weights and its optimizer, as Megatron-LM does, and raises where a key is missing or
    was not asked for.
    """
    with _on_cpu(layout):
        losses = _train(folder, family, steps, saved_step, vocabulary, load, layout, metadata)
    # The losses are known on the last stage alone.
    everyone: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, losses)
    return next(found for found in everyone if found)


def equal_in_megatron(places: list[str], family: str, vocabulary: int) -> list[bool]:
    """Whether each tensor of this rank's model and optimizer is the same in two checkpoints. A collective call."""
    from megatron.core import dist_checkpointing

    found = []
    with _on_cpu(TWO_STAGES):
        model, _, wrapped, optimizer = _set_up(family, vocabulary, TWO_STAGES)
        _make_states(wrapped, optimizer)
        for place in places:
            states = model.sharded_state_dict()
            moments = optimizer.sharded_state_dict(states, is_loading=True, metadata=METADATA)
            loaded = dist_checkpointing.load({"model": states, "optimizer": moments}, place, strict="raise_all")
            leaves = tree_leaves((loaded["model"], loaded["optimizer"]["param_state"]))
            found.append([leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return [torch.equal(*pair) for pair in zip(*found, strict=True)]


def logits_of_megatron(
    place: str, family: str, ids: torch.Tensor, vocabulary: int, layout: MegatronLayout
) -> torch.Tensor:
    """The logits [batch, s, vocabulary] of a model with the weights of a checkpoint, for ids [batch, s].

    Megatron-Core raises where a key of the model is missing, or one of the checkpoint was not asked for. A collective
    call.
    """
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(samples: Any, model: Any) -> Any:
        each = next(samples)
        length = each.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        output = model(input_ids=each, position_ids=torch.arange(length)[None], attention_mask=mask)
        return output, lambda logits, **named: logits

    with _on_cpu(layout), torch.no_grad():
        model, _ = _model(family, vocabulary, layout)
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, place, strict="raise_all")
        model.load_state_dict(loaded["model"], strict=True)
        model.eval()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([ids]),
            model=model,
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=len(ids),
            forward_only=True,
            collect_non_loss_data=True,
        )
        logits = None
        if parallel_state.is_pipeline_last_stage():
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(found[0]).contiguous()
    everyone: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, logits)
    return next(each for each in everyone if each is not None)


def _set_up(family: str, vocabulary: int, layout: MegatronLayout) -> tuple[Any, Any, Any, Any]:
    """A model, its config, the model with gradients in buffers, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, config = _model(family, vocabulary, layout)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1, use_distributed_optimizer=True, clip_grad=1.0),
        [wrapped],
    )
    for group in optimizer.param_groups:  # as Megatron-LM's scheduler does: biases and norms do not decay
        group["weight_decay"] *= group["wd_mult"]
    return model, config, wrapped, optimizer


def _make_states(wrapped: Any, optimizer: Any) -> None:
    """Take a step without gradients: PyTorch's Adam has no states before, which Megatron-Core then cannot read into."""
    wrapped.zero_grad_buffer()
    optimizer.step()


@contextlib.contextmanager
def _counts_kept() -> Iterator[None]:
    """Give each parameter its own count of updates as Megatron-Core sets its states.

    Without Transformer Engine and Apex (0.16.1) it makes one tensor of the count in the parameter groups, which all
    parameters then count up, and looks for another one among the stored tensors, where it writes none: it cannot go
    on with its own checkpoints either.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_all(self: Any, parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][place]
        state = self.optimizer.state[main]
        state["step"] = state["step"].clone()
        set_states(self, parameter, tensors | {"step": state["step"]})

    with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_all):
        yield


def _load(place: str, model: Any, optimizer: Any) -> None:
    """Load weights and optimizer in the order of Megatron-LM, as the checkpoint says that they are stored."""
    from megatron.core import dist_checkpointing

    common = dist_checkpointing.load_common_state_dict(place)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    states = model.sharded_state_dict()
    content = {"model": states}
    content["optimizer"] = optimizer.sharded_state_dict(states, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(content, place, strict="raise_all")
    model.load_state_dict(loaded["model"], strict=True)
    with _counts_kept():
        optimizer.load_state_dict(loaded["optimizer"])


def _train(
    folder: str,
    family: str,
    steps: list[torch.Tensor],
    saved_step: int | None,
    vocabulary: int,
    load: str,
    layout: MegatronLayout,
    metadata: dict[str, Any],
) -> list[float]:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, config, wrapped, optimizer = _set_up(family, vocabulary, layout)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    losses = []

    def forward(samples: Any, model: Any) -> Any:
        ids = next(samples)
        length = ids.shape[1] - 1
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        positions = torch.arange(length)[None]
        output = model(input_ids=ids[:, :-1], position_ids=positions, attention_mask=mask, labels=ids[:, 1:])
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    if load:
        _make_states(wrapped, optimizer)
        _load(load, model, optimizer)
    replicas = parallel_state.get_data_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank()
    for number, samples in enumerate(steps):
        if number == saved_step:
            states = model.sharded_state_dict()
            content = {
                "iteration": number,
                "model": states,
                "optimizer": optimizer.sharded_state_dict(states, metadata=metadata),
            }
            if dist.get_rank() == 0:
                Path(folder).mkdir(parents=True)
            dist.barrier()
            dist_checkpointing.save(content, folder, content_metadata=metadata)
            dist.barrier()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        mine = samples.chunk(replicas)[replica]
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(mine[:, None]),
            model=wrapped,
            num_microbatches=len(mine),
            seq_length=samples.shape[1] - 1,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        if parallel_state.is_pipeline_last_stage():
            loss = sum(float(each["loss"]) for each in found) / len(samples)
            everyone: list[Any] = [None for _ in range(replicas)]
            dist.all_gather_object(everyone, loss, group=parallel_state.get_data_parallel_group())
            losses.append(sum(everyone))
    return losses


def _model(family: str, vocabulary: int, layout: MegatronLayout) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_gpt2 = family.startswith("gpt2")
    has_query_norms = family.startswith("qwen3")
    experts = EXPERTS if family in ("mixtral", "qwen3_moe") else None
    functional = torch.nn.functional
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=HEADS if is_gpt2 else GROUPS,
        kv_channels=HIDDEN // HEADS,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=experts is not None and layout.tp > 1,  # which Megatron-Core wants beside experts
        pipeline_dtype=torch.float32,
        gated_linear_unit=not is_gpt2,
        activation_func=functional.gelu if is_gpt2 else functional.silu,
        add_bias_linear=is_gpt2,
        add_qkv_bias=family == "qwen2",
        normalization="LayerNorm" if is_gpt2 else "RMSNorm",
        qk_layernorm=has_query_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=experts,
        moe_ffn_hidden_size=EXPERT_FFN if family == "qwen3_moe" else None,
        moe_token_dispatcher_type="allgather",
        moe_aux_loss_coeff=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=has_query_norms, normalization=config.normalization
    )
    torch.manual_seed(1)
    build = partial(GPTModel, config, spec, vocab_size=vocabulary, max_sequence_length=POSITIONS)
    model = build(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=family == "gpt2-tied",
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
    )
    return model, config
