"""What train.compile brings: a training step with compiled decoder layers against the same step without.

    python benchmarks/compile.py                        # about four minutes
    python benchmarks/compile.py --quick                # does it run? The figures mean nothing.
    python benchmarks/compile.py --save                 # also writes benchmarks/results/compile.md

One process: forward, loss, backward and AdamW, with the product's own CompiledLayers. The sides have the same weights
and take turns, so that a machine that slows down slows both: the ratio is the median of the ratios of turns that follow
each other. `at most` is that ratio if all but matrix products, attention and the optimizer's update took no time: these
are the same in compiled layers. `kept` is what the decoder layers keep for the backward pass, without parameters.
`first step` includes compilation.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from measure.table import publish, target_met
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from toolkit.engines.compiled_layers import CompiledLayers
from toolkit.model_init.freed_memory import keep_freed_memory
from toolkit.model_init.model_modules import decoder_layers
from toolkit.parallel.loss import token_loss_sum
from toolkit.units import format_count, format_duration

TARGET = 1.15
SHAPE = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
SHAPE |= {"intermediate_size": 1408, "vocab_size": 4096}
SAMPLES, SEQ_LEN = 2, 256
MEBIBYTE = 2**20
HEADINGS = ("precision", "side", "tokens/s", "ratio", "at most", "of CPU time", "kept MiB", "first step", "target")
SAME = {"aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"}
SAME |= {f"aten::_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward")}


@dataclass
class Side:
    """A model and its optimizer, and what was measured of its steps."""

    model: PreTrainedModel
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, ids: torch.Tensor) -> None:
        token_loss_sum(self.model(input_ids=ids, use_cache=False).logits, ids).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def most_ratio(self, ids: torch.Tensor) -> float:
        """A step's time over that of what is the same in compiled layers."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.step(ids)
        events = profiler.key_averages()
        same = sum(event.self_cpu_time_total for event in events if event.key in SAME)
        same += sum(event.cpu_time_total for event in events if event.key.startswith("Optimizer.step"))
        return float(sum(event.self_cpu_time_total for event in events) / same)

    def kept_bytes(self, ids: torch.Tensor) -> int:
        """What the layers keep of one forward pass."""
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        counting = False

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if counting and storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def switch(on: bool) -> Callable[..., None]:
            def call(*_: object) -> None:
                nonlocal counting
                counting = on

            return call

        handles = [layer.register_forward_pre_hook(switch(True)) for layer in decoder_layers(self.model)]
        handles += [layer.register_forward_hook(switch(False)) for layer in decoder_layers(self.model)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = self.model(input_ids=ids, use_cache=False).logits
        for handle in handles:
            handle.remove()
        del logits
        return sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="two turns of a small model")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/compile.md")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    shape = SHAPE | ({"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128} if options.quick else {})
    rows = []
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        rows += measure(precision, dtype, shape, rounds=2 if options.quick else options.rounds)
    publish(
        "compile",
        title="Compiled decoder layers against eager ones",
        headings=HEADINGS,
        rows=rows,
        text_columns=2,
        notes=[
            (
                f"A Llama of {shape['num_hidden_layers']} layers x {shape['hidden_size']}, {SAMPLES} samples of "
                f"{SEQ_LEN} tokens, {options.threads} threads. Medians."
            )
        ],
        save=options.save,
    )


def measure(precision: str, dtype: torch.dtype, shape: dict[str, int], *, rounds: int) -> list[list[str]]:
    """The rows of both sides in one precision."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).to(dtype).train()
    eager, compiled = Side(model), Side(copy.deepcopy(model))
    layers = CompiledLayers(compiled.model)
    ids = torch.randint(shape["vocab_size"], (SAMPLES, SEQ_LEN))
    for turn in range(rounds + 2):
        for side in (eager, compiled) if turn % 2 else (compiled, eager):
            start, cpu_start = time.perf_counter(), time.process_time()
            side.step(ids)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            if turn == 0:
                side.first_seconds = seconds
            elif turn > 1:
                side.seconds.append(seconds)
                side.cpu_seconds.append(cpu)
    print(f"{precision}: {layers}")
    rows = []
    for name, side in (("eager", eager), ("compiled", compiled)):
        ratio = statistics.median(a / b for a, b in zip(eager.seconds, side.seconds, strict=True))
        cpu = statistics.median(a / b for a, b in zip(eager.cpu_seconds, side.cpu_seconds, strict=True))
        rows.append(
            [
                precision,
                name,
                format_count(SAMPLES * SEQ_LEN / statistics.median(side.seconds)),
                f"{ratio:.2f}x",
                f"{side.most_ratio(ids):.2f}x" if name == "eager" else "",
                f"{cpu:.2f}x",
                f"{side.kept_bytes(ids) / MEBIBYTE:.0f}",
                format_duration(side.first_seconds),
                target_met(ratio, TARGET, at_most=False) if name == "compiled" else "",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
