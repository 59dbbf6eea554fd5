"""A made-up file of published measurements, small enough to count by hand. Puts benchmarks/ where Python finds it."""

import csv
import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "published_memory.py"
sys.path.insert(0, str(ROOT / "benchmarks"))

from published.rows import Row  # noqa: E402

# A GPT that is quick to count by hand: a layer has 12h² + 13h elements.
CELLS = {
    "row_id": "made-0001",
    "source_id": "bigscience_logs",
    "source_ref": "perf_n16-ds-off.out",
    "trust": "A",
    "kind": "mem",
    "framework": "Megatron-LM (2021)",
    "arch": "gpt2-like (LayerNorm)",
    "layers": "4",
    "hidden": "64",
    "heads": "4",
    "vocab": "512",
    "tied_emb": "1",
    "seq_len": "32",
    "gpu": "V100-32GB-SXM2",
    "gpu_mem_gb": "32",
    "n_gpus": "8",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "zero": "0",
    "recompute": "full",
    "micro_batch": "1",
    "global_batch": "16",
    "precision": "fp16",
    "peak_mem_gib": "1.5",
    "peak_mem_kind": "torch max_memory_allocated (MB/1024)",
    "pp_stage": "1",
    "fits": "1",
}
WIDE = {
    "layers": 64,
    "hidden": 8192,
    "ffn": 32768,
    "heads": 32,
    "vocab": 50688,
    "seq_len": 1024,
    "tp": 4,
    "pp": 16,
    "dp": 1,
    "micro_batch": 4,
    "global_batch": 1024,
}
"""A GPT of 52 billion parameters, as it was logged on V100s."""
LLAMA = {
    "arch": "llama (RMSNorm)",
    "gated_mlp": True,
    "ffn": 96,
    "kv_heads": 2,
    "tied_emb": False,
    "tp": 1,
    "pp": 1,
    "recompute": "selective(op)",
}
LAYER = 12 * 64**2 + 13 * 64
TABLES = 512 * 64 + 32 * 64
PARAMETERS = 4 * LAYER + TABLES + 2 * 64


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path
