"""Comparing two model directories by what transformers computes with them.

An exported model of lower precision differs from its source by rounding, and must not differ otherwise. So the source
is loaded a second time and its weights are rounded in memory; the exported model must then agree in every logit, and in
the greedily decoded text. All arithmetic is fp32.

LoRA's adapters are loaded by peft, beside the model that they were trained beside, and are compared in the same way.
Where an export has merged them into that model, peft merges them as well, and its sums are rounded. Its products are
summed in another order, so that a weight between two values may be rounded to the other one of them: the two models
then differ by less than rounding changes the source.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import MODEL
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.convert.adapters import base_of, has_adapters, load_adapted
from toolkit.convert.export_model import has_tokenizer
from toolkit.convert.loaded_model import load_model
from toolkit.errors import CheckpointError
from toolkit.files import reason_of
from toolkit.parallel.adapter_names import saved_name

PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
_PROMPT_TOKENS = 32
_NEW_TOKENS = 32


_ORDERS = 4.0
"""Differences that other orders of summation make are within so many times the one that is measured."""


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """A source and its export, on one prompt.

    `logit_difference`: the largest absolute one. `unexplained_difference`: that to the source with rounded weights.
    `rounding`: how much of the latter rounding of sums explains; 0 where nothing was added.
    """

    logit_difference: float
    largest_logit: float
    unexplained_difference: float
    is_same_text: bool
    is_text_explained: bool
    rounding: float = 0.0

    @property
    def is_explained(self) -> bool:
        """Whether rounding to the dtype is the only difference."""
        return self.unexplained_difference <= self.rounding and self.is_text_explained


def compare_models(source: Path, exported: Path, *, dtype: torch.dtype | None) -> ModelComparison:
    """Load both models and compare them. `dtype`: what the exported weights were rounded to.

    Raises CheckpointError, and RunError where peft has to load adapters and is not installed.
    """
    base = base_of(source) if has_adapters(source) else source
    is_merged = has_adapters(source) and not has_adapters(exported)
    ids = _prompt(source, base)
    logits, text = _output(_load(exported, base), ids)
    original, original_text = _output(_load(source, base), ids)
    reference = _load(source, base)
    if is_merged:
        reference = reference.merge_and_unload()
    merged, _ = _output(reference, ids, greedy=False)
    _round(reference, dtype)
    rounded, rounded_text = _output(reference, ids)
    rounding = max(_largest(rounded - merged), _ORDERS * _largest(merged - original)) if is_merged else 0.0
    unexplained = _largest(logits - rounded)
    return ModelComparison(
        logit_difference=_largest(logits - original),
        largest_logit=_largest(original),
        unexplained_difference=unexplained,
        is_same_text=text == original_text,
        # Two tokens may have almost the same logit, and sums in another order then choose the other one.
        is_text_explained=text == rounded_text or (is_merged and unexplained <= rounding),
        rounding=rounding,
    )


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if not bool(values.isnan().any()) else float("inf")


def _prompt(folder: Path, base: Path) -> torch.Tensor:
    """Token ids for the model in `base`, by the tokenizer in `folder` where that has one."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(base).get_text_config()
    ids: list[int] = []
    if has_tokenizer(folder):
        ids = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    room = getattr(config, "max_position_embeddings", None) or _PROMPT_TOKENS + _NEW_TOKENS
    ids = [token % config.vocab_size for token in ids or range(1, _PROMPT_TOKENS)]
    return torch.tensor([ids[: max(1, min(_PROMPT_TOKENS, room // 2))]])


def _load(folder: Path, base: Path) -> Any:
    """The model in `folder`, or the adapters in it beside the model in `base`, in fp32."""
    if not has_adapters(folder):
        return load_model(folder, unexpected=False, dtype=torch.float32)
    try:
        return _load_adapters(folder, base)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: peft cannot load it ({reason_of(error)}).") from error


def _load_adapters(folder: Path, base: Path) -> Any:
    """The adapters of a folder, which must be all that peft expects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of adapters that are missing, which is said below
        model = load_adapted(folder, base, dtype=torch.float32)
    from peft import get_peft_model_state_dict

    wrong = sorted(get_peft_model_state_dict(model).keys() ^ CheckpointReader(folder).specs[MODEL].keys())
    if wrong:
        raise CheckpointError(f"{folder}: peft does not find the expected adapters ({wrong[0]}).")
    return model.eval()


def _round(model: Any, dtype: torch.dtype | None) -> None:
    """Round what an export writes: all that is stored, or where there are adapters those alone."""
    if dtype is None:
        return
    state = model.state_dict()  # without rotary frequencies, which are not stored
    adapters = {name for name in state if saved_name(name) != name.replace(".base_layer.", ".")}
    for name, tensor in state.items():
        if tensor.is_floating_point() and (name in adapters or not adapters):
            tensor.copy_(tensor.to(dtype))


@torch.no_grad()
def _output(model: Any, ids: torch.Tensor, *, greedy: bool = True) -> tuple[torch.Tensor, list[int]]:
    """Compute the logits of a prompt, and with `greedy` the greedily decoded text."""
    logits = model(input_ids=ids, use_cache=False).logits
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    new = _NEW_TOKENS if room is None else max(1, min(_NEW_TOKENS, room - ids.shape[1]))
    for _ in range(new if greedy else 0):  # not generate(), which follows the generation config and may sample
        following = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, following), dim=1)
    return logits, ids[0].tolist()
