"""Configs composed of real keys with values that people write, right and wrong."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import yaml
from lint_cases import ADAMW, TORCH_ADAMW, Config

Z = "zero_optimization"

CHOICES: dict[str, tuple[Any, ...]] = {
    "train_batch_size": (8, "8", "auto", None),
    "train_micro_batch_size_per_gpu": (2, "auto", 2.0),
    "gradient_accumulation_steps": (1, 4, "auto"),
    "gradient_clipping": (1.0, 0.0, "auto", -1, "1.0"),
    "gradient_cliping": (1.0,),
    "steps_per_print": (10, "inf", "auto", 0),
    "wall_clock_breakdown": (False, "false", True),
    "prescale_gradients": (False, True, "false"),
    "communication_data_type": ("fp32", "fp16", "bf16", "bfp16", "FP32"),
    "bf16": ({"enabled": True}, {"enabled": "auto"}, {"enabled": "true"}, True, {"enabled": True, "loss_scale": 0}),
    "bfloat16": ({"enabled": True},),
    "fp16": (
        *({"enabled": False}, {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}, {"fp16": {}}, None),
        *(
            {"enabled": "auto"},
            {"enabled": True, "initial_scale_power": 65536},
            {"enabled": True, "loss_scale_window": 0},
        ),
    ),
    "amp": ({"enabled": False},),
    "gradient_predivide_factor": (1.0, 2.0, "2"),
    "gradient_allreduce_op": ("mean", "sum", "SUM", "avg"),
    "managed_gradient_accumulation": (True, False),
    "sparse_gradients": (False, True),
    "zero_allow_untested_optimizer": (True, False),
    "zero_force_ds_cpu_optimizer": (False, True),
    "torch_autocast": ({"enabled": True, "dtype": "bfloat16"}, {"enabled": True, "dtype": "bf16"}, {"enabled": False}),
    "flops_profiler": ({"enabled": False}, {"enabled": "false"}, False),
    "tensorboard": ({"enabled": False}, {"enabled": False, "log_dir": "x"}),
    "checkpoint": ({"tag_validation": "Warn"}, {"tag_validation": "Stop"}, {"load_universal": False}),
    "compile": ({"deepcompile": False}, {"disable": True}),
    "aio": ({"block_size": 1048576}, {"block_size": "1MB"}),
    "pipeline": ({"stages": 2}, {"pipe_partitioned": True}),
    "elasticity": ({"enabled": False},),
    "curriculum_learning": ({"enabled": False},),
    "sequence_parallel_size": (1, 0, "1"),
    "dump_state": (False, "no"),
    "memory_breakdown": (False,),
    "disable_allgather": (True,),
    "seed": (42,),
    "per_device_train_batch_size": (4,),
    "comment": ("for 8 GPUs",),
    "data_types": (
        *({"grad_accum_dtype": "fp32"}, {"grad_accum_dtype": "bf16"}, {"grad_accum_dtype": "bfloat"}),
        *({"param_dtype": "bf16"}, {"buffer_dtype": "fp32"}, {"keep_in_fp32_modules": ["x"]}),
    ),
    "optimizer": (
        ADAMW,
        TORCH_ADAMW,
        {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        {"type": "AdamW", "params": {"lr": "1e-4"}},
        {"type": "adamW", "lr": 1e-3},
        {"type": "SGD", "params": {"lr": 0.1, "max_grad_norm": 1.0}},
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 1.5}},
        {"type": "Adagrad", "params": {"lr": 0.1}},
        {"type": "RMSprop", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
        {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.999, 0.9], "eps": -1e-8}},
        {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9]}},
        {"type": "AdamW", "params": {"learning_rate": 1e-3}},
        {"type": "AdamW", "params": None},
        {"type": "AdamW"},
    ),
    "scheduler": (
        {"type": "WarmupLR", "params": {"warmup_num_steps": 10.0, "warmup_min_lr": 0}},
        {"type": "warmuplr", "params": {}},
        {"type": "WarmupLR"},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_min_lr": 1e-6}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_steps": 2, "warmup_type": "cosine"}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2, "warmup_type": "cosine"}},
        {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}},
        {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_max_lr": "1e-3"}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}},
        {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
        {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-5}},
        {"params": {"warmup_num_steps": 2}},
    ),
    "overlap_comm": (True,),
    "stage3_gather_16bit_weights_on_model_save": (True,),
    "activation_checkpointing": ({"partition_activations": True}, {"partition_activation": False}),
    "tensor_parallel": ({"autotp_size": 1},),
    f"{Z}.stage": (0, 1, 2, 3, "2", "auto"),
    f"{Z}.overlap_comm": (True, False, "true"),
    f"{Z}.overlap_com": (True,),
    f"{Z}.reduce_bucket_size": (5e8, "auto", "500000000", 0),
    f"{Z}.contiguous_gradients": (True, False),
    f"{Z}.allgather_bucket_size": (2e8, "auto"),
    f"{Z}.cpu_offload": (False, True),
    f"{Z}.offload_optimizer": (
        *(
            {"device": "none"},
            {"device": "cpu"},
            {"device": "cpu", "pin_memory": "true"},
            {"device": "cpu", "ratio": 0.5},
        ),
        *({"device": "cpu", "buffer_size": 1e8}, "cpu"),
    ),
    f"{Z}.offload_param": ({"device": "none"}, {"device": "cpu"}, {"device": "gpu"}, None, True),
    f"{Z}.stage3_max_live_parameters": (1e9, 1e8),
    f"{Z}.max_live_parameters": (1e9,),
    f"{Z}.stage3_gather_fp16_weights_on_model_save": (True, False),
    f"{Z}.sub_group_size": (1e9, 1e6),
    f"{Z}.zero_hpz_partition_size": (1, 8),
    f"{Z}.round_robin_gradients": (True,),
    f"{Z}.bucket_size": (5,),
    f"{Z}.reduce_scatter": (True, False),
    f"{Z}.allgather_partitions": (True, False),
    f"{Z}.stage3_param_persistence_threshold": ("auto", 1e5, 0, 1.5),
    f"{Z}.stage3_prefetch_bucket_size": ("auto", 5e7, 0.9),
    f"{Z}.legacy_stage1": (False, True),
    f"{Z}.elastic_checkpoint": (False, True),
    f"{Z}.ignore_unused_parameters": (True, False),
    f"{Z}.mics_shard_size": (8,),
    f"{Z}.zero_quantized_weights": (False,),
    f"{Z}.compute_grad_norm": (True, False),
    f"{Z}.cpu_offload_params": (True,),
    f"{Z}.aio": ({"block_size": 1},),
}
"""What people write, right and wrong, by key."""
D = "deepspeed_config"
YAML_CHOICES: dict[str, tuple[Any, ...]] = {
    "distributed_type": ("DEEPSPEED", "deepspeed", "DeepSpeed"),
    "mixed_precision": ("bf16", "fp16", "no", False, "bfloat16", "fp32"),
    "num_machines": (1, "1"),
    "machine_ranks": (0,),
    "downcast_bf16": ("no", False),
    "rdzv_backend": ("static", False),
    "fsdp_config": ({}, {"fsdp_sharding_strategy": 1}),
    "dynamo_backend": ("NO",),
    "compute_environment": ("LOCAL_MACHINE", "LOCAL"),
    f"{D}.zero_stage": (0, 1, 2, 3, 4, "2", "zero3"),
    f"{D}.gradient_accumulation_steps": (1, 4, 0, "x"),
    f"{D}.gradient_clipping": (1.0, "1.0", "none", 0.0),
    "num_processes": (1, "1"),
    "machine_rank": (0, "0"),
    f"{D}.offload_optimizer_device": ("none", "gpu"),
    f"{D}.offload_param_device": ("none", "cpu", "disk"),
    f"{D}.zero3_init_flag": (True, False, "true", "maybe"),
    f"{D}.zero3_save_16bit_model": (True, "true", False),
    f"{D}.zero3_save_16bit": (True,),
    f"{D}.zero_optimization": ({"stage": 3},),
    f"{D}.deepspeed_config_file": ("ds.json", "missing.json"),
    f"{D}.deepspeed_multinode_launcher": ("standard",),
}


def composed_yaml(count: int, seed: int) -> Iterator[str]:
    """Yield configs of accelerate."""
    draw = random.Random(seed)
    for _ in range(count):
        config: Config = {"distributed_type": "DEEPSPEED", "num_processes": 1, D: {"zero_stage": draw.choice((2, 3))}}
        for key in draw.sample(sorted(YAML_CHOICES), draw.choice((1, 2, 3, 5))):
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = copy.deepcopy(draw.choice(YAML_CHOICES[key]))
        if draw.random() < 0.5:
            config[D].pop("zero_stage", None)
        yield yaml.safe_dump(config)


def composed(count: int, seed: int) -> Iterator[Config]:
    draw = random.Random(seed)
    for _ in range(count):
        sizes = {"train_batch_size": 8} if draw.random() < 0.6 else {"train_micro_batch_size_per_gpu": "auto"}
        config: Config = {**sizes, Z: {"stage": draw.choice((0, 1, 2, 3))}}
        for key in draw.sample(sorted(CHOICES), draw.choice((1, 2, 3, 5))):
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = copy.deepcopy(draw.choice(CHOICES[key]))
        if draw.random() < 0.2:
            del config[Z]
        yield config
