"""Verifying that a checkpoint is complete and undamaged, before anything trusts its content.

Cheap checks come first: the manifest, the list of files, their sizes, the headers of the tensors. Only if these pass
are all files hashed, in threads, divided among ranks. Problems between files (a tensor twice, or not where the index
says) are reported last, because a damaged file must be reported itself.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolkit.checkpoint import names as on_disk
from toolkit.checkpoint.manifest import FileRecord, Manifest, read_manifest
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.safetensors_header import HeaderError, TensorSpec, read_header
from toolkit.files import is_there, printable, read_json_object, reason_of
from toolkit.remote_files import RemotePath, raise_unreachable

_THREADS = 4
_CONFIGS = ("config.json", "generation_config.json", on_disk.ADAPTER_CONFIG)
_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


def verify(checkpoint: Path, *, ranks: Ranks | None = None) -> list[str]:
    """Return the problems of a checkpoint, one line each, which starts with the file; empty where it is complete.

    A collective call of `ranks`, by default of the whole job, which divide the files to hash among them. Raises
    OSError, the same on every rank, where what is behind a URL cannot be reached.
    """
    ranks = ranks or Ranks.of()
    problems, inconsistencies, files = ranks.run_on_first(lambda: _check_without_hashing(checkpoint))
    if problems:
        return problems
    for outcome in ranks.gather(_hash_outcome(checkpoint, _files_of_rank(files, ranks))):
        if isinstance(outcome, OSError):
            raise outcome
        problems += outcome
    return sorted(problems) or inconsistencies


def _check_without_hashing(checkpoint: Path) -> tuple[list[str], list[str], tuple[FileRecord, ...]]:
    """(problems, problems between files, files to hash); the last two where no file itself has a problem."""
    if not checkpoint.is_dir():
        return [f"{printable(str(checkpoint))}: {on_disk.not_a_directory(checkpoint)}"], [], ()
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        return [f"{on_disk.MANIFEST}: missing"], [], ()
    except (OSError, ValueError) as error:
        raise_unreachable(error)
        return [f"{on_disk.MANIFEST}: damaged ({reason_of(error)})"], [], ()
    if problems := [*_name_problems(checkpoint, manifest), *_file_problems(checkpoint, manifest)]:
        return problems, [], ()
    headers, problems = _headers(checkpoint, manifest)
    if problems := [*problems, *_json_problems(checkpoint, manifest)]:
        return problems, [], ()
    of_model = {path: specs for path, specs in headers.items() if _kind(path)[0] == on_disk.MODEL}
    return [], [*_kind_problems(headers), *index_problems(checkpoint, of_model)], manifest.files


def _name_problems(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    aside = on_disk.parse_temporary_name(checkpoint.name)
    step = on_disk.step_of(aside[0] if aside else checkpoint.name)
    if step is not None and step != manifest.step:
        yield f"{on_disk.MANIFEST}: of step {manifest.step}, in the directory of step {step}"
    paths = {file.path for file in manifest.files}
    for path in sorted(paths):
        if path.lower().endswith(_PICKLES):
            yield f"{path}: a pickle file, which no checkpoint contains"
    if on_disk.TRAINER_STATE not in paths:
        yield f"{on_disk.TRAINER_STATE}: not in the manifest"
    if not any(path in (on_disk.SINGLE, on_disk.ADAPTERS) or path.startswith(f"{on_disk.MODEL}-") for path in paths):
        yield f"{on_disk.SINGLE}: not in the manifest"


def _file_problems(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    expected = {file.path: file.size for file in manifest.files}
    seen = set()
    walked = _walk(checkpoint)
    if isinstance(checkpoint, RemotePath):
        walked = ((path, None, size) for path, size in sorted(checkpoint.sizes().items()))
    for path, problem, size in walked:
        seen.add(path)
        if problem is not None:
            yield f"{printable(path)}: {problem}"
        elif path not in expected and path != on_disk.MANIFEST:
            yield f"{printable(path)}: not in the manifest"
        elif path != on_disk.MANIFEST and size != expected[path]:
            yield f"{path}: {size} bytes, where {expected[path]} were written"
    for path in sorted(expected.keys() - seen):
        yield f"{path}: missing"


def _walk(top: Path) -> Iterator[tuple[str, str | None, int]]:
    """(path inside `top`, what is wrong with it, size) of everything but directories. Follows no links."""
    unreadable: list[OSError] = []
    for folder, folders, files in os.walk(top, onerror=unreadable.append):
        for path in sorted(Path(folder, name) for name in (*folders, *files)):
            try:
                status = path.lstat()
            except OSError as error:
                unreadable.append(error)
                continue
            if stat.S_ISLNK(status.st_mode):
                yield str(path.relative_to(top)), "a symbolic link, which no checkpoint contains", 0
            elif not stat.S_ISDIR(status.st_mode):
                is_regular = stat.S_ISREG(status.st_mode)
                yield str(path.relative_to(top)), None if is_regular else "not a regular file", status.st_size
    for problem in unreadable:
        yield str(Path(problem.filename).relative_to(top)), f"cannot be read ({reason_of(problem)})", 0


def _json_problems(checkpoint: Path, manifest: Manifest) -> Iterator[str]:
    for path in sorted({file.path for file in manifest.files} & {on_disk.TRAINER_STATE, *_CONFIGS}):
        try:
            read_json_object(checkpoint / path)
        except (OSError, ValueError) as error:
            raise_unreachable(error)
            yield f"{path}: cannot be read ({reason_of(error)})"


def _headers(checkpoint: Path, manifest: Manifest) -> tuple[dict[str, dict[str, TensorSpec]], list[str]]:
    """The tensors of each file, and what is wrong with the files."""
    headers: dict[str, dict[str, TensorSpec]] = {}
    problems = []
    for record in manifest.files:
        if not record.path.endswith(".safetensors"):
            continue
        if on_disk.kind_of(record.path) is None:
            problems.append(f"{record.path}: not the name of a tensor file")
            continue
        try:
            headers[record.path] = read_header(checkpoint / record.path)
        except (OSError, HeaderError) as error:
            raise_unreachable(error)
            problems.append(f"{record.path}: cannot be read ({reason_of(error)})")
    return headers, problems


def _kind(path: str) -> tuple[str, int, int]:
    kind = on_disk.kind_of(path)
    assert kind is not None, path
    return kind


def _kind_problems(files: Mapping[str, Mapping[str, TensorSpec]]) -> Iterator[str]:
    """Check that each kind has all of its files, each tensor once, and only tensors of the model in their shapes."""
    model: dict[str, TensorSpec] = {}
    kinds: dict[str, list[str]] = {}
    for path in files:
        kinds.setdefault(_kind(path)[0], []).append(path)
    for kind in sorted(kinds, key=lambda kind: kind != on_disk.MODEL):
        paths = kinds[kind]
        numbers = sorted(_kind(path)[1:] for path in paths)
        if numbers != [(i + 1, len(paths)) for i in range(len(paths))]:
            yield f"{sorted(paths)[0]}: not all files of {kind} are in the manifest"
        names: set[str] = set()
        for path in sorted(paths):
            for name, spec in files[path].items():
                if name in names:
                    yield f"{path}: {name} is also in another file"
                elif kind != on_disk.MODEL and (
                    name not in model or spec.shape != on_disk.state_shape(kind, model[name].shape)
                ):
                    yield f"{path}: {name} {list(spec.shape)} is not a parameter of the model"
                names.add(name)
                if kind == on_disk.MODEL:
                    model[name] = spec


def index_problems(
    folder: Path, files: Mapping[str, Mapping[str, TensorSpec]], *, follow: bool = False
) -> Iterator[str]:
    """Check the index of a model in several files. `files`: the tensors in each."""
    if on_disk.SINGLE in files or on_disk.ADAPTERS in files:
        if is_there(folder / on_disk.INDEX):
            yield f"{on_disk.INDEX}: not needed beside {on_disk.SINGLE}"
        return
    try:
        weight_map = read_json_object(folder / on_disk.INDEX, follow=follow).get("weight_map")
    except FileNotFoundError:
        yield f"{on_disk.INDEX}: missing"
        return
    except (OSError, ValueError) as error:
        raise_unreachable(error)
        yield f"{on_disk.INDEX}: cannot be read ({reason_of(error)})"
        return
    actual = {name: path for path, names in files.items() for name in names}
    if not isinstance(weight_map, dict) or not weight_map:
        yield f"{on_disk.INDEX}: it has no weight_map"
        return
    for name in sorted(weight_map.keys() | actual.keys()):
        if weight_map.get(name) != actual.get(name):
            where = f"in {actual[name]}" if name in actual else "in no file"
            listed = printable(weight_map.get(name, "nothing"))
            yield f"{on_disk.INDEX}: {printable(name)} is {where}, the index says {listed}"
            return


def _files_of_rank(records: Sequence[FileRecord], ranks: Ranks) -> list[FileRecord]:
    """The files that this rank hashes: the largest first, each assigned to the rank with the fewest bytes."""
    load = [0] * ranks.size
    of_rank = []
    for record in sorted(records, key=lambda record: (-record.size, record.path)):
        least = load.index(min(load))
        load[least] += record.size + 1
        if least == ranks.rank:
            of_rank.append(record)
    return of_rank


def _hash_outcome(checkpoint: Path, records: Iterable[FileRecord]) -> list[str] | OSError:
    """The problems of files; or why they cannot be told, which is for all ranks to raise."""
    try:
        return _hash_problems(checkpoint, records)
    except OSError as error:
        return error


def _hash_problems(checkpoint: Path, records: Iterable[FileRecord]) -> list[str]:
    def problem(record: FileRecord) -> str | None:
        try:
            is_same = on_disk.hash_file(checkpoint / record.path) == record.sha256
        except OSError as error:
            raise_unreachable(error)
            return f"{record.path}: cannot be read ({reason_of(error)})"
        return None if is_same else f"{record.path}: its sha256 differs from what was written"

    with ThreadPoolExecutor(_THREADS) as pool:
        return [text for text in pool.map(problem, records) if text is not None]
