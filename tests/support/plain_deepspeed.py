"""Checkpoints as others write them: a Hugging Face GPT-2 trained by DeepSpeed alone, and what its engine holds."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
Truth = dict[str, dict[str, torch.Tensor]]


def train_and_save(
    folder: str, stage: int, precision: str, tied: bool, settings: dict[str, Any], frozen: str | None
) -> Truth:
    """Three steps with two parameter groups, then `save_checkpoint`; every parameter of the live engine by kind."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    # Odd sizes, so that parameters end in the middle of ranks and parts are padded.
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 33, "vocab_size": 61}
    config = AutoConfig.for_model("gpt2", **sizes, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        parameter.requires_grad = name != frozen
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=_config(stage, precision, settings)
    )
    made = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ids = torch.randint(0, 61, (2, 12), generator=made)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder)
    if dist.get_rank() == 0:
        config.save_pretrained(folder)
    return engine_states(engine, stage)


def _config(stage: int, precision: str, settings: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **settings},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision != "fp32":
        config["bf16"] = {"enabled": True}
    if precision == "bf16, fp32 accumulation":  # DeepSpeed's BF16_Optimizer under ZeRO-1
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def engine_states(engine: Any, stage: int) -> Truth:
    """Return masters and moments of every parameter that trains, whole, by name and kind. A collective call."""
    from deepspeed.utils import safe_get_full_fp32_param

    from toolkit.engines.optimizer_states import deepspeed_states

    # DeepSpeed's own safe_get_full_optimizer_state raises where there are two parameter groups.
    states = deepspeed_states(engine.optimizer, stage, KINDS[1:])
    truth: Truth = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = safe_get_full_fp32_param(parameter)
            values = [master, *(states.read(parameter, kind) for kind in KINDS[1:])]
            truth[name] = {kind: value.clone() for kind, value in zip(KINDS, values, strict=True)}
    return truth


def load_universal(model: Any, folder: str, stage: int) -> Truth:
    """An engine around `model` loads the universal checkpoint in `folder`; what it holds then."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.dim() > 1]},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    config = _config(stage, "fp32", {}) | {"checkpoint": {"load_universal": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return engine_states(engine, stage)


def make_universal(tag: Path) -> Path:
    """What `ds_to_universal` makes of it."""
    from deepspeed.checkpoint import ds_to_universal

    output = tag.with_name(f"{tag.name}_universal")
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(tag), output_folder=str(output), strict=True, inject_missing_state=True, **options
        )
    )
    return output
