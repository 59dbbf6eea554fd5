"""The folder of a report: written whole or not at all, and never over something that is not a report."""

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from toolkit.errors import ReportError

GENERATOR = '<meta name="generator" content="dstk'
"""In the head of every page of ours; how a folder is known as a report."""


def replace_folder(folder: Path, files: Collection[str], write: Callable[[Path], None]) -> Path:
    """Let `write` fill a new folder, and put it in the place of `folder`. `files` are the names a report may hold.

    Returns index.html. Raises ReportError where `folder` holds something else than a report, or cannot be written;
    then it is as it was.
    """
    check_replaceable(folder, files)
    place = folder.resolve()  # a link to a folder stays a link
    unfinished = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    outdated = place.with_name(f".{place.name}.{os.getpid()}.old")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        write(unfinished)
        if place.exists():
            place.rename(outdated)
        try:
            unfinished.rename(place)
        except OSError:
            if outdated.exists():
                outdated.rename(place)
            raise
    except OSError as error:
        raise ReportError(
            f"{folder}: the report cannot be written ({error.strerror or error}). Choose another folder."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if place.exists():
            shutil.rmtree(outdated, ignore_errors=True)
    return folder / "index.html"


def check_replaceable(folder: Path, files: Collection[str]) -> None:
    """Raise ReportError where `folder` exists and is neither empty nor a report. Costs nothing: ask before working."""
    try:
        if not folder.exists() and not folder.is_symlink():
            return
        if not folder.is_dir():
            raise ReportError(f"{folder}: not a folder. Choose another folder for the report.")
        held = sorted(path.name for path in folder.iterdir())
        foreign = [name for name in held if name not in files]
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise ReportError(
                f"{folder}: it holds {foreign[0]}{more}, which is not of a report, and a report would replace it. "
                "Choose another folder."
            )
        if held and not _is_report(folder):
            raise ReportError(
                f"{folder}: it holds {held[0]}, but no page of dstk, and a report would replace it. "
                "Choose another folder."
            )
    except OSError as error:
        raise ReportError(
            f"{folder}: cannot be read ({error.strerror or error}). Choose another folder for the report."
        ) from error


def _is_report(folder: Path) -> bool:
    page = folder / "index.html"
    if not page.is_file():
        return False
    with page.open(encoding="utf-8", errors="replace") as file:
        return GENERATOR in file.read(4000)
