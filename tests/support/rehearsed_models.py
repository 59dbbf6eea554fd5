"""Models of two layers, as sections of a recipe, for ranks that are rehearsed on tensors without memory."""

from typing import Any

LLAMA: dict[str, Any] = {
    "name_or_path": "llama-tiny",
    "overrides": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "vocab_size": 322,
    },
}
EXPERTS: dict[str, Any] = {
    "name_or_path": "mixtral-8x7b",
    "overrides": {**LLAMA["overrides"], "num_local_experts": 4, "num_experts_per_tok": 4},
}
"""Every token goes to every expert, so that live ranks have as many rows of each as a rehearsal takes."""
