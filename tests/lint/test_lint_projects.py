"""Facts about configs of well-known projects: which key with which value gives which finding."""

from typing import Any

import pytest
from lint_cases import ids, lint

from toolkit.lint import Runner

ACCELERATE = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
FACTS: tuple[tuple[str, dict[str, Any] | str, Runner | None, str, str], ...] = (
    (
        "configs for the Trainer since 2021: a warm-up without its type",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}}},
        "trainer",
        "DS756",
        "warning",
    ),
    ("apex in BERT configs", {"amp": {"enabled": False, "opt_level": "O1"}}, None, "DS104", "error"),
    ("sparse embeddings in the documentation of old", {"sparse_gradients": False}, None, "DS104", "error"),
    ("elastic training", {"elasticity": {"enabled": False}}, None, "DS104", "error"),
    (
        "1-bit Adam of the tutorial",
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4}}},
        None,
        "DS702",
        "error",
    ),
    (
        "clipping within Adam",
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1}}},
        None,
        "DS704",
        "error",
    ),
    (
        "GPT-NeoX: betas with an optimizer that decouples",
        {"optimizer": {"type": "Adam", "params": {"lr": 6e-4, "weight_decay": 0.1}}},
        None,
        "DS703",
        "info",
    ),
    ("Megatron-DeepSpeed: bfloat16", {"bfloat16": {"enabled": True}}, None, "DS108", "warning"),
    ("ZeRO-Offload of 2020", {"zero_optimization": {"stage": 2, "cpu_offload": True}}, None, "DS105", "warning"),
    (
        "saving of 2021",
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        None,
        "DS105",
        "warning",
    ),
    (
        "DeepSpeed-Chat: parameters to the host at stage 2",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        None,
        "DS501",
        "warning",
    ),
    (
        "LLaVA: ZeRO-3 settings at stage 2",
        {"zero_optimization": {"stage": 2, "sub_group_size": 1e8}},
        "trainer",
        "DS111",
        "info",
    ),
    (
        "Alpaca: auto that no one fills",
        {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}},
        "trainer",
        "HF101",
        "error",
    ),
    (
        "cosine as a type of warm-up",
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "cosine", "total_num_steps": "auto"}}},
        "trainer",
        "DS757",
        "warning",
    ),
    (
        "Auto with a capital",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "Auto"}}},
        None,
        "HF107",
        "error",
    ),
    (
        "LLaMA-Factory: DeepSpeed's name in accelerate's section",
        ACCELERATE + "  zero_stage: 3\n  stage3_gather_16bit_weights_on_model_save: true\n",
        None,
        "AC102",
        "warning",
    ),
    (
        "a JSON and its settings in accelerate's file",
        ACCELERATE + "  deepspeed_config_file: x.json\n  zero3_save_16bit_model: true\n",
        None,
        "AC103",
        "error",
    ),
    ("batch sizes as texts", {"train_batch_size": "32", "gradient_accumulation_steps": 1}, None, "DS202", "error"),
    (
        "activation checkpointing that Hugging Face does not read",
        {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
        "accelerate",
        "DS809",
        "info",
    ),
    ("MiCS", {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, None, "DS104", "error"),
    ("a comment as a key", {"zero_optimization": {"stage": 1, "_comment": "ours"}}, None, "DS113", "error"),
    (
        "a cosine of PyTorch",
        {
            "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 2},
        },
        None,
        "DS761",
        "error",
    ),
)


@pytest.mark.parametrize(
    ("example", "runner", "rule", "severity"), [fact[1:] for fact in FACTS], ids=[fact[0] for fact in FACTS]
)
def test_a_config_of_a_project_has_its_finding(
    example: dict[str, Any] | str, runner: Runner | None, rule: str, severity: str
) -> None:
    assert rule in ids(lint(example, runner=runner), severity)


def test_the_auto_config_of_the_trainers_documentation_has_no_error() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert ids(lint(config), "error", "warning") == []
