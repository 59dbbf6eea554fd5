"""Tokens per second from text to training samples: this toolkit against the usual `datasets` pipeline.

    python benchmarks/tokenizing.py                     # the whole standard library, as many processes as cores
    python benchmarks/tokenizing.py --megabytes 8 --rounds 3 --processes 2

Both get the same documents, the same tokenizer (a saved bpe-4096) and the same number of processes, and write samples
of the same length to disk:

    datasets  Dataset.map(tokenizer, batched=True) and a second map that joins and splits each batch, as language-model
              examples do; starts from a dataset that is already in Arrow format.
    toolkit   token_cache.prepare from a JSONL file: also splits off validation text and syncs to disk.
    megatron  the same to a .bin and .idx: dstk tokenize --format megatron.
    datatrove its DocumentTokenizer, which nanotron's own preprocessing runs, from a JSONL file for each process; left
              out unless `datatrove`, `loguru`, `humanize` and `orjson` can be imported.

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
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import pyarrow.compute
from measure.table import publish

from toolkit.config.data_section import DataSection
from toolkit.data.documents.sources import open_source
from toolkit.data.megatron.write import write_megatron
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.token_cache import prepare

SEQ_LEN = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, help="limit of the corpus; the default is all of it")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tokenizing.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_bytes = write_inputs(folder, options.megabytes, options.processes)
        sides = {"datasets": datasets_side, "toolkit": toolkit_side, "megatron": megatron_side}
        if find_spec("datatrove") is not None:
            sides["datatrove"] = datatrove_side
        runs: dict[str, list[tuple[int, float]]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side, function in sides.items():
                work = folder / f"{side}-{number}"
                runs[side].append(timed(lambda f=function, w=work: f(folder, w, options.processes)))  # type: ignore[misc]
    show(runs, text_bytes, options.processes, save=options.save)


def write_inputs(folder: Path, megabytes: float | None, parts: int) -> int:
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
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "corpus.jsonl").write_text("".join(lines))
    (folder / "parts").mkdir()
    for part in range(parts):
        (folder / "parts" / f"{part}.jsonl").write_text("".join(lines[part::parts]))
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "arrow")
    return text_bytes


def our_section(folder: Path, work: Path, processes: int) -> DataSection:
    return DataSection(
        source=str(folder / "corpus.jsonl"),
        tokenizer=str(folder / "tokenizer"),
        seq_len=SEQ_LEN,
        workers=processes,
        cache_dir=str(work),
    )


def toolkit_side(folder: Path, work: Path, processes: int) -> int:
    corpus = prepare(our_section(folder, work, processes), progress=False)
    return corpus.train_tokens + corpus.eval_tokens


def megatron_side(folder: Path, work: Path, processes: int) -> int:
    return write_megatron(our_section(folder, work, processes), str(work / "corpus"), progress=False).tokens


def datatrove_side(folder: Path, work: Path, processes: int) -> int:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(folder / "parts")),
        DocumentTokenizer(
            str(work / "tokens"),
            str(folder / "tokenizer" / "tokenizer.json"),
            eos_token=tokenizers.END_OF_TEXT,
            shuffle_documents=False,
        ),
    ]
    logs = str(work / "logs")
    LocalPipelineExecutor(steps, tasks=processes, workers=processes, logging_dir=logs).run()
    return sum(path.stat().st_size for path in (work / "tokens").glob("*.ds")) // 2


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


def show(runs: dict[str, list[tuple[int, float]]], text_bytes: int, processes: int, *, save: bool) -> None:
    rates = {side: [tokens / seconds for tokens, seconds in results] for side, results in runs.items()}
    rows = []
    for side, results in runs.items():
        seconds = statistics.median(seconds for _, seconds in results)
        ratios = sorted(rate / other for rate, other in zip(rates[side], rates["datasets"], strict=True))
        megabytes = f"{text_bytes / seconds / 1e6:.2f}"
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        ratio = f"{statistics.median(ratios):.2f}x"
        rows.append((side, f"{results[0][0]:,}", f"{seconds:.2f}", megabytes, ratio, spread))
    notes = [
        f"{text_bytes / 1e6:.1f} MB of text, {processes} processes, medians of {len(runs['toolkit'])} runs.",
        "Megatron-LM's tools/preprocess_data.py is not on PyPI; nanotron 0.4 there has no tokenization of its own.",
    ]
    headings = ("pipeline", "tokens", "seconds", "MB/s", "ratio", "of each run")
    publish("tokenizing", title="From text to ids", headings=headings, rows=rows, notes=notes, save=save)


if __name__ == "__main__":
    datasets.disable_progress_bars()
    main()
