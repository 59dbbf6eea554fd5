"""Activation memory by how it is saved: peaks of live passes on this CPU, and the longest sequence, estimated.

    python benchmarks/activations.py
    python benchmarks/activations.py --save       # writes results/activations.md

A Llama of 12 layers runs forward and backward in fp32. Counted are storages that live on the "device": on a CPU
host memory is the same memory, so what offloading puts there is counted apart (tests/support/allocations.py). CPU
time is of a pass, as a ratio to the plain one; copies to the host are then plain ones, which a GPU makes beside its
kernels.
The second table has no measurement: it asks the estimate of `dstk memory` for ever longer sequences.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
from allocations import DeviceBytes  # type: ignore[import-not-found]
from measure.table import Sheet, publish_all
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from toolkit.config.layout import Layout
from toolkit.config.strategy import Strategy
from toolkit.hardware import gpu
from toolkit.model_init.model_modules import decoder_layers
from toolkit.model_init.offload_activations import TRANSFERS, offload_activations
from toolkit.model_init.recompute import recompute
from toolkit.model_init.tiled_mlp import tile_mlps
from toolkit.planner.run_memory import memory_request, recipe_of

WAYS = (
    *("none", "selective", "every2", "recompute", "offacts", "recompute-offacts", "tiled", "recompute-tiled-offacts"),
)
"""In the words of a strategy."""
SEQ_LEN, ROUNDS = 512, 3
MODEL, GPU, RANKS, STEP = "llama-3.1-8b", "H100", 8, 8192
LONG = ("none", "recompute", "recompute-tiled", "recompute-offacts", "recompute-tiled-offacts")


def main() -> None:
    """Print the tables, and save them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/activations.md")
    parser.add_argument("--measured", action="store_true", help="only the first table")
    options = parser.parse_args()
    sheets = [
        Sheet(
            title=f"Measured: Llama, 12 layers, hidden 256, MLP 704, one sample of {SEQ_LEN} tokens, fp32",
            headings=["way", "peak, MiB", "of none", "to the host, MiB", "CPU time, of none"],
            rows=measured(),
        )
    ]
    if not options.measured:
        sheets.append(
            Sheet(
                title=f"Estimated: longest sequence, {MODEL} on {RANKS} {GPU}, Ulysses {RANKS}, ZeRO-3, chunked loss",
                headings=["way", "tokens", "of none"],
                rows=longest(),
            )
        )
    notes = [
        "Peaks are of tensors between operations, beside parameters and their gradients; the loss's logits included.",
        "Offload has not run on a GPU; the second table is the estimate's, which counts what is in flight.",
    ]
    publish_all("activations", sheets=sheets, notes=notes, save=options.save)


def model_of(way: str) -> PreTrainedModel:
    """The model, in training mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, vocab_size=4096, **sizes)).train()
    where = Strategy.parse(way if way != "none" else "dp1")
    recompute(model, where._recompute)  # type: ignore[arg-type]
    if where.tiled:
        tile_mlps(model)
    if where.offacts:
        offload_activations(model)
    return model


def run_pass(model: PreTrainedModel) -> None:
    """Forward and backward."""
    ids = torch.arange(SEQ_LEN)[None]
    torch.nn.functional.cross_entropy(model(input_ids=ids, use_cache=False).logits[0], ids[0]).backward()  # type: ignore[no-untyped-call]


def measured() -> list[list[str]]:
    """A row for each way."""
    models = {way: model_of(way) for way in WAYS}
    peaks, sent, seconds = {}, {}, {way: list[float]() for way in WAYS}
    for way, model in models.items():
        run_pass(model)  # makes the gradients
        transfers = getattr(decoder_layers(model)[0], TRANSFERS, None)
        before = transfers.bytes_sent if transfers else 0
        with DeviceBytes() as live:
            run_pass(model)
        peaks[way], sent[way] = live.peak_bytes, (transfers.bytes_sent if transfers else 0) - before
    for _ in range(ROUNDS):
        for way, model in models.items():
            started = time.process_time()
            run_pass(model)
            seconds[way].append(time.process_time() - started)
    took = {way: statistics.median(found) for way, found in seconds.items()}
    return [
        [
            way,
            f"{peaks[way] / 2**20:.1f}",
            f"{peaks[way] / peaks['none']:.2f}",
            f"{sent[way] / 2**20:.1f}",
            f"{took[way] / took['none']:.2f}",
        ]
        for way in WAYS
    ]


def longest() -> list[list[str]]:
    """A row for each way: multiples of STEP that fit on the GPU."""
    found = {way: STEP * _most(way) for way in LONG}
    return [[way, f"{tokens:,}", f"{tokens / max(1, found['none']):.1f}"] for way, tokens in found.items()]


def _most(way: str) -> int:
    strategy = Strategy.parse(f"u{RANKS}-dp1-z3" + (f"-{way}" if way != "none" else ""))
    layout = Layout(**strategy.sections(1)["parallel"])

    def fits(steps: int) -> bool:
        recipe = recipe_of(MODEL, layout, micro_batch_size=1, seq_len=steps * STEP, accumulation=1, precision="bf16")
        recipe = recipe.changed({"model": {"loss": "chunked"}})
        return memory_request(recipe, layout, recipe.resolve_batch(layout), gpu=gpu(GPU)).peak().fits

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


if __name__ == "__main__":
    main()
