"""A made-up file of published measurements, small enough to count by hand. Puts benchmarks/ where Python finds it."""

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "published_memory.py"
sys.path.insert(0, str(ROOT / "benchmarks"))

from published.rows import NAMES, RESULTS, SETTINGS  # noqa: E402

# A GPT that is quick to count by hand: a layer has 12h² + 13h elements.
CELLS = {
    "row_id": "made-0001",
    "source_id": "made",
    "trust": "A",
    "kind": "mem",
    "framework": "Megatron-Core (dev)",
    "arch": "gpt",
    "layers": "4",
    "hidden": "64",
    "heads": "4",
    "kv_heads": "4",
    "ffn": "256",
    "vocab": "512",
    "tied_emb": "1",
    "seq_len": "32",
    "gpu": "A100-80GB-SXM",
    "gpu_mem_gb": "80",
    "n_gpus": "8",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "zero": "0",
    "recompute": "full",
    "micro_batch": "1",
    "global_batch": "16",
    "precision": "bf16",
    "peak_mem_gib": "1.5",
    "peak_mem_kind": "torch max_memory_allocated (MB/1024)",
    "pp_stage": "1",
    "fits": "1",
}
LAYER = 12 * 64**2 + 13 * 64
PARAMETERS = 4 * LAYER + 512 * 64 + 32 * 64 + 2 * 64


def write(path: Path, *rows: dict[str, str], columns: frozenset[str] = NAMES | RESULTS | SETTINGS) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted(columns), restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path
