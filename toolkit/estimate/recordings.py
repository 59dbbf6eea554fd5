"""Finds the recording of a setup: shipped with the package, in the user's cache, or made now by a process of its own.

Nothing here imports torch. `recordings.zip` has a file for each model of the catalogue (docs/generate_recordings.py).
"""

import atexit
import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError
from toolkit.estimate.recording import Activations, Recording, Setup
from toolkit.files import cache_folder

SHIPPED = Path(__file__).with_name("recordings.zip")
_PACKAGE = Path(__file__).parents[1]
_SOURCES = ("recorder", "parallel", "model_init/selective_recompute.py", "estimate/recording.py")
"""What decides, beside torch and transformers, what is recorded."""
Stored = dict[str, list[dict[str, Any]]]
"""Keys of setups -> encoded recordings, one for each span of positions that was asked for."""


@lru_cache(maxsize=8192)
def activations(setup: Setup, b: int, s: int) -> Activations:
    """Activations of micro-batches of b samples of s positions. Raises ModelError for what cannot be recorded."""
    return recording(setup, s).at(b, s)


def recording(setup: Setup, s: int) -> Recording:
    """The recording of a setup that holds for s positions. Raises ModelError where there can be none."""
    known = _shipped(setup.model_key).get(setup.key, [])
    path = cache_folder() / "recordings" / f"{setup.model_key}-{setup.key}.json"
    found = _holding(known, s) or _holding(_read(path), s)
    if found is None:
        found = _recorded(setup, s)
        _write(path, [*(one for one in _read(path) if one["positions"] != found["positions"]), found])
    return Recording.decoded(found)


def _holding(known: Iterable[dict[str, Any]], s: int) -> dict[str, Any] | None:
    spans = ((one, *one["positions"]) for one in known)
    return next((one for one, least, most in spans if least <= s and (most is None or s < most)), None)


@cache
def _shipped(model_key: str) -> Stored:
    if not SHIPPED.exists():
        return {}
    with zipfile.ZipFile(SHIPPED) as archive:
        names = {*archive.namelist()}
        name = f"{model_key}.json"
        found: Stored = json.loads(archive.read(name))["recordings"] if name in names else {}
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    """What the cache has, if the same versions recorded it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return list(content["recordings"]) if content["versions"] == versions() else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write(path: Path, recordings: list[dict[str, Any]]) -> None:
    """Replace the file at once. Without room for it the next process records again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"versions": versions(), "recordings": recordings}), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


@cache
def versions() -> dict[str, str]:
    """What decides what is recorded: versions of the libraries, and a checksum of the code that records."""
    sum_ = 0
    for name in _SOURCES:
        for path in sorted((_PACKAGE / name).rglob("*.py")) or [_PACKAGE / name]:
            sum_ = zlib.crc32(path.read_bytes(), sum_)
    return {name: version(name) for name in ("torch", "transformers")} | {"code": f"{sum_:08x}"}


def _recorded(setup: Setup, s: int) -> dict[str, Any]:
    question = {"setup": asdict(setup), "s": s}
    family = json.loads(setup.config).get("model_type")
    if sys.stderr.isatty():
        print(f"recording the activations of this {family} model ({setup.key}), once …", file=sys.stderr)
    answer = _ask(os.getpid(), json.dumps(question))
    if "error" in answer:
        reason = str(answer["error"]).rstrip(".")
        raise ModelError.of("model_type", family, f"its activations cannot be recorded: {reason}")
    return answer


@lru_cache(maxsize=1024)
def _ask(pid: int, question: str) -> dict[str, Any]:
    """Answers are remembered, refusals too. `pid`: a forked process must not share its parent's recorder."""
    process = _recorder(pid)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(question, file=process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        _recorder.cache_clear()
        return {"error": "the process that records ended. Run python -m toolkit.recorder, which says why."}
    return answer


@cache
def _recorder(pid: int) -> "subprocess.Popen[str]":
    """The process that has torch. It ends with this one: then its stdin does."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    chosen = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit.recorder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | chosen | {"DS_ACCELERATOR": "cpu"},
    )
    atexit.register(process.kill)
    return process
