"""A small corpus for the tests: documents of a few made-up words, of very different lengths."""

import json
import random
from pathlib import Path


def write_corpus(folder: Path) -> Path:
    """400 documents of 2 to 90 words: a padded sample holds anything between a few targets and a full row."""
    chance = random.Random(7)
    words = [f"{a}{b}" for a in ("la", "to", "mi", "ru", "ne") for b in ("ba", "di", "ko", "su", "ve")]
    lines = (" ".join(chance.choices(words, k=chance.choice((2, 5, 20, 90)))) for _ in range(400))
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path
