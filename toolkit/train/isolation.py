"""Isolation: can this model keep packed documents apart (data.packing=isolated)?

transformers masks other documents when position_ids start anew inside a row, but only where a family hands them to its
masks. Some take position_ids and do not (OPT, Falcon, GPT-OSS): they would attend across documents without a word. So
the forward pass is followed, on the meta device, to where the masks are made.
"""

import contextlib
import copy
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, masking_utils

from toolkit.errors import ModelError
from toolkit.recipe import ModelSection

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_PATCHING = threading.Lock()


def check_isolation(section: ModelSection, config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise ModelError where documents of one row would see each other."""
    if section.attn_implementation not in ("eager", "sdpa"):
        raise ModelError(
            f"data.packing=isolated with model.attn_implementation={section.attn_implementation}: only sdpa and eager "
            "keep documents apart in every micro-batch. Set model.attn_implementation=sdpa, or data.packing=packed."
        )
    reason = _obstacle(config, trust_remote_code)
    if reason:
        raise ModelError(
            f"data.packing=isolated: {section.name_or_path} ({config.model_type}) {reason}, so documents would see "
            "each other. Families such as llama and gpt2 can. Set data.packing to packed or padded."
        )


def _obstacle(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if layer_types - _ATTENTION:
        return f"has layers of type {', '.join(sorted(layer_types - _ATTENTION))}, which carry a state along the row"
    config = copy.deepcopy(config)
    config.pad_token_id = None  # with one, GPT-2 looks for it among the ids, and meta tensors have no values
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError, KeyError):
        return None  # build_model will say what is wrong with it
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids"
    if not _masks_by_position(model):
        return "does not hand position_ids to its attention mask"
    return None


def _masks_by_position(model: PreTrainedModel) -> bool:
    """Whether transformers looks for packed documents in the position_ids that `model` is given."""
    position_ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with _detector_that_raises(), torch.no_grad():
        try:
            model(input_ids=position_ids, position_ids=position_ids, use_cache=False)
        except _DetectedError:
            return True
        except Exception:  # whatever meta tensors cannot do, the masks were not reached
            return False
    return False


class _DetectedError(Exception):
    """transformers looks for packed documents."""


@contextlib.contextmanager
def _detector_that_raises() -> Iterator[None]:
    """Ends a forward pass there: meta tensors have no values that could be looked at."""

    def detect(position_ids: Any) -> None:
        raise _DetectedError

    with _PATCHING:
        original = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = detect
        try:
            yield
        finally:
            masking_utils.find_packed_sequence_indices = original
