"""Document masking (data.document_masking=true): can this model keep packed documents apart?

transformers masks other documents where position_ids restart inside a row, but only if a family passes them to the
function that creates its masks. Some accept position_ids and do not (OPT, Falcon, GPT-OSS): they would silently attend
across documents. So the forward pass is traced, on the meta device, to where the masks are created.
"""

import copy
import inspect
import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, masking_utils

from toolkit.config.recipe import ModelSection
from toolkit.errors import ModelError, Setting
from toolkit.model_init.new_tokens import without_padding_token

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_ATTENTION_FIELD = "model.attn_implementation"
_MASKING: tuple[Setting, Setting] = (("data.document_masking", True), ("data.document_masking", False))
_PATCHING = threading.Lock()


def check_document_masking(
    section: ModelSection,
    config: PretrainedConfig,
    *,
    masking: tuple[Setting, Setting] = _MASKING,
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError where documents of one row would see each other."""
    asked, off = masking
    if section.attention not in ("eager", "sdpa", "blocks", None):
        settings = (asked, (_ATTENTION_FIELD, section.attn_implementation))
        reason = "only sdpa, eager and blocks keep documents apart in every micro-batch"
        raise ModelError.between(settings, reason, (_ATTENTION_FIELD, "sdpa"), off)
    if obstacle := _obstacle(config, trust_remote_code):
        reason = f"{config.model_type} {obstacle}, so documents would see each other (llama and gpt2 can)"
        advice = "" if off[0] == "data.packing" else "data.packing=padded without it"
        raise ModelError.between((asked, ("model.name_or_path", section.name_or_path)), reason, off, advice)


def _obstacle(config: PretrainedConfig, trust_remote_code: bool) -> str | None:
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if layer_types - _ATTENTION:
        return f"has layers of type {', '.join(sorted(layer_types - _ATTENTION))}, which carry state along the row"
    # GPT-2 would search the ids for a padding token, and meta tensors have no values.
    config = without_padding_token(copy.deepcopy(config))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError, KeyError):
        return None  # build_model reports what is wrong with it
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "takes no position_ids"
    if not _masks_by_position(model):
        return "does not pass position_ids to its attention mask"
    return None


def _masks_by_position(model: PreTrainedModel) -> bool:
    """Whether transformers searches the position_ids passed to `model` for packed documents."""

    def detect(position_ids: Any) -> None:
        raise _DetectedError  # leaves the forward pass: meta tensors have no values to search

    position_ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with _PATCHING, torch.no_grad():
        original = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = detect
        try:
            model(input_ids=position_ids, position_ids=position_ids, use_cache=False)
        except _DetectedError:
            return True
        except Exception:  # something that meta tensors do not support, before any mask was created
            return False
        finally:
            masking_utils.find_packed_sequence_indices = original
    return False


class _DetectedError(Exception):
    """transformers searched for packed documents."""
