"""Finds the recording of a rank's pass: shipped with the package, in the user's cache, or made now by another process.

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
from toolkit.estimate.computation import Attention
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.recorded.activations import Activations
from toolkit.estimate.recorded.chunked_head import has_hidden_size, in_chunks
from toolkit.estimate.recorded.recording import RankPass, Recording, model_key
from toolkit.files import cache_folder

SHIPPED = Path(__file__).with_name("recordings.zip")
_PACKAGE = Path(__file__).parents[2]
_SOURCES = (
    "recorder",
    "parallel",
    "model_init/selective_recompute.py",
    "model_init/adapters.py",
    "model_init/frozen.py",
    "estimate/computation.py",
    "estimate/recorded/recording.py",
    "estimate/parameters.py",
    "estimate/rank_parameters.py",
    "estimate/trainable.py",
    "models/tensor_plan.py",
    "models/families",
    "models/families.json",
)
"""Files whose code decides what is recorded, beside torch and transformers."""


@lru_cache(maxsize=8192)
def activations(rank_pass: RankPass, samples: int, positions: int) -> Activations:
    """Return the activations of micro-batches of so many samples and positions.

    Raises ModelError for what cannot be recorded.
    """
    return recording(rank_pass, positions).at(samples, positions)


@lru_cache(maxsize=256)
def parameters(config: str, trainable: str = "") -> ModelParameters:
    """Return the parameters of a config, which is text as `config_text` writes it, and which of them train.

    `trainable`: as in Computation. Raises ModelError and RunError.
    """
    key = model_key(config)
    selection = f"-{model_key(trainable)}" if trainable else ""
    path = _cached(f"{key}{selection}.json")
    shipped = None if trainable else _shipped(key).get("parameters")
    known = shipped or _read(path).get("parameters")
    if known is None:
        known = _ask_recorder(config, "parameters", {"config": config, "trainable": trainable})
        _write(path, {"parameters": known})
    return ModelParameters.decoded(known)


def recording(rank_pass: RankPass, positions: int) -> Recording:
    """Return the recording of a pass that holds for so many positions.

    Raises ModelError for a model that cannot be recorded, and RunError where the process that records fails.
    """
    period = RECOMPUTE_PERIODS.get(rank_pass.layout.recompute, 1)
    if period > 1:
        without, recomputed = _mixed_from(rank_pass)
        return recording(without, positions).mixed(recording(recomputed, positions), period)
    rank_pass = _with_distinct_logits(rank_pass)
    encoded = _known(rank_pass, positions)
    if encoded is None:
        encoded = _record(rank_pass, positions)
    decoded = Recording.decoded(encoded)
    if rank_pass.chunks is None:
        return decoded
    return in_chunks(decoded, rank_pass.chunks, tp=rank_pass.layout.tp)


def _with_distinct_logits(rank_pass: RankPass) -> RankPass:
    """Return the pass; where its logits have the size of a hidden state, that of a vocabulary with a row more a rank.

    `in_chunks` finds logits by their size. Known error: the row.
    """
    chunks = rank_pass.chunks
    if chunks is None or rank_pass.part in ("first", "middle"):
        return rank_pass
    tp = rank_pass.layout.tp
    vocabulary = chunks.vocabulary
    while has_hidden_size(-(-vocabulary // tp), chunks.hidden):
        vocabulary += tp
    if vocabulary == chunks.vocabulary:
        return rank_pass
    config = json.loads(rank_pass.config)
    language_config = config.get("text_config") or config
    language_config["vocab_size"] = vocabulary
    larger = replace(chunks, vocabulary=vocabulary)
    return replace(rank_pass, config=json.dumps(config, sort_keys=True), chunks=larger)


def _known(rank_pass: RankPass, positions: int) -> dict[str, Any] | None:
    """Return the recording that is shipped or in the user's cache; None where there is none for so many positions."""
    shipped = _shipped(model_key(rank_pass.config)).get("recordings", {}).get(rank_pass.key, [])
    return _holding(positions, shipped) or _holding(positions, _in_cache(rank_pass))


def _in_cache(rank_pass: RankPass) -> list[dict[str, Any]]:
    """Return the recordings of a pass in the user's cache, each for other positions."""
    cached: list[dict[str, Any]] = _read(_cache_file(rank_pass)).get("recordings", [])
    return cached


def _cache_file(rank_pass: RankPass) -> Path:
    return _cached(f"{model_key(rank_pass.config)}-{rank_pass.key}.json")


def _record(rank_pass: RankPass, positions: int) -> dict[str, Any]:
    """Let the recorder record a pass, and store its reply in the user's cache."""
    question = {"pass": asdict(replace(rank_pass, chunks=None)), "s": positions}
    recorded = _ask_recorder(rank_pass.config, "activations", question, f" ({rank_pass.description})")
    others = [other for other in _in_cache(rank_pass) if other["positions"] != recorded["positions"]]
    _write(_cache_file(rank_pass), {"recordings": [*others, recorded]})
    return recorded


@lru_cache(maxsize=8192)
def stand_in(rank_pass: RankPass, positions: int) -> RankPass:
    """Return the pass if it is recorded, else a recorded one that hardly needs less: for searches over many setups.

    Such a pass has no sequence parallelism, is of the whole model instead of a stage, or has the next lower power of
    two of tensor-parallel ranks; in place of the toolkit's attention it may have PyTorch's. Where none is recorded, it
    is the simplest of these, so that few recordings serve a whole search.
    """
    layout = rank_pass.layout
    lower = 1 << (layout.tp.bit_length() - 1)
    without = replace(layout, sequence_parallel=False)
    simplest = replace(rank_pass, layout=without, part="whole", samples="many")
    computation = rank_pass.computation
    kinds: tuple[Attention, ...] = ("blocks", "sdpa") if computation.attention == "blocks" else (computation.attention,)
    choices = [
        replace(
            rank_pass,
            layout=replace(layout, tp=tp, sequence_parallel=parallel),
            part=part,
            computation=replace(computation, attention=kind),
        )
        for kind in kinds
        for tp in dict.fromkeys((layout.tp, lower))
        for part in dict.fromkeys((rank_pass.part, "whole"))
        for parallel in dict.fromkeys((layout.sequence_parallel, False))
    ]
    return next((choice for choice in (*choices, simplest) if _is_recorded(choice, positions)), simplest)


def _mixed_from(rank_pass: RankPass) -> tuple[RankPass, RankPass]:
    """Return the two passes, without and with recomputation, that one with some recomputed layers is made from."""
    return rank_pass.recomputing("none"), rank_pass.recomputing("full")


def _is_recorded(rank_pass: RankPass, positions: int) -> bool:
    if RECOMPUTE_PERIODS.get(rank_pass.layout.recompute, 1) > 1:
        return all(_is_recorded(part, positions) for part in _mixed_from(rank_pass))
    return _known(rank_pass, positions) is not None


def _cached(name: str) -> Path:
    return cache_folder() / "recordings" / name


def _holding(positions: int, known: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first of some recordings, as JSON, that is valid for so many positions; None where none is."""
    for encoded in known:
        least, beyond = encoded["positions"]
        if least <= positions and (beyond is None or positions < beyond):
            return encoded
    return None


@cache
def _shipped(key: str) -> dict[str, Any]:
    """Return what is shipped for a model (parameters, recordings by setup); empty if other releases are installed."""
    try:
        with zipfile.ZipFile(SHIPPED) as archive:
            content: dict[str, Any] = json.loads(archive.read(f"{key}.json"))
    except (OSError, KeyError, zipfile.BadZipFile):
        return {}
    if any(installed not in (None, _release(content["versions"][name])) for name, installed in _installed().items()):
        return {}
    return content


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a cached file; empty if other versions recorded it or it cannot be read."""
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
    """Return what decides the content of recordings: library versions, and a checksum of the code that records."""
    checksum = 0
    for name in _SOURCES:
        inside = (path for path in (_PACKAGE / name).rglob("*") if path.suffix in (".py", ".json"))
        for path in sorted(inside) or [_PACKAGE / name]:
            checksum = zlib.crc32(path.read_bytes(), checksum)
    libraries = {name: str(_version(name)) for name in _LIBRARIES}
    return libraries | {"code": f"{checksum:08x}"}


def _made_by() -> dict[str, str]:
    """Return the versions, with that of peft, which adds adapters; shipped recordings have none."""
    return versions() | {"peft": str(_version("peft"))}


_LIBRARIES = ("torch", "transformers")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """Return the release of a version: 2.13 of 2.13.0+cu130."""
    return ".".join(version.split(".")[:2])


@cache
def _installed() -> dict[str, str | None]:
    """Return the installed release of each library; None for one that is not there."""
    versions = {name: _version(name) for name in _LIBRARIES}
    return {name: None if version is None else _release(version) for name, version in versions.items()}


def _ask_recorder(config: str, kind: str, question: dict[str, Any], details: str = "") -> dict[str, Any]:
    """Ask the recorder for the parameters or the activations (`kind`) of a config. Raises ModelError and RunError."""
    from toolkit.estimate.recorded.recorder_process import ask  # and with it subprocess and threads

    family = json.loads(config).get("model_type")
    reply = ask(json.dumps(question), f"the {kind} of {family}{details}")
    if "error" in reply:
        reason = str(reply["error"]).rstrip(".")
        raise ModelError.of("model_type", family, f"its {kind} cannot be recorded: {reason}")
    return reply
