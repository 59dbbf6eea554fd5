"""Finds the recording of a setup: shipped with the package, in the user's cache, or made now by a process of its own.

Nothing here imports torch. `recordings.zip` has a file for each model of the catalogue (docs/generate_recordings.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from toolkit.errors import ModelError, RunError
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.recording import Activations, Recording, Setup, model_key
from toolkit.files import cache_folder, reason_of
from toolkit.parent_process import end_with

SHIPPED = Path(__file__).with_name("recordings.zip")
_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    *("recorder", "parallel", "model_init/selective_recompute.py"),
    *("estimate/recording.py", "estimate/parameters.py", "estimate/trainable.py"),
    *("models/tensor_plan.py", "models/families", "models/families.json"),
)
"""What decides, beside torch and transformers, what is recorded."""


@lru_cache(maxsize=8192)
def activations(setup: Setup, b: int, s: int) -> Activations:
    """Activations of micro-batches of b samples of s positions. Raises ModelError for what cannot be recorded."""
    return recording(setup, s).at(b, s)


@lru_cache(maxsize=256)
def parameters(config: str, trainable: str = "") -> ModelParameters:
    """The parameters of a config, which is text as `config_text` writes it, and which of them train.

    `trainable`: as in Setup. Raises ModelError and RunError.
    """
    key, also = model_key(config), f"-{model_key(trainable)}" if trainable else ""
    path = _cached(f"{key}{also}.json")
    shipped = None if trainable else _shipped(key).get("parameters")
    known = shipped or _read(path).get("parameters")
    if known is None:
        known = _answer(config, "parameters", {"config": config, "trainable": trainable})
        _write(path, {"parameters": known})
    return ModelParameters.decoded(known)


def recording(setup: Setup, s: int) -> Recording:
    """The recording of a setup that holds for s positions.

    Raises ModelError for a model that cannot be recorded, and RunError where the process that records fails.
    """
    key = model_key(setup.config)
    path = _cached(f"{key}-{setup.key}.json")
    shipped, cached = _shipped(key).get("recordings", {}).get(setup.key, []), _read(path).get("recordings", [])
    found = _holding(s, shipped) or _holding(s, cached)
    if found is None:
        found = _answer(setup.config, f"activations ({setup.key})", {"setup": asdict(setup), "s": s})
        _write(path, {"recordings": [*(one for one in cached if one["positions"] != found["positions"]), found]})
    return Recording.decoded(found)


def _cached(name: str) -> Path:
    return cache_folder() / "recordings" / name


def _holding(s: int, known: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    spans = ((one, *one["positions"]) for one in known)
    return next((one for one, least, most in spans if least <= s and (most is None or s < most)), None)


@cache
def _shipped(key: str) -> dict[str, Any]:
    """What is shipped for a model, if the same releases are installed here: parameters, and recordings by setup."""
    try:
        with zipfile.ZipFile(SHIPPED) as archive:
            content: dict[str, Any] = json.loads(archive.read(f"{key}.json"))
    except (OSError, KeyError, zipfile.BadZipFile):
        return {}
    if any(installed not in (None, _release(content["versions"][name])) for name, installed in _installed().items()):
        return {}
    return content


def _read(path: Path) -> dict[str, Any]:
    """What the cache has, if the same versions recorded it."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content if content["versions"] == versions() else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at once. Where that cannot be done, the next process records again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"versions": versions(), **content}), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@cache
def versions() -> dict[str, str]:
    """What decides what is recorded: versions of the libraries, and a checksum of the code that records."""
    checksum = 0
    for name in _SOURCES:
        inside = (path for path in (_PACKAGE / name).rglob("*") if path.suffix in (".py", ".json"))
        for path in sorted(inside) or [_PACKAGE / name]:
            checksum = zlib.crc32(path.read_bytes(), checksum)
    libraries = {name: str(_version(name)) for name in _LIBRARIES}
    return libraries | {"code": f"{checksum:08x}"}


_LIBRARIES = ("torch", "transformers")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """2.13 of 2.13.0+cu130."""
    return ".".join(version.split(".")[:2])


@cache
def _installed() -> dict[str, str | None]:
    """The installed releases; None for a library that is not there."""
    found = {name: _version(name) for name in _LIBRARIES}
    return {name: found and _release(found) for name, found in found.items()}


def _answer(config: str, what: str, question: dict[str, Any]) -> dict[str, Any]:
    family = json.loads(config).get("model_type")
    if sys.stderr.isatty():
        print(f"recording the {what} of {family}; cached afterwards", file=sys.stderr)
    answer = _ask(os.getpid(), json.dumps(question))
    if "error" in answer:
        reason = str(answer["error"]).rstrip(".")
        raise ModelError.of("model_type", family, f"its {what.partition(' ')[0]} cannot be recorded: {reason}")
    return answer


_LOCK = threading.Lock()


@lru_cache(maxsize=1024)
def _ask(pid: int, question: str) -> dict[str, Any]:
    """Answers are remembered, refusals too. `pid`: a forked process must not share its parent's recorder.

    An answer that was not read would be taken for that of the next question: an interrupted recorder ends.
    """
    with _LOCK:
        process, errors = _recorder(pid)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(question, file=process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except BaseException as error:
            process.kill()
            _recorder.cache_clear()
            if isinstance(error, OSError | ValueError):
                code = process.wait()
                errors.seek(0)
                said = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "no message")
                reason = f"the process that records activations ended with code {code} ({reason_of(ValueError(said))})"
                raise RunError(f"{reason}. Try again, with more memory or another environment.") from None
            raise
        return answer


@cache
def _recorder(pid: int) -> "tuple[subprocess.Popen[str], IO[str]]":
    """The process that has torch, and what it prints to stderr. It ends with this one."""
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    # -P: a transformers.py in the current directory is not the library. The toolkit comes last on the path: its folder
    # may have all that is installed.
    run = (
        "import runpy, sys; sys.path.append(sys.argv.pop()); runpy.run_module('toolkit.recorder', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", run, str(_PACKAGE.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        preexec_fn=partial(end_with, pid),
    )
    return process, errors
