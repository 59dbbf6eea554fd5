"""Tokenizing at scale: memory for a text and for one of ten times its size, here and behind s3://; and shards.

    python benchmarks/tokenizing_scale.py --megabytes 200

Each row is a process of its own, with its workers: one that makes the token cache of a JSONL file here, or behind s3://
(a server of this machine), and two that make shards 1/2 and 2/2 one after the other, the second of which merges them.
The ratio is of processor time, workers included, to that of one process on the same text here. Memory is the peak of
the process, and of its largest worker.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import s3fs
from measure.table import publish
from moto.server import ThreadedMotoServer

from toolkit.config.data_section import DataSection
from toolkit.data.documents.sources import open_source
from toolkit.data.tokens import tokenizer as tokenizers

SEQ_LEN = 1024
SAMPLE_BYTES = 8_000_000
MEASURED = """
import json, resource, sys, time
from toolkit.config.data_section import DataSection
from toolkit.data.documents.part import SourcePart
from toolkit.data.tokens.shards import make_shard
from toolkit.data.tokens.token_cache import prepare
data, part = DataSection(**json.loads(sys.argv[1])), sys.argv[2]
start = time.perf_counter()
made = make_shard(data, SourcePart.parse(part), folder=None, progress=False) if part else prepare(data, progress=False)
seconds = time.perf_counter() - start
used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
processor = sum(one.ru_utime + one.ru_stime for one in used)
tokens = made.counts.tokens if hasattr(made, "counts") else made.train_tokens + made.eval_tokens
# getrusage would tell the memory of the process that started this one, if that was larger.
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps([tokens, seconds, processor, own / 1024, used[1].ru_maxrss / 1024]))
"""
Row = tuple[str, int, list[float]]
"""What, megabytes, and tokens, seconds, processor seconds, MiB of the process, MiB of its largest worker."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100, help="size of the larger text")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tokenizing_scale.md")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
    os.environ["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*server.get_host_and_port())
    with tempfile.TemporaryDirectory() as name:
        rows = measure_all(Path(name), options.megabytes, options.processes)
    server.stop()
    show(rows, options.processes, save=options.save)


def measure_all(folder: Path, megabytes: int, processes: int) -> list[Row]:
    sample = write_tokenizer(folder)
    bucket = s3fs.S3FileSystem()
    bucket.mkdir("corpus")
    rows: list[Row] = []
    for size in (megabytes // 10, megabytes):
        path = folder / f"{size}.jsonl"
        with path.open("wb") as file:
            for _ in range(max(1, round(size * 1e6 / len(sample)))):
                file.write(sample)
        bucket.put_file(str(path), f"corpus/{path.name}")
        for what, source in (("one process", str(path)), ("one process, s3://", f"s3://corpus/{path.name}")):
            rows.append((what, size, measured(folder, source, "", processes)))
        if size == megabytes:
            parts = [measured(folder, str(path), part, processes, "sharded") for part in ("1/2", "2/2")]
            # The last one merges, and tells the tokens of all.
            sums, peaks = (parts[0][n] + parts[1][n] for n in (1, 2)), (max(parts[0][n], parts[1][n]) for n in (3, 4))
            rows.append(("1/2, then 2/2 and the merge", size, [parts[1][0], *sums, *peaks]))
    return rows


def write_tokenizer(folder: Path) -> bytes:
    """Save a tokenizer; return some megabytes of JSONL."""
    section = DataSection(source="stdlib", tokenizer="bpe-4096", seq_len=SEQ_LEN)
    source = open_source(section)
    tokenizers.load_or_train(section, source).save_pretrained(folder / "tokenizer")
    lines, size = [], 0
    for text in (text for chunk in source.chunks() for text in chunk.documents() if text):
        if size >= SAMPLE_BYTES:
            break
        lines.append(json.dumps({"text": text}).encode() + b"\n")
        size += len(lines[-1])
    return b"".join(lines)


def measured(folder: Path, source: str, part: str, processes: int, cache: str = "") -> list[float]:
    data = {"source": source, "tokenizer": str(folder / "tokenizer"), "seq_len": SEQ_LEN, "workers": processes}
    data["cache_dir"] = str(folder / (cache or f"cache-{len(list(folder.iterdir()))}"))
    command = [sys.executable, "-c", MEASURED, json.dumps(data), part]
    found: list[float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def show(rows: list[Row], processes: int, *, save: bool) -> None:
    first = {size: processor for what, size, (_, _, processor, *_) in rows if what == "one process"}
    lines = []
    for what, size, (tokens, seconds, processor, own, worker) in rows:
        times = (f"{tokens:,.0f}", f"{seconds:.1f}", f"{processor:.1f}", f"{processor / first[size]:.2f}x")
        lines.append((what, f"{size:,}", *times, f"{own:,.0f}", f"{worker:,.0f}"))
    headings = ("pipeline", "MB", "tokens", "seconds", "processor s", "ratio", "process MiB", "worker MiB")
    notes = [f"{processes} workers. The text is 8 MB of the standard library, repeated."]
    publish("tokenizing_scale", title="Tokenizing at scale", headings=headings, rows=lines, notes=notes, save=save)


if __name__ == "__main__":
    main()
