"""A small corpus for tests: documents of a few artificial words, of very different lengths."""

import json
import random
from pathlib import Path


def write_corpus(folder: Path) -> Path:
    """Write 400 documents of 2 to 90 words: a padded sample has between a few targets and a full row."""
    rng = random.Random(7)
    words = [f"{a}{b}" for a in ("la", "to", "mi", "ru", "ne") for b in ("ba", "di", "ko", "su", "ve")]
    lines = (" ".join(rng.choices(words, k=rng.choice((2, 5, 20, 90)))) for _ in range(400))
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path
