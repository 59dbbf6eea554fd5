"""Write toolkit/families/support.json: cut a tiny model of every family of causal LMs, and compare it with the whole.

python docs/generate_families.py [NAME...]

Every check runs in a child of its own, with an end to its memory and its time, so that one bad family stops no other.
With names, those alone are checked and printed, and nothing is written. Takes some minutes.
"""

import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch.distributed as dist
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.errors import ToolkitError
from toolkit.families.support import PATH, Support, encoded
from toolkit.families.tiny import other_choices
from toolkit.parallel.family_check import check_pipeline, check_tensor
from toolkit.train.local_ranks import RankFailedError, run_ranks

MEMORY_BYTES = 12 * 2**30
SECONDS = 120
TENSOR_RANKS = (2, 4)


def check(model_type: str) -> Support:
    """All checks of one family."""
    pipeline = refusal(1, check_pipeline, model_type)
    # Starting ranks takes longer than most checks: only where one of them fails, it is asked which.
    tensor = sequence = _first_refusal(_check_both, model_type)
    if sequence:
        tensor = _first_refusal(_check_tensor, model_type)
    return Support(
        model_type=model_type, pipeline_refusal=pipeline, tensor_refusal=tensor, sequence_refusal=tensor or sequence
    )


def check_all(names: Iterable[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) -> dict[str, Support]:
    """Every family, or those of `names`, with a line of progress for each."""
    found = {}
    for name in sorted(names):
        found[name] = support = check(name)
        print(
            f"{name:26} pipeline: {_word(support.pipeline_refusal):60} tensor: {_word(support.tensor_refusal):60} "
            f"sequence: {_word(support.sequence_refusal)}",
            flush=True,
        )
    return found


def refusal(world_size: int, function: Callable[[str], None], model_type: str) -> str | None:
    """Why a check on so many ranks fails; None where it does not."""
    try:
        run_ranks(_limited, world_size, function, model_type, timeout_seconds=SECONDS, joined=world_size > 1)
    except ToolkitError as error:
        return getattr(error, "reason", None) or str(error) or "refused without a reason"
    except RankFailedError as error:
        lines = str(error).strip().splitlines()
        return f"the check fails: {lines[-1].strip()}"[:120]
    return None


def _limited(function: Callable[[str], None], model_type: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    function(model_type)


def _first_refusal(function: Callable[[str], None], model_type: str) -> str | None:
    return next(filter(None, (refusal(ranks, function, model_type) for ranks in TENSOR_RANKS)), None)


def _check_both(model_type: str) -> None:
    _check_tensor(model_type)
    _check_sequence(model_type)


def _check_tensor(model_type: str) -> None:
    """With the family's defaults, and with other ties and biases."""
    group: Any = dist.group.WORLD
    check_tensor(model_type, group)
    check_tensor(model_type, group, changes=other_choices(model_type))


def _check_sequence(model_type: str) -> None:
    group: Any = dist.group.WORLD
    check_tensor(model_type, group, sequence_parallel=True, changes=other_choices(model_type))


def _word(reason: str | None) -> str:
    return reason or "exact"


def main(names: list[str]) -> None:
    """Check, and write where nothing was left out."""
    unknown = set(names) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no causal LM of transformers {transformers.__version__}.")
    found = check_all(names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    pipeline, tensor, sequence = (
        sum(getattr(support, cut) for support in found.values()) for cut in ("pipeline", "tensor", "sequence")
    )
    print(f"of {len(found)} families: {pipeline} pipeline, {tensor} tensor, {sequence} sequence")
    if not names:
        PATH.write_text(encoded(found, transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
