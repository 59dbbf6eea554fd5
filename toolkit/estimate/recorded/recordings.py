"""Finds the recording of a setup: shipped with the package, in the user's cache, or made now by a process of its own.

Nothing here imports torch. `recordings.zip` has a file for each model of the catalogue (docs/generate_recordings.py).
"""

import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.config.layout import RECOMPUTE_PERIODS
from toolkit.errors import ModelError
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.recorded.chunked_head import in_chunks
from toolkit.estimate.recorded.recording import Activations, Recording, Setup, model_key
from toolkit.files import cache_folder

SHIPPED = Path(__file__).with_name("recordings.zip")
_PACKAGE = Path(__file__).parents[2]
_SOURCES = (
    *("recorder", "parallel", "model_init/selective_recompute.py", "model_init/adapters.py", "model_init/frozen.py"),
    *(
        "estimate/recorded/recording.py",
        "estimate/parameters.py",
        "estimate/rank_parameters.py",
        "estimate/trainable.py",
    ),
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
    if (period := RECOMPUTE_PERIODS.get(setup.recompute, 1)) > 1:
        return recording(replace(setup, recompute="none"), s).mixed(
            recording(replace(setup, recompute="full"), s), period
        )
    key = model_key(setup.config)
    path = _cached(f"{key}-{setup.key}.json")
    found = _holding(s, _shipped(key).get("recordings", {}).get(setup.key, []))
    cached = [] if found else _read(path).get("recordings", [])
    found = found or _holding(s, cached)
    if found is None:
        found = _answer(
            setup.config, f"activations ({setup.key})", {"setup": asdict(replace(setup, chunks=None)), "s": s}
        )
        _write(path, {"recordings": [*(one for one in cached if one["positions"] != found["positions"]), found]})
    decoded = Recording.decoded(found)
    return decoded if setup.chunks is None else in_chunks(decoded, setup.chunks, tp=setup.tp)


@lru_cache(maxsize=8192)
def stand_in(setup: Setup, s: int) -> Setup:
    """Return the setup if it is recorded, else a recorded one that hardly needs less: for searches over many setups.

    Without sequence parallelism, of the whole model instead of a stage, of the next lower number of tensor ranks.
    Where none is recorded, the simplest of them, so that few recordings serve a whole search.
    """
    lower = 1 << (setup.tp.bit_length() - 1)
    simplest = replace(setup, sequence_parallel=False, part="whole", samples="many")
    choices = [
        replace(setup, tp=tp, sequence_parallel=parallel, part=part)
        for tp in dict.fromkeys((setup.tp, lower))
        for part in dict.fromkeys((setup.part, "whole"))
        for parallel in dict.fromkeys((setup.sequence_parallel, False))
    ]
    return next((one for one in (*choices, simplest) if _is_recorded(one, s)), simplest)


def _mixed_from(setup: Setup) -> tuple[Setup, Setup]:
    """What a setup that recomputes some of the layers is made from."""
    return replace(setup, recompute="none"), replace(setup, recompute="full")


def _is_recorded(setup: Setup, s: int) -> bool:
    if RECOMPUTE_PERIODS.get(setup.recompute, 1) > 1:
        return all(_is_recorded(one, s) for one in _mixed_from(setup))
    key = model_key(setup.config)
    if _holding(s, _shipped(key).get("recordings", {}).get(setup.key, [])):
        return True
    return _holding(s, _read(_cached(f"{key}-{setup.key}.json")).get("recordings", [])) is not None


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
        return content if content["versions"] == _made_by() else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at once. Where that cannot be done, the next process records again."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"versions": _made_by(), **content}), encoding="utf-8")
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


def _made_by() -> dict[str, str]:
    """Versions, and that of peft, which adds adapters; what is shipped has none."""
    return versions() | {"peft": str(_version("peft"))}


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
    from toolkit.estimate.recorded.recorder_process import answer  # and with it subprocess and threads

    family = json.loads(config).get("model_type")
    found = answer(json.dumps(question), f"recording the {what} of {family}")
    if "error" in found:
        reason = str(found["error"]).rstrip(".")
        raise ModelError.of("model_type", family, f"its {what.partition(' ')[0]} cannot be recorded: {reason}")
    return found
