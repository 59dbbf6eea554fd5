"""Write toolkit/families/support.json: cut a tiny model of every family of causal LMs, and compare it with the whole.

python docs/generate_families.py [NAME...]

Every check runs in a child of its own, with an end to its memory and its time, so that one bad family stops no other.
With names, those alone are checked and printed, and nothing is written. Takes some minutes.
"""

import os
import resource
import sys
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch.distributed as dist
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.errors import ToolkitError
from toolkit.families.support import PATH, Support, encoded
from toolkit.parallel.family_check import check_pipeline, check_tensor
from toolkit.train.local_ranks import RankFailedError, run_ranks

MEMORY_BYTES = 12 * 2**30
SECONDS = 120
TENSOR_RANKS = 2


def check(model_type: str) -> Support:
    """Both checks of one family."""
    return Support(
        model_type=model_type,
        pipeline_refusal=refusal(1, check_pipeline, model_type),
        tensor_refusal=refusal(TENSOR_RANKS, _check_tensor, model_type),
    )


def check_all(names: Iterable[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) -> dict[str, Support]:
    """Every family, or those of `names`, with a line of progress for each."""
    found = {}
    for name in sorted(names):
        found[name] = support = check(name)
        print(
            f"{name:26} pipeline: {_word(support.pipeline_refusal):60} tensor: {_word(support.tensor_refusal)}",
            flush=True,
        )
    return found


def refusal(world_size: int, function: Callable[[str], None], model_type: str) -> str | None:
    """Why a check on so many ranks fails; None where it does not."""
    try:
        run_ranks(_limited, world_size, function, model_type, timeout_seconds=SECONDS, joined=world_size > 1)
    except ToolkitError as error:
        return getattr(error, "reason", None) or str(error)
    except RankFailedError as error:
        lines = str(error).strip().splitlines()
        return f"the check fails: {lines[-1].strip()}"[:120]
    return None


def _limited(function: Callable[[str], None], model_type: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    transformers.logging.set_verbosity_error()
    function(model_type)


def _check_tensor(model_type: str) -> None:
    group: Any = dist.group.WORLD
    check_tensor(model_type, group)


def _word(reason: str | None) -> str:
    return reason or "exact"


def main(names: list[str]) -> None:
    """Check, and write where nothing was left out."""
    unknown = set(names) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no causal LM of transformers {transformers.__version__}.")
    found = check_all(names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    exact = [sum(s.pipeline for s in found.values()), sum(s.tensor for s in found.values())]
    print(f"of {len(found)} families: {exact[0]} pipeline, {exact[1]} tensor")
    if not names:
        PATH.write_text(encoded(found, transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
