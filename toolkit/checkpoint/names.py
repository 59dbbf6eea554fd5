"""Names on disk, and which of the names that somebody else wrote may be followed.

RUN/latest                      one line: the name of the directory that was committed last; a hint
RUN/step-00000120/              a checkpoint; it has this name only when it is whole
RUN/.step-00000120.NONCE.tmp/   one that is being written, or deleted: rubbish when its saver is dead
RUN/.step-00000120.NONCE.old/   one that is being replaced: rubbish when step-00000120 is there, else whole

step-00000120/model.safetensors, or model-00001-of-00004.safetensors and model.safetensors.index.json
step-00000120/optimizer/exp_avg-00001-of-00004.safetensors
step-00000120/trainer_state.json, manifest.json, and beside them what transformers reads
"""

import re

MANIFEST, TRAINER_STATE, LATEST = "manifest.json", "trainer_state.json", "latest"
MODEL, OPTIMIZER = "model", "optimizer"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_STEP = re.compile(r"step-([0-9]{8,18})")
_UNFINISHED = re.compile(r"\.(step-[0-9]{8,18})\.[0-9a-f]+\.(tmp|old)")
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_FILE = re.compile(r"(?:(model)|optimizer/([a-z][a-z0-9_]*))-([0-9]{5,})-of-([0-9]{5,})\.safetensors")
_LONGEST = 1024


def step_name(step: int) -> str:
    """`step-00000120`, so that names sort as steps do."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def unfinished_name(step: int, nonce: str, suffix: str) -> str:
    """The name of a directory that is being written or deleted (`tmp`), or replaced (`old`)."""
    return f".{step_name(step)}.{nonce}.{suffix}"


def unfinished(name: str) -> tuple[str, str] | None:
    """(name of the checkpoint, `tmp` or `old`) of such a directory; None for any other name."""
    match = _UNFINISHED.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_kind(kind: str) -> bool:
    """Whether a kind of tensors can be a part of a file's name."""
    return _KIND.fullmatch(kind) is not None


def tensor_file_names(kind: str, count: int) -> list[str]:
    """The paths, inside a checkpoint, of the `count` files that hold the tensors of one kind."""
    if kind == MODEL and count == 1:
        return [SINGLE]
    stem = MODEL if kind == MODEL else f"{OPTIMIZER}/{kind}"
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def kind_of(path: str) -> tuple[str, int, int] | None:
    """(kind, number, count) of a file of tensors, the number from 1; None for any other path."""
    if path == SINGLE:
        return MODEL, 1, 1
    match = _FILE.fullmatch(path)
    return (match[1] or match[2], int(match[3]), int(match[4])) if match else None


def is_safe_path(name: object) -> bool:
    """Whether a path that a file gives stays inside the directory of that file, and can be printed."""
    return (
        isinstance(name, str)
        and is_safe_name(name)
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def is_safe_name(name: object) -> bool:
    """Whether a tensor or file may have this name: printable, and of a sensible length."""
    return isinstance(name, str) and 0 < len(name) <= _LONGEST and name.isprintable()


def shown(name: object) -> str:
    """A name that somebody else wrote, fit for one line of a message."""
    text = name if isinstance(name, str) else repr(name)
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= 200 else f"{text[:200]}…"
