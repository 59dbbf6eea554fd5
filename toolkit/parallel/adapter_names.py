"""Names of parameters where there is LoRA: Hugging Face's for the model's own, those of peft's files for adapters.

peft puts a layer of its own around a linear layer. In the model its parameters are called `q_proj.base_layer.weight`
and `q_proj.lora_A.default.weight`; in files, gradients, comparisons and error messages they have the names below.
"""

from collections.abc import Iterable

ADAPTER = "default"
"""peft's name of a model's only adapter."""
PREFIX = "base_model.model."
"""peft's files name adapters as parameters of a PeftModel, which wraps the model twice."""
_KINDS = ("lora_A", "lora_B", "lora_magnitude_vector")


def saved_name(name: str) -> str:
    """The name in files of a parameter that a module calls `name`."""
    for kind in _KINDS:
        before, separator, after = name.partition(f".{kind}.{ADAPTER}.")
        if separator:
            # peft's magnitude vectors are modules in memory, and tensors in a file.
            if kind == "lora_magnitude_vector":
                return f"{PREFIX}{before}.{kind}"
            return f"{PREFIX}{before}.{kind}.{after}"
    return name.replace(".base_layer.", ".")


def holds_adapters(names: Iterable[str]) -> bool:
    """Whether names in a file are those of adapters, which are never beside others there."""
    return next(iter(names), "").startswith(PREFIX)
