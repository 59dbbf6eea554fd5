"""Tokens per second from text to training samples: this toolkit against the usual `datasets` pipeline.

    python benchmarks/tokenizing.py                     # the whole standard library, as many processes as cores
    python benchmarks/tokenizing.py --megabytes 8 --rounds 3 --processes 2
    python benchmarks/tokenizing.py --megatron DIR      # with a checkout of Megatron-LM

Both get the same documents, the same tokenizer (a saved bpe-4096) and the same number of processes, and write samples
of the same length to disk:

    datasets  Dataset.map(tokenizer, batched=True) and a second map that joins and splits each batch, as language-model
              examples do; starts from a dataset that is already in Arrow format.
    toolkit   token_cache.prepare from a JSONL file: also splits off validation text and syncs to disk.
    toolkit, .bin
              the same to a .bin and .idx: dstk tokenize --format megatron.
    Megatron-LM
              tools/preprocess_data.py of the checkout, with --append-eod, from the same JSONL file; left out without
              --megatron. Its imports need `triton`.
    datatrove its DocumentTokenizer, which nanotron's own preprocessing runs, from a JSONL file for each process; left
              out unless `datatrove`, `loguru`, `humanize` and `orjson` can be imported.

They alternate, so that a machine that slows down slows all; the table shows medians. The time includes starting
worker processes, but not Python's imports, training the tokenizer and writing the inputs. Processor time is that of all
processes of a side; the ratio is that of tokens per processor second, which other jobs on the machine change least.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
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
Side = Callable[[Path, Path, int], int]
Run = tuple[int, float, float]
"""Tokens, seconds, and seconds of processor time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, help="limit of the corpus; the default is all of it")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tokenizing.md")
    options = parser.parse_args()
    sides: dict[str, Side] = {"datasets": datasets_side, "toolkit": toolkit_side, "toolkit, .bin": megatron_side}
    notes = ["nanotron's tools/preprocess_data.py runs datatrove's DocumentTokenizer."]
    if options.megatron is not None:
        sides["Megatron-LM"] = partial(megatron_lm_side, megatron_lm(options.megatron))
        core = sys.modules["megatron.core"].__version__
        notes.append(f"Megatron-LM {core} and the toolkit write the same .bin and .idx, byte for byte.")
    else:
        notes.append("Megatron-LM's tools/preprocess_data.py is left out: name a checkout by --megatron.")
    if find_spec("datatrove") is not None:
        sides["datatrove"] = datatrove_side
        notes.append(f"datatrove {version('datatrove')}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_bytes = write_inputs(folder, options.megabytes, options.processes)
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side, function in sides.items():
                runs[side].append(timed(partial(function, folder, folder / f"{side}-{number}", options.processes)))
        if options.megatron is not None:
            check_same(folder / "toolkit, .bin-0" / "corpus", folder / "Megatron-LM-0" / "corpus_text_document")
    notes = [
        f"{text_bytes / 1e6:.1f} MB of text, {options.processes} processes, medians of {options.rounds} runs.",
        *notes,
    ]
    show(runs, notes, save=options.save)


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


def megatron_lm(checkout: Path) -> Callable[[], None]:
    """The main of its tools/preprocess_data.py, which reads sys.argv."""
    sys.path.insert(0, str(checkout))  # before the megatron-core that is installed
    spec = spec_from_file_location("preprocess_data", checkout / "tools" / "preprocess_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["preprocess_data"] = module  # its workers unpickle what is of this module
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]


def megatron_lm_side(run: Callable[[], None], folder: Path, work: Path, processes: int) -> int:
    work.mkdir()
    given = {
        "--input": folder / "corpus.jsonl",
        "--output-prefix": work / "corpus",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": folder / "tokenizer",
        "--workers": processes,
    }
    sys.argv = ["preprocess_data.py", *(str(word) for pair in given.items() for word in pair), "--append-eod"]
    with (work / "log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        run()
    return (work / "corpus_text_document.bin").stat().st_size // 2


def check_same(ours: Path, theirs: Path) -> None:
    for suffix in (".bin", ".idx"):
        if Path(f"{ours}{suffix}").read_bytes() != Path(f"{theirs}{suffix}").read_bytes():
            raise SystemExit(f"{ours}{suffix} and {theirs}{suffix} differ")


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
    # Forked, so that the processor time of its workers is known.
    options: dict[str, Any] = {"tasks": processes, "workers": processes, "start_method": "fork"}
    LocalPipelineExecutor(steps, logging_dir=logs, **options).run()
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


def timed(function: Callable[[], int]) -> Run:
    start, used = time.perf_counter(), os.times()
    tokens = function()
    seconds, now = time.perf_counter() - start, os.times()
    return tokens, seconds, sum(now[:4]) - sum(used[:4])


def show(runs: dict[str, list[Run]], notes: list[str], *, save: bool) -> None:
    rates = {side: [tokens / processor for tokens, _, processor in results] for side, results in runs.items()}
    rows = []
    for side, results in runs.items():
        seconds, processor = (statistics.median(run[column] for run in results) for column in (1, 2))
        ratios = sorted(rate / other for rate, other in zip(rates[side], rates["datasets"], strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        times = (f"{seconds:.2f}", f"{processor:.2f}", f"{results[0][0] / seconds:,.0f}")
        rows.append((side, f"{results[0][0]:,}", *times, f"{statistics.median(ratios):.2f}x", spread))
    headings = ("pipeline", "tokens", "seconds", "processor s", "tokens/s", "ratio", "of each run")
    publish("tokenizing", title="From text to ids", headings=headings, rows=rows, notes=notes, save=save)


if __name__ == "__main__":
    datasets.disable_progress_bars()
    main()
