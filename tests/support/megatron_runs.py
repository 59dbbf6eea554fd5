"""Checkpoints as Megatron-Core writes them: trained on CPU ranks by its own pipeline and distributed optimizer.

megatron-core asks CUDA where to put its buffers and which random numbers to use; here it is told the CPU, and there is
no dropout.
"""

import contextlib
import queue
import threading
import warnings
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
TENSOR_PARALLEL = PIPELINE_PARALLEL = 2
"""Ranks that share a layer, and stages."""


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


def train_with_megatron(
    folder: str, family: str, steps: list[torch.Tensor], saved_step: int, vocabulary: int, load: str = ""
) -> list[float]:
    """Train with two stages; `steps`: [samples, s + 1] token ids of each. Return the losses. A collective call.

    Save to `folder` before step `saved_step`. Where `load` names a checkpoint, train nothing: Megatron-Core reads both,
    and what returns is for each tensor of a rank whether the two are equal, as 1.0 or 0.0.
    """
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
        parallel_state.initialize_model_parallel(TENSOR_PARALLEL, PIPELINE_PARALLEL, create_gloo_process_groups=True)
        losses = _train(folder, family, steps, saved_step, vocabulary, load)
    # The losses are known on the last stage alone.
    everyone: list[Any] = [None for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, losses)
    return next(found for found in everyone if found)


def _train(
    folder: str, family: str, steps: list[torch.Tensor], saved_step: int, vocabulary: int, load: str
) -> list[float]:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, config = _model(family, vocabulary)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1, use_distributed_optimizer=True, clip_grad=1.0),
        [wrapped],
    )
    for group in optimizer.param_groups:  # as Megatron-LM's scheduler does: biases and norms do not decay
        group["weight_decay"] *= group["wd_mult"]
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

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    }
    if load:
        wrapped.zero_grad_buffer()
        optimizer.step()  # makes the states that are read into
        found = []
        for place in (folder, load):
            states = model.sharded_state_dict()
            moments = optimizer.sharded_state_dict(states, is_loading=True, metadata=metadata)
            loaded = dist_checkpointing.load({"model": states, "optimizer": moments}, place)
            leaves = tree_leaves((loaded["model"], loaded["optimizer"]["param_state"]))
            found.append([leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return [float(torch.equal(*pair)) for pair in zip(*found, strict=True)]
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
            dist_checkpointing.save(content, folder)
            dist.barrier()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(samples[:, None]),
            model=wrapped,
            num_microbatches=len(samples),
            seq_length=samples.shape[1] - 1,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        if parallel_state.is_pipeline_last_stage():
            losses.append(sum(float(each["loss"]) for each in found) / len(samples))
    return losses


def _model(family: str, vocabulary: int) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_gpt2 = family.startswith("gpt2")
    experts = EXPERTS if family == "mixtral" else None
    functional = torch.nn.functional
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=HEADS if is_gpt2 else GROUPS,
        kv_channels=HIDDEN // HEADS,
        use_cpu_initialization=True,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        pipeline_model_parallel_size=PIPELINE_PARALLEL,
        sequence_parallel=experts is not None,  # which Megatron-Core wants beside experts
        pipeline_dtype=torch.float32,
        gated_linear_unit=not is_gpt2,
        activation_func=functional.gelu if is_gpt2 else functional.silu,
        add_bias_linear=is_gpt2,
        normalization="LayerNorm" if is_gpt2 else "RMSNorm",
        qk_layernorm=family == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=experts,
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
        num_experts=experts, qk_layernorm=family == "qwen3", normalization=config.normalization
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
