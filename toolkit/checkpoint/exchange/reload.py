"""Does transformers compute the same with two model directories?

An exported model of fewer bits differs from its source, by rounding and by nothing else. So the source is loaded a
second time, its weights are rounded in memory, and this is what the exported one must equal: every logit, and the text
that greedy decoding writes. All arithmetic is fp32.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint.exchange.companions import has_tokenizer
from toolkit.errors import CheckpointError

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
_PROMPT_TOKENS = 32
_NEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of a source and what was made of it, on one prompt.

    `logit_difference`: largest, absolute. `unexplained_difference`: what rounding the source's weights leaves of it.
    """

    logit_difference: float
    largest_logit: float
    unexplained_difference: float
    is_same_text: bool
    is_text_explained: bool

    @property
    def is_explained(self) -> bool:
        """Whether rounding to the dtype is all that differs."""
        return self.unexplained_difference == 0 and self.is_text_explained


@dataclass(frozen=True, kw_only=True)
class _Answer:
    logits: torch.Tensor
    text: list[int]


def same_as(source: Path, exported: Path, *, dtype: torch.dtype | None) -> Comparison:
    """Load both and compare. `dtype`: what the exported weights were rounded to. Raises CheckpointError."""
    ids = _prompt(source)
    ours = _answer(exported, ids, None)
    theirs = _answer(source, ids, None)
    rounded = _answer(source, ids, dtype)
    return Comparison(
        logit_difference=_largest(ours.logits - theirs.logits),
        largest_logit=_largest(theirs.logits),
        unexplained_difference=_largest(ours.logits - rounded.logits),
        is_same_text=ours.text == theirs.text,
        is_text_explained=ours.text == rounded.text,
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


def _answer(folder: Path, ids: torch.Tensor, dtype: torch.dtype | None) -> _Answer:
    """Logits and greedy text. `dtype`: round the weights to it first."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder}: transformers cannot load it ({first}).") from error
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        raise CheckpointError(f"{folder}: transformers does not find the weights it expects ({wrong[0]}).")
    model.eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():  # what is stored; rotary frequencies are not
            if dtype is not None and tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
        logits = model(input_ids=ids, use_cache=False).logits
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        new = _NEW_TOKENS if room is None else max(1, min(_NEW_TOKENS, room - ids.shape[1]))
        written = _greedy(model, ids, new)
    return _Answer(logits=logits, text=written)


def _greedy(model: torch.nn.Module, ids: torch.Tensor, count: int) -> list[int]:
    # By hand: generate() follows the generation config, which may sample.
    for _ in range(count):
        following = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, following), dim=1)
    return [int(token) for token in ids[0]]
