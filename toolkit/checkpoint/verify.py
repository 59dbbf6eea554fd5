"""Whether a checkpoint is what a save left: found out without an engine, before anything trusts a byte of it.

What costs nothing comes first: the manifest, which files there are, their sizes, the headers of the tensors. Only when
all of that holds is everything hashed, by threads, and shared over ranks. That files fit each other (every tensor once,
where the index says) is reported last: where a file is damaged, it is that file which must be named.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.checkpoint.header import HeaderError, TensorSpec, read_header
from toolkit.checkpoint.manifest import FileRecord, Manifest, ManifestError, read_manifest
from toolkit.checkpoint.names import INDEX, MANIFEST, MODEL, SINGLE, TRAINER_STATE, kind_of, shown, step_of, unfinished
from toolkit.checkpoint.plain_file import hash_plain, read_json_object
from toolkit.checkpoint.ranks import Ranks

_THREADS = 4
_CONFIGS = ("config.json", "generation_config.json")
_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


def verify(checkpoint: Path, *, ranks: Ranks | None = None) -> list[str]:
    """What is wrong with a checkpoint, one line a problem, each opening with the file; empty where it is whole.

    A collective call of `ranks`, by default of all of the job: each hashes its share of the files.
    """
    ranks = ranks or Ranks.joined()
    look = ranks.from_first(lambda: _look(checkpoint))
    if look.problems:
        return look.problems
    found = ranks.gather(_hash_problems(checkpoint, _share(look.files, ranks)))
    return sorted(problem for part in found for problem in part) or look.misfits


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What one sees without hashing. `misfits`: problems between files, when none has a problem of its own."""

    problems: list[str]
    misfits: list[str] = field(default_factory=list)
    files: tuple[FileRecord, ...] = ()


def _look(checkpoint: Path) -> _Look:
    if not checkpoint.is_dir():
        return _Look(problems=[f"{shown(str(checkpoint))}: no such directory"])
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        return _Look(problems=[f"{MANIFEST}: missing"])
    except (OSError, ManifestError) as error:
        return _Look(problems=[f"{MANIFEST}: damaged ({_reason(error)})"])
    problems = [*_name_problems(checkpoint, manifest), *_file_problems(checkpoint, manifest)]
    if problems:
        return _Look(problems=problems)
    headers, problems = _headers(checkpoint, manifest)
    problems += _json_problems(checkpoint, manifest)
    if problems:
        return _Look(problems=problems)
    of_model = {path: specs for path, specs in headers.items() if _kind(path)[0] == MODEL}
    misfits = [*_kind_problems(headers), *index_problems(checkpoint, of_model)]
    return _Look(problems=[], misfits=misfits, files=manifest.files)


def _name_problems(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    aside = unfinished(checkpoint.name)
    step = step_of(aside[0] if aside else checkpoint.name)
    if step is not None and step != manifest.step:
        yield f"{MANIFEST}: of step {manifest.step}, in the directory of step {step}"
    paths = {file.path for file in manifest.files}
    for path in sorted(paths):
        if path.lower().endswith(_PICKLES):
            yield f"{path}: a file of pickles, which no checkpoint holds"
    if TRAINER_STATE not in paths:
        yield f"{TRAINER_STATE}: not in the manifest"
    if not any(path == SINGLE or path.startswith(f"{MODEL}-") for path in paths):
        yield f"{SINGLE}: not in the manifest"


def _file_problems(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    expected = {file.path: file.size for file in manifest.files}
    seen = set()
    for path, problem, size in _walk(checkpoint):
        seen.add(path)
        if problem is not None:
            yield f"{shown(path)}: {problem}"
        elif path not in expected and path != MANIFEST:
            yield f"{shown(path)}: not in the manifest"
        elif path != MANIFEST and size != expected[path]:
            yield f"{path}: {size} bytes, where {expected[path]} were written"
    for path in sorted(expected.keys() - seen):
        yield f"{path}: missing"


def _walk(top: Path) -> Iterator[tuple[str, str | None, int]]:
    """(path inside `top`, what is wrong with it, size) of all but directories. Follows no link."""
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            entries = sorted(os.scandir(top / folder), key=lambda entry: entry.name)
        except OSError as error:
            yield folder or ".", f"cannot be read ({_reason(error)})", 0
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                yield path, "a symbolic link, which no checkpoint holds", 0
            elif entry.is_dir(follow_symlinks=False):
                folders.append(path)
            else:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError as error:
                    yield path, f"cannot be read ({_reason(error)})", 0
                    continue
                is_plain = stat.S_ISREG(status.st_mode)
                yield path, None if is_plain else "not a plain file", status.st_size


def _json_problems(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    for path in sorted({file.path for file in manifest.files} & {TRAINER_STATE, *_CONFIGS}):
        try:
            read_json_object(checkpoint / path)
        except (OSError, ValueError) as error:
            yield f"{path}: cannot be read ({_reason(error)})"


def _headers(checkpoint: Path, manifest: Manifest) -> tuple[dict[str, dict[str, TensorSpec]], list[str]]:
    """The tensors of each file, and what is wrong with a file."""
    headers: dict[str, dict[str, TensorSpec]] = {}
    problems = []
    for record in manifest.files:
        if not record.path.endswith(".safetensors"):
            continue
        if kind_of(record.path) is None:
            problems.append(f"{record.path}: not the name of a file of tensors")
            continue
        try:
            headers[record.path] = read_header(checkpoint / record.path)
        except (OSError, HeaderError) as error:
            problems.append(f"{record.path}: cannot be read ({_reason(error)})")
    return headers, problems


def _kind(path: str) -> tuple[str, int, int]:
    found = kind_of(path)
    assert found is not None, path
    return found


def _kind_problems(files: Mapping[str, Mapping[str, TensorSpec]]) -> Iterator[str]:
    """Every kind has all of its files, a tensor once, and no tensor that the model has not, in another shape."""
    model: dict[str, TensorSpec] = {}
    kinds: dict[str, list[str]] = {}
    for path in files:
        kinds.setdefault(_kind(path)[0], []).append(path)
    for kind, paths in sorted(kinds.items(), key=lambda item: item[0] != MODEL):
        numbers = sorted(_kind(path)[1:] for path in paths)
        if numbers != [(i + 1, len(paths)) for i in range(len(paths))]:
            yield f"{sorted(paths)[0]}: not all files of {kind} are in the manifest"
        found: set[str] = set()
        for path in sorted(paths):
            for name, spec in files[path].items():
                if name in found:
                    yield f"{path}: {name} is in another file too"
                elif kind != MODEL and (name not in model or model[name].shape != spec.shape):
                    yield f"{path}: {name} {list(spec.shape)} is no parameter of the model"
                found.add(name)
                if kind == MODEL:
                    model[name] = spec


def index_problems(
    folder: Path, files: Mapping[str, Mapping[str, TensorSpec]], *, follow: bool = False
) -> Iterator[str]:
    """Whether the index of a model in several files says where its tensors are. `files`: the tensors in each."""
    is_there = os.path.lexists(folder / INDEX)
    if SINGLE in files:
        if is_there:
            yield f"{INDEX}: there is no need of it beside {SINGLE}"
        return
    try:
        weight_map = read_json_object(folder / INDEX, follow=follow).get("weight_map")
    except FileNotFoundError:
        yield f"{INDEX}: missing"
        return
    except (OSError, ValueError) as error:
        yield f"{INDEX}: cannot be read ({_reason(error)})"
        return
    actual = {name: path for path, names in files.items() for name in names}
    if not isinstance(weight_map, dict) or not weight_map:
        yield f"{INDEX}: it has no weight_map"
        return
    for name in sorted(weight_map.keys() | actual.keys()):
        if weight_map.get(name) != actual.get(name):
            where = f"in {actual[name]}" if name in actual else "in no file"
            yield f"{INDEX}: {shown(name)} is {where}, the index says {shown(weight_map.get(name, 'nothing'))}"
            return


def _share(records: Sequence[FileRecord], ranks: Ranks) -> list[FileRecord]:
    """This rank's: the largest file goes to the rank that has the fewest bytes, and so on."""
    load = [0] * ranks.size
    mine = []
    for record in sorted(records, key=lambda record: (-record.size, record.path)):
        least = load.index(min(load))
        load[least] += record.size + 1
        if least == ranks.rank:
            mine.append(record)
    return mine


def _hash_problems(checkpoint: Path, records: Iterable[FileRecord]) -> list[str]:
    def problem(record: FileRecord) -> str | None:
        try:
            is_same = hash_plain(checkpoint / record.path) == record.sha256
        except OSError as error:
            return f"{record.path}: cannot be read ({_reason(error)})"
        return None if is_same else f"{record.path}: its sha256 differs from what was written"

    with ThreadPoolExecutor(_THREADS) as pool:
        return [found for found in pool.map(problem, records) if found is not None]


def _reason(error: Exception) -> str:
    return shown(error.strerror or str(error)) if isinstance(error, OSError) else shown(str(error))
