"""Tokens per second from text to training samples: this toolkit against the usual `datasets` pipeline.

    python benchmarks/tokenizing.py                     # the whole standard library, as many processes as cores
    python benchmarks/tokenizing.py --megabytes 8 --rounds 3 --processes 2

Both get the same documents, the same tokenizer (a saved bpe-4096) and the same number of processes, and write samples
of the same length to disk:

    datasets  Dataset.map(tokenizer, batched=True) and a second map that joins and splits each batch, as language-model
              examples do; starts from a dataset that is already in Arrow format.
    toolkit   token_cache.prepare from a JSONL file: also splits off validation text and syncs to disk.

The two alternate, so that a machine that slows down slows both; the table shows medians. The time includes starting
processes, but not training the tokenizer and writing the inputs.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import pyarrow.compute
from rich.console import Console
from rich.table import Table

from toolkit.config.recipe import DataSection
from toolkit.data.documents.sources import open_source
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.token_cache import prepare

SEQ_LEN = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, help="limit of the corpus; the default is all of it")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_bytes = write_inputs(folder, options.megabytes)
        sides = {"datasets": datasets_side, "toolkit": toolkit_side}
        runs: dict[str, list[tuple[int, float]]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side, function in sides.items():
                work = folder / f"{side}-{number}"
                runs[side].append(timed(lambda f=function, w=work: f(folder, w, options.processes)))  # type: ignore[misc]
    show(runs, text_bytes, options.processes)


def write_inputs(folder: Path, megabytes: float | None) -> int:
    """The corpus as JSONL and as an Arrow dataset, and the tokenizer. Returns the bytes of text."""
    section = DataSection(source="stdlib", tokenizer="bpe-4096", seq_len=SEQ_LEN)
    source = open_source(section)
    tokenizers.load_or_train(section, source).save_pretrained(folder / "tokenizer")
    texts: list[str] = []
    text_bytes = 0
    for text in (str(text) for chunk in source.chunks() for text in chunk.documents() if text):
        if megabytes is not None and text_bytes >= megabytes * 1e6:
            break
        texts.append(text)
        text_bytes += len(text.encode())
    with (folder / "corpus.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "arrow")
    return text_bytes


def toolkit_side(folder: Path, work: Path, processes: int) -> int:
    section = DataSection(
        source=str(folder / "corpus.jsonl"),
        tokenizer=str(folder / "tokenizer"),
        seq_len=SEQ_LEN,
        workers=processes,
        cache_dir=str(work),
    )
    corpus = prepare(section, progress=False)
    return corpus.train_tokens + corpus.eval_tokens


def datasets_side(folder: Path, work: Path, processes: int) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    work.mkdir()

    def tokenized(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"], verbose=False)

    def joined(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        columns = {name: list(chain.from_iterable(rows)) for name, rows in batch.items()}
        end = len(columns["input_ids"]) // SEQ_LEN * SEQ_LEN
        parts = {name: [row[i : i + SEQ_LEN] for i in range(0, end, SEQ_LEN)] for name, row in columns.items()}
        return {**parts, "labels": parts["input_ids"]}

    def options(name: str) -> dict[str, Any]:
        return {"batched": True, "num_proc": processes, "cache_file_name": str(work / name)}

    # Each call of map starts its own processes, as in the examples.
    tokens = datasets.load_from_disk(folder / "arrow").map(
        tokenized, remove_columns=["text"], **options("tokens.arrow")
    )
    tokens.map(joined, **options("samples.arrow"))
    # The tokens that the last incomplete sample of each batch drops count too.
    return int(pyarrow.compute.sum(pyarrow.compute.list_value_length(tokens.data.column("input_ids"))).as_py())


def timed(function: Callable[[], int]) -> tuple[int, float]:
    start = time.perf_counter()
    tokens = function()
    return tokens, time.perf_counter() - start


def show(runs: dict[str, list[tuple[int, float]]], text_bytes: int, processes: int) -> None:
    rates = {side: statistics.median(tokens / seconds for tokens, seconds in results) for side, results in runs.items()}
    table = Table(
        title=f"{text_bytes / 1e6:.1f} MB of text, {processes} processes, medians of {len(runs['toolkit'])} runs"
    )
    for heading in ("pipeline", "tokens", "seconds", "tokens/s", "MB/s", "ratio"):
        table.add_column(heading, justify="left" if heading == "pipeline" else "right")
    for side, results in runs.items():
        seconds = statistics.median(seconds for _, seconds in results)
        table.add_row(
            side,
            f"{results[0][0]:,}",
            f"{seconds:.2f}",
            f"{rates[side]:,.0f}",
            f"{text_bytes / seconds / 1e6:.2f}",
            f"{rates[side] / rates['datasets']:.2f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    datasets.disable_progress_bars()
    main()
