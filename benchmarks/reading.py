"""Samples per second while training reads them: this toolkit against Megatron-LM's GPTDataset and `datasets`.

    python benchmarks/reading.py
    python benchmarks/reading.py --tokens 2e7 --samples 1024 --rounds 3

All read the same tokens in a random order, in one process, as micro-batches of input_ids and labels in torch tensors.
Documents have 600 tokens on average; a sample has 1,024.

    megatron   megatron-core's GPTDataset in a DataLoader, on a .bin and .idx, without an attention mask
    datasets   samples that were packed before, saved as Arrow (int32), with_format("torch") in a DataLoader
    toolkit    Samples.batch on the same .bin and .idx

`documents` is the same where documents start at position 0: GPTDataset with reset_position_ids and eod_mask_loss, the
toolkit with data.document_masking. `open` is the time until the first batch, in which the toolkit loads the tokenizer
and checks the whole index, and GPTDataset computes the order of an epoch. The sides alternate, so that a machine that
slows down slows all; the table shows medians. What they read is in the page cache.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch
from measure.table import publish

from toolkit.config.data_section import DataSection
from toolkit.data.documents.sources import open_source
from toolkit.data.samples.loader import open_samples
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.token_cache import prepare

SEQ_LEN, VOCABULARY, MICRO_BATCH = 1024, 4096, 8
MEAN_DOCUMENT = 600
Side = Callable[[Path], Iterator[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=float, default=5e7, help="tokens of the corpus")
    parser.add_argument("--samples", type=int, default=4096, help="samples that each side reads in a round")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/reading.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, int(options.tokens))
        runs: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, function in SIDES.items():
                runs[side].append(timed(lambda f=function: f(folder), options.samples))  # type: ignore[misc]
    show(runs, int(options.tokens), options.samples, save=options.save)


def write_inputs(folder: Path, tokens: int) -> None:
    """Random ids as a dataset of Megatron-LM, by its own builder; the same, packed, as Arrow; and a tokenizer."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    section = DataSection(source="stdlib", tokenizer=f"bpe-{VOCABULARY}", seq_len=SEQ_LEN)
    tokenizers.load_or_train(section, open_source(section)).save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    stream = rng.integers(1, VOCABULARY, size=tokens, dtype=np.uint16)
    ends = np.cumsum(rng.geometric(1 / MEAN_DOCUMENT, size=tokens // MEAN_DOCUMENT))
    ends = np.append(ends[ends < tokens], tokens)
    stream[ends - 1] = 0
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=np.uint16)
    for document in np.split(stream, ends[:-1]):
        builder.add_document(document, [len(document)])
    builder.finalize(str(folder / "corpus.idx"))
    count = (tokens - 1) // SEQ_LEN
    columns = [stream[shift : shift + count * SEQ_LEN].reshape(count, SEQ_LEN).astype(np.int32) for shift in (0, 1)]
    packed = datasets.Dataset.from_dict(dict(zip(("input_ids", "labels"), columns, strict=True)))
    packed.save_to_disk(folder / "arrow")


def megatron_side(folder: Path, *, documents: bool = False) -> Iterator[Any]:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    tokenizer: Any = SimpleNamespace(vocab_size=VOCABULARY, eod=0, pad=VOCABULARY, unique_identifiers={"name": "bpe"})
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LEN,
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=documents,
        reset_attention_mask=False,
        eod_mask_loss=documents,
        create_attention_mask=False,
    )
    stored = IndexedDataset(str(folder / "corpus"))
    indices = np.arange(len(stored), dtype=np.int32)
    dataset = GPTDataset(stored, str(folder / "corpus"), indices, None, Split.train, config)
    yield from torch.utils.data.DataLoader(dataset, batch_size=MICRO_BATCH)


def datasets_side(folder: Path) -> Iterator[Any]:
    dataset: Any = datasets.load_from_disk(folder / "arrow").with_format("torch")
    yield from torch.utils.data.DataLoader(dataset, batch_size=MICRO_BATCH, shuffle=True)


def toolkit_side(folder: Path, *, documents: bool = False) -> Iterator[Any]:
    section = DataSection(
        source=str(folder / "corpus"),
        tokenizer=str(folder / "tokenizer"),
        seq_len=SEQ_LEN,
        document_masking=documents,
        eval_fraction=0.0,
    )
    corpus = prepare(section, progress=False)
    samples = open_samples(corpus, section, split="train", seed=1, global_batch_size=MICRO_BATCH)
    for step in range(len(samples) // MICRO_BATCH):
        yield samples.batch(step, range(MICRO_BATCH))


def megatron_documents(folder: Path) -> Iterator[Any]:
    return megatron_side(folder, documents=True)


def toolkit_documents(folder: Path) -> Iterator[Any]:
    return toolkit_side(folder, documents=True)


SIDES: dict[str, Side] = {
    "megatron": megatron_side,
    "datasets": datasets_side,
    "toolkit": toolkit_side,
    "megatron, documents": megatron_documents,
    "toolkit, documents": toolkit_documents,
}


def timed(side: Callable[[], Iterator[Any]], samples: int) -> tuple[float, float]:
    """Seconds until the first micro-batch, and samples per second after it."""
    start = time.perf_counter()
    batches = side()
    next(batches)
    first = time.perf_counter()
    read = sum(1 for _ in islice(batches, samples // MICRO_BATCH)) * MICRO_BATCH
    return first - start, read / (time.perf_counter() - first)


def show(runs: dict[str, list[tuple[float, float]]], tokens: int, samples: int, *, save: bool) -> None:
    rows = []
    for side, results in runs.items():
        base = runs["megatron, documents" if side.endswith("documents") else "megatron"]
        ratios = sorted(rate / other for (_, rate), (_, other) in zip(results, base, strict=True))
        rate = statistics.median(rate for _, rate in results)
        opened = f"{statistics.median(seconds for seconds, _ in results):.2f}"
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append((side, opened, f"{rate:,.0f}", f"{statistics.median(ratios):.2f}x", spread))
    notes = [
        f"{tokens / 1e6:.0f} million tokens; {samples:,} samples of {SEQ_LEN:,} a run, in batches of {MICRO_BATCH}.",
        f"Medians of {len(runs['toolkit'])} runs; the page cache is warm.",
        "GPTDataset also returns a loss mask and positions, which a GPT model of Megatron-LM takes.",
        f"megatron-core {version('megatron-core')}, datasets {version('datasets')}",
    ]
    headings = ("side", "open s", "samples/s", "ratio", "of each run")
    publish("reading", title="Reading samples while training", headings=headings, rows=rows, notes=notes, save=save)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    main()
