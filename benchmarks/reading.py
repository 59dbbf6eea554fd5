"""Tokens per second while training reads them: this toolkit against Megatron-LM, nanotron and `datasets`.

    python benchmarks/reading.py
    python benchmarks/reading.py --tokens 2e7 --samples 1024 --rounds 3
    python benchmarks/reading.py --nanotron DIR         # with a checkout of nanotron

All read the same tokens in a random order, in one process, as micro-batches of input_ids and labels in torch tensors.
Documents have 600 tokens on average; a sample has 1,024.

    megatron   megatron-core's GPTDataset in a DataLoader, on a .bin and .idx, without an attention mask
    datasets   samples that were packed before, saved as Arrow (int32), with_format("torch") in a DataLoader
    nanotron   the checkout's Nanoset with its collator in a DataLoader, on a .ds of datatrove; left out without
               --nanotron. Needs `datatrove`, `loguru`, `humanize`, `numba`, `dacite` and `triton`. It imports
               flash-attn, which reading does not use, and has another name for an argument of datatrove
    toolkit    Samples.batch on the same .bin and .idx

`documents` is the same where documents start at position 0: GPTDataset with reset_position_ids and eod_mask_loss,
Nanoset with return_positions, the toolkit with data.document_masking. `open` is the time until the first batch, in
which the toolkit loads the tokenizer and checks the whole index, and GPTDataset and Nanoset compute the order of an
epoch. The sides alternate, so that a machine that slows down slows all; the table shows medians, and the processor time
of reading a sample. What they read is in the page cache.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
Run = tuple[float, float, float]
"""Seconds until the first micro-batch, then tokens per second, and processor seconds per sample."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=float, default=5e7, help="tokens of the corpus")
    parser.add_argument("--samples", type=int, default=4096, help="samples that each side reads in a round")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--nanotron", type=Path, help="a checkout of nanotron")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/reading.md")
    options = parser.parse_args()
    sides: dict[str, Side] = {"megatron": megatron_side, "datasets": datasets_side}
    if options.nanotron is not None:
        import_nanotron(options.nanotron)
        sides["nanotron"] = nanotron_side
    sides |= {"toolkit": toolkit_side, "megatron, documents": partial(megatron_side, documents=True)}
    if options.nanotron is not None:
        sides["nanotron, documents"] = partial(nanotron_side, documents=True)
    sides["toolkit, documents"] = partial(toolkit_side, documents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, int(options.tokens))
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, function in sides.items():
                runs[side].append(timed(partial(function, folder), options.samples))
    show(runs, int(options.tokens), options.samples, options.nanotron, save=options.save)


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
    (folder / "datatrove").mkdir()
    stream.tofile(folder / "datatrove" / "corpus.ds")
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


def import_nanotron(checkout: Path) -> None:
    """Let the checkout be imported without flash-attn, and with a published datatrove."""

    class Absent(ModuleType):
        __version__ = "2.6.0"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    for name in ("", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops", ".ops.triton"):
        sys.modules[f"flash_attn{name}"] = Absent(f"flash_attn{name}")
    sys.path.insert(0, str(checkout / "src"))
    from datatrove.utils.dataset import DatatroveFolderDataset
    from nanotron.data import nanoset

    def published(folder_path: str, *, filename_pattern: str, eos_token_id: int | None, **others: Any) -> Any:
        pattern = Path(filename_pattern).name
        return DatatroveFolderDataset(
            folder_path, filename_pattern=pattern, positions_from_eos_token_id=eos_token_id, **others
        )

    nanoset.DatatroveFolderDataset = published


def nanotron_side(folder: Path, *, documents: bool = False) -> Iterator[Any]:
    from nanotron.data import clm_collator
    from nanotron.data.nanoset import Nanoset
    from torch._C._distributed_c10d import HashStore

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        dataset = Nanoset(
            [str(folder / "datatrove")],
            sequence_length=SEQ_LEN,
            token_size=2,
            train_split_num_samples=(folder / "corpus.bin").stat().st_size // 2 // (SEQ_LEN + 1),
            eos_token_id=0,
            return_positions=documents,
        )
        kind = clm_collator.DataCollatorForCLMWithPositionIds if documents else clm_collator.DataCollatorForCLM
        group = torch.distributed.group.WORLD
        collate = kind(SEQ_LEN, 0, 0, SimpleNamespace(pp_pg=group, cp_pg=group, context_parallel_size=1))
        for batch in torch.utils.data.DataLoader(dataset, batch_size=MICRO_BATCH, collate_fn=collate):
            yield {name: torch.from_numpy(array) for name, array in batch.items()}
    finally:
        torch.distributed.destroy_process_group()


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


def timed(side: Callable[[], Iterator[Any]], samples: int) -> Run:
    start = time.perf_counter()
    batches = side()
    next(batches)
    first, used = time.perf_counter(), time.process_time()
    read = sum(1 for _ in islice(batches, samples // MICRO_BATCH)) * MICRO_BATCH
    seconds, processor = time.perf_counter() - first, time.process_time() - used
    return first - start, read * SEQ_LEN / seconds, processor / read


def show(runs: dict[str, list[Run]], tokens: int, samples: int, nanotron: Path | None, *, save: bool) -> None:
    rows = []
    for side, results in runs.items():
        base = runs["megatron, documents" if side.endswith("documents") else "megatron"]
        ratios = sorted(run[1] / other[1] for run, other in zip(results, base, strict=True))
        opened, rate, processor = (statistics.median(run[column] for run in results) for column in range(3))
        figures = (f"{opened:.2f}", f"{rate / 1e6:,.1f}", f"{processor * 1e6:,.0f}")
        rows.append((side, *figures, f"{statistics.median(ratios):.2f}x", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"))
    notes = [
        f"{tokens / 1e6:.0f} million tokens; {samples:,} samples of {SEQ_LEN:,} a run, in batches of {MICRO_BATCH}.",
        f"Medians of {len(runs['toolkit'])} runs; the page cache is warm.",
        "GPTDataset also returns a loss mask and positions, which a GPT model of Megatron-LM takes.",
        f"megatron-core {version('megatron-core')}, datasets {version('datasets')}",
    ]
    if nanotron is not None:
        project = tomllib.loads((nanotron / "pyproject.toml").read_text())["project"]
        notes.append("Nanoset's collator also returns masks. run_train.py reads the same files in their order.")
        notes.append(f"nanotron {project['version']}, datatrove {version('datatrove')}")
    else:
        notes.append("nanotron is left out: name a checkout by --nanotron.")
    headings = ("side", "open s", "million tokens/s", "processor us/sample", "ratio", "of each run")
    publish("reading", title="Reading samples while training", headings=headings, rows=rows, notes=notes, save=save)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    main()
