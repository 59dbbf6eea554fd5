"""What a stage costs: a pipeline of one stage against the same model without a pipeline.

    python benchmarks/stage_overhead.py                 # about three minutes
    python benchmarks/stage_overhead.py --quick         # does it run? The figures mean nothing.
    python benchmarks/stage_overhead.py --save          # also writes benchmarks/results/stage_overhead.md

One process, one thread, fp32: forward, loss and backward of a micro-batch. `one stage` is the PipelineStage with all
layers. `two stages` runs both stages of a pipeline one after the other in the same process: what two preambles cost
(masks, rotary tables), and the stand-ins for the layers of the other stage. The sides take turns.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measure.table import publish, target_met
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from toolkit.model_init.freed_memory import keep_freed_memory
from toolkit.parallel.loss import token_loss_sum
from toolkit.parallel.model_structure import analyze_model
from toolkit.parallel.pipeline.stage import PipelineStage

TARGET = 1.03
SIZES = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 8192}
FAMILIES = {"gpt2": {}, "llama": {"intermediate_size": 1024, "num_key_value_heads": 2}}
SAMPLES, SEQ_LEN = 2, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="turns of each side")
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/stage_overhead.md")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    rows = []
    for family, extra in FAMILIES.items():
        times = measure(family, extra, rounds=2 if options.quick else options.rounds)
        whole = times["whole model"]
        for side, seconds in times.items():
            ratio = statistics.median(own / plain for own, plain in zip(seconds, whole, strict=True))
            rows.append(
                [
                    family,
                    side,
                    f"{statistics.median(seconds) * 1e3:.1f}",
                    f"{ratio:.3f}x",
                    target_met(ratio, TARGET, at_most=True) if side == "one stage" else "",
                ]
            )
    publish(
        "stage_overhead",
        title="A micro-batch through the model, and through stages of it",
        headings=("family", "side", "ms", "ratio", "target"),
        rows=rows,
        text_columns=2,
        notes=[f"6 layers x 256, vocabulary 8,192, {SAMPLES} samples of {SEQ_LEN} tokens. Medians."],
        save=options.save,
    )


def measure(family: str, extra: dict[str, int], *, rounds: int) -> dict[str, list[float]]:
    """Of each side the seconds of each turn."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **extra)).eval()
    structure = analyze_model(model)
    layers = structure.count

    def stages(*bounds: int) -> list[PipelineStage]:
        return [
            PipelineStage(copy.deepcopy(model), structure, bounds=bounds, stages=[number]).eval()
            for number in range(len(bounds) - 1)
        ]

    ids = torch.randint(SIZES["vocab_size"], (SAMPLES, SEQ_LEN))
    one, two = stages(0, layers), stages(0, layers // 2, layers)
    sides: dict[str, Callable[[], None]] = {
        "whole model": lambda: through_model(model, ids),
        "one stage": lambda: through_stages(one, ids),
        "two stages": lambda: through_stages(two, ids),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def through_model(model: PreTrainedModel, ids: torch.Tensor) -> None:
    token_loss_sum(model(input_ids=ids, use_cache=False).logits, ids).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def through_stages(stages: list[PipelineStage], ids: torch.Tensor) -> None:
    sent: list[torch.Tensor] = []
    received: list[torch.Tensor] = []
    inputs = ids
    for stage in stages[:-1]:
        (hidden,) = stage((inputs,))
        inputs = hidden.detach().requires_grad_()
        sent.append(hidden)
        received.append(inputs)
    token_loss_sum(stages[-1]((inputs,)), ids).backward()  # type: ignore[no-untyped-call]
    for hidden, there in zip(reversed(sent), reversed(received), strict=True):
        hidden.backward(there.grad)  # type: ignore[no-untyped-call]
    for stage in stages:
        stage.zero_grad()


if __name__ == "__main__":
    main()
