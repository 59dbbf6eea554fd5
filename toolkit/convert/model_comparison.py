"""Comparing two model directories by what transformers computes with them.

An exported model of lower precision differs from its source by rounding, and must not differ otherwise. So the source
is loaded a second time and its weights are rounded in memory; the exported model must then agree in every logit, and in
the greedily decoded text. All arithmetic is fp32.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.convert.export_model import has_tokenizer
from toolkit.errors import CheckpointError
from toolkit.files import reason_of

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
_PROMPT_TOKENS = 32
_NEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """A source and its export, on one prompt.

    `logit_difference`: the largest absolute one. `unexplained_difference`: that to the source with rounded weights.
    """

    logit_difference: float
    largest_logit: float
    unexplained_difference: float
    is_same_text: bool
    is_text_explained: bool

    @property
    def is_explained(self) -> bool:
        """Whether rounding to the dtype is the only difference."""
        return self.unexplained_difference == 0 and self.is_text_explained


def compare_models(source: Path, exported: Path, *, dtype: torch.dtype | None) -> ModelComparison:
    """Load both models and compare them. `dtype`: what the exported weights were rounded to. Raises CheckpointError."""
    ids = _prompt(source)
    logits, text = _output(exported, ids, None)
    original, original_text = _output(source, ids, None)
    rounded, rounded_text = _output(source, ids, dtype)
    return ModelComparison(
        logit_difference=_largest(logits - original),
        largest_logit=_largest(original),
        unexplained_difference=_largest(logits - rounded),
        is_same_text=text == original_text,
        is_text_explained=text == rounded_text,
    )


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if not bool(values.isnan().any()) else float("inf")


def _prompt(folder: Path) -> torch.Tensor:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder).get_text_config()
    ids: list[int] = []
    if has_tokenizer(folder):
        ids = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    room = getattr(config, "max_position_embeddings", None) or _PROMPT_TOKENS + _NEW_TOKENS
    ids = [token % config.vocab_size for token in ids or range(1, _PROMPT_TOKENS)]
    return torch.tensor([ids[: max(1, min(_PROMPT_TOKENS, room // 2))]])


def _output(folder: Path, ids: torch.Tensor, dtype: torch.dtype | None) -> tuple[torch.Tensor, list[int]]:
    """Compute logits and greedily decoded text. `dtype`: round the weights to it first."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it ({reason_of(error)}).") from error
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        raise CheckpointError(f"{folder}: transformers does not find the expected weights ({wrong[0]}).")
    model.eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():  # only what is stored; rotary frequencies are not
            if dtype is not None and tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
        logits = model(input_ids=ids, use_cache=False).logits
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        new = _NEW_TOKENS if room is None else max(1, min(_NEW_TOKENS, room - ids.shape[1]))
        for _ in range(new):  # not generate(), which follows the generation config and may sample
            following = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, following), dim=1)
    return logits, ids[0].tolist()
