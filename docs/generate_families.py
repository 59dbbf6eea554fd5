"""Write toolkit/models/support.json: partition a tiny model of every causal LM family; compare it with the whole one.

python docs/generate_families.py [NAME...]

Every check runs in a child process with limits of memory and time, so that one bad family does not stop the others.
With names, only those are checked and printed, and nothing is written. Takes some minutes.
"""

import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
import torch.distributed as dist
import transformers
from family_check import (
    check_autocast,
    check_context,
    check_fsdp,
    check_pipeline,
    check_rounded,
    check_tensor,
    find_logits,
)
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.errors import ToolkitError
from toolkit.launch.local_ranks import RankFailedError, run_ranks
from toolkit.models.support import EXPERT_KINDS, KINDS, PATH, Support, encoded
from toolkit.parallel.tiny_model import default_config, tiny_config

MEMORY_BYTES = 12 * 2**30
SECONDS = 300
TENSOR_RANKS = (2, 4)


def check(model_type: str) -> Support:
    """Run all checks of one family."""
    refusals = {"pipeline": refusal(1, check_pipeline, model_type)}
    kinds = ("tensor", "sequence", *(EXPERT_KINDS if has_experts(model_type) else ()))
    if refusals["pipeline"]:
        # Tensor parallelism needs the same structure; experts that replicas share out do not.
        refusals |= dict.fromkeys(kinds, refusals["pipeline"])
        if "ep" in kinds:
            refusals["ep"] = refusal(2, _check_ep, model_type)
    else:
        # Starting ranks takes longer than most checks, so all run in one start, and alone only if one of them fails.
        together = _check_with_experts if "ep" in kinds else _check_both
        refused = _first_refusal(together, model_type)
        for kind in kinds:
            found = _first_refusal(_CHECKS[kind], model_type) if refused else None
            refusals[kind] = found if kind == "ep" else refusals.get("tensor") or found
    refusals["context"] = refusal(2, _check_context, model_type)
    rounds_buffers = False
    found: list[str] = []
    refusals["loss"] = refusal(1, find_logits, model_type, found)
    if not (refusals["loss"] or "").startswith(("no tiny", "the check fails")):
        refusals |= other_refusals(model_type)
        rounds_buffers = refusals["rounded"] is None and needs_rounded_buffers(model_type)
    return Support(
        model_type=model_type,
        attention=attention(model_type),
        rounds_buffers=rounds_buffers,
        logits="".join(found),
        **{f"{kind}_refusal": reason for kind, reason in refusals.items()},
    )


def other_refusals(model_type: str) -> dict[str, str | None]:
    """Why a family does not run in 16 bits or cannot be sharded by FSDP."""
    checks = {"rounded": check_rounded, "autocast": check_autocast, "fsdp": check_fsdp}
    return {kind: refusal(1, function, model_type) for kind, function in checks.items()}


def needs_rounded_buffers(model_type: str) -> bool:
    """Whether a family runs with weights in 16 bits only if its buffers are too."""
    return refusal(1, partial(check_rounded, buffers=False), model_type) is not None


def has_experts(model_type: str) -> bool:
    """Whether the tiny model is a mixture of experts."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    except Exception:
        return False  # what its checks find too, with the reason
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def attention(model_type: str) -> tuple[str, ...]:
    """The implementations that the family's class declares."""
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    declared = {"sdpa": model._supports_sdpa, "flash": model._supports_flash_attn}
    return ("eager", *(kind for kind, is_there in declared.items() if is_there))


def check_all(names: Iterable[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) -> dict[str, Support]:
    """Check every family, or those of `names`, and print a line of progress for each."""
    found = {}
    for name in sorted(names):
        found[name] = support = check(name)
        print(f"{name:26}", *(f"{kind}: {support.refusal(kind) or 'exact':20}" for kind in support.kinds), flush=True)
    return found


def refusal(
    world_size: int, function: Callable[[str], Any], model_type: str, found: list[Any] | None = None
) -> str | None:
    """Run a check on so many ranks; return why it fails, or None. `found` gets what the first rank returned."""
    try:
        joined = world_size > 1
        results = run_ranks(_limited, world_size, function, model_type, timeout_seconds=SECONDS, joined=joined)
        if found is not None:
            found.append(results[0])
    except ToolkitError as error:
        return error.as_refusal().reason or "refused without a reason"
    except RankFailedError as error:
        lines = str(error).strip().splitlines()
        return f"the check fails: {lines[-1].strip()}"[:120]
    return None


def _limited(function: Callable[[str], Any], model_type: str) -> Any:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    return function(model_type)


def _first_refusal(function: Callable[[str], None], model_type: str) -> str | None:
    return next(filter(None, (refusal(ranks, function, model_type) for ranks in TENSOR_RANKS)), None)


def _check_both(model_type: str) -> None:
    _check_tensor(model_type)
    _check_sequence(model_type)


def _check_with_experts(model_type: str) -> None:
    _check_both(model_type)
    _check_inner(model_type)
    _check_ep(model_type)


def _check_tensor(model_type: str) -> None:
    """Check the family's defaults, and other choices of ties and biases."""
    group: Any = dist.group.WORLD
    check_tensor(model_type, group)
    check_tensor(model_type, group, changes=_other_choices(model_type))


def _check_sequence(model_type: str) -> None:
    group: Any = dist.group.WORLD
    check_tensor(model_type, group, sequence_parallel=True, changes=_other_choices(model_type))


def _check_inner(model_type: str) -> None:
    group: Any = dist.group.WORLD
    check_tensor(model_type, group, inner=True)
    check_tensor(model_type, group, inner=True, sequence_parallel=True, changes=_other_choices(model_type))


def _check_ep(model_type: str) -> None:
    """Two replicas that shard the experts, of one or two tensor-parallel ranks."""
    group, replicas = _axes(tp=dist.get_world_size() // 2)
    check_tensor(model_type, group, expert=replicas)
    is_sharded = group.size() > 1
    check_tensor(model_type, group, expert=replicas, sequence_parallel=is_sharded, changes=_other_choices(model_type))


def _check_context(model_type: str) -> None:
    """Let two ranks share sequences, with both ways to exchange keys and values."""
    group: Any = dist.group.WORLD
    check_context(model_type, group)
    check_context(model_type, group, exchange="ring")


def _axes(*, tp: int) -> tuple[Any, Any]:
    """The tensor-parallel group of this rank, and that of its replicas."""
    ranks = range(dist.get_world_size())
    tensor, _ = dist.new_subgroups(tp)
    replicas, _ = dist.new_subgroups_by_enumeration([[*ranks[first::tp]] for first in range(tp)])
    return tensor, replicas


def _other_choices(model_type: str) -> dict[str, Any]:
    """Return changes to a tiny config: tie or untie the embedding, and enable all disabled biases."""
    given = default_config(model_type).to_dict()
    biases = {name: True for name, value in given.items() if "bias" in name and value is False}
    tied = {"tie_word_embeddings": not given["tie_word_embeddings"]} if "tie_word_embeddings" in given else {}
    return biases | tied


_CHECKS = {"tensor": _check_tensor, "sequence": _check_sequence, "inner": _check_inner, "ep": _check_ep}


def main(names: list[str]) -> None:
    """Check the families; write the file if all were checked."""
    unknown = set(names) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no causal LM of transformers {transformers.__version__}.")
    found = check_all(names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    counts = (f"{sum(support.supports(kind) for support in found.values())} {kind}" for kind in (*KINDS, *EXPERT_KINDS))
    print(f"of {len(found)} families:", ", ".join(counts))
    if not names:
        PATH.write_text(encoded(found, transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
