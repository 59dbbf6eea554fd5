"""RunLog: the loss and gradient norm that a run logged, from the files of this toolkit and of others.

read_log(Path("runs/demo")) reads metrics.jsonl and other JSON lines, the Trainer's trainer_state.json, TensorBoard
events, and tables (CSV, TSV). docs/compare.md says what each must look like.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import DataError
from toolkit.parity.tensorboard_events import scalars
from toolkit.units import some

_NAMES: Mapping[str, Sequence[str]] = json.loads(Path(__file__).with_name("log_names.json").read_text(encoding="utf-8"))
"""Names that libraries give each quantity: also Megatron-LM, nanotron, NeMo, torchtitan and DeepSpeed."""
_ADVICE = "Give a run directory, or a log that docs/compare.md lists."

Kind = Literal["JSON lines", "Trainer", "TensorBoard", "table"]
Series = dict[str, dict[int, Any]]
"""Name -> step -> value, in the order of steps."""


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """The log of one run: its values by step (from 1), in the order of steps."""

    label: str
    file: Path
    kind: Kind
    loss_name: str
    losses: Mapping[int, float]
    grad_norms: Mapping[int, float]
    rates: Mapping[int, float]
    batches: Mapping[int, str]
    is_mean: bool
    """A loss is the mean over the steps since the one before it, as the Trainer logs it."""

    @property
    def is_whole(self) -> bool:
        """Whether this is a metrics.jsonl with every step from the first."""
        return self.kind == "JSON lines" and list(self.losses) == list(range(1, len(self.losses) + 1))

    def spans(self) -> Iterator[tuple[int, int, float]]:
        """Yield (a, b, loss) for each loss, which is of the steps a + 1 to b."""
        before = 0
        for step, loss in self.losses.items():
            yield before if self.is_mean else step - 1, step, loss
            before = step

    def resolution(self, logged: Mapping[int, float]) -> float:
        """Return what the decimals that a table or the Trainer writes leave open, over the smallest value."""
        values = [repr(abs(value)) for value in logged.values() if value and math.isfinite(value)]
        if self.kind not in ("Trainer", "table") or not values:
            return 0.0
        decimals = max(len(value.partition(".")[2]) for value in values)
        digits = max(len(value.replace(".", "").lstrip("0")) for value in values)
        return 0.5 * max(10.0**-decimals / min(map(float, values)), 10.0 ** (1 - digits))


def read_log(path: Path, names: Sequence[str] = ()) -> RunLog:
    """Read a file, or the directory of a run. `names` are what the user calls the loss. Raises DataError."""
    files = _find(path)
    kind, series = _read(files)
    known = ("loss",) if kind == "Trainer" else _NAMES["losses"]
    losses = [name for name in names if name in series]
    if not losses:
        losses = [name for name in known if name in series]
    if not series:
        raise DataError(f"{files[0]}: it has no step. Give a run that has trained.")
    if len(losses) != 1:
        others = sorted(series.keys() - {*_NAMES["steps"]}, key=lambda name: ("loss" not in name.lower(), name))
        if not others:
            raise DataError(f"{files[0]}: its steps have no values. Give a run that logs its loss.")
        which = "it has several losses:" if losses else "it has no loss under a known name, only"
        raise DataError(f"{files[0]}: {which} {some(losses or others, 8)}. Choose one with --loss NAME.")
    (loss,) = losses
    unit = 1
    if loss.startswith("Train/Samples/") or files[0].name.startswith("Train_Samples_"):
        unit = math.gcd(*series[loss]) or 1  # DeepSpeed counts samples, and logs every step
    offset = 0 in series[loss] and "val" not in loss.lower()  # a validation before training is of step 0

    def values(*names: str) -> dict[int, Any]:
        logged = next((series[name] for name in names if name in series), {})
        return {step // unit + offset: value for step, value in logged.items()}

    try:
        return RunLog(
            label=str(path),
            file=files[0],
            kind=kind,
            loss_name=loss,
            losses={step: _number(value) for step, value in values(loss).items()},
            grad_norms={step: _number(value) for step, value in values(*_NAMES["grad_norms"]).items()},
            rates={step: rate for step, rate in values(*_NAMES["rates"]).items() if isinstance(rate, int | float)},
            batches={step: str(batch) for step, batch in values("batch").items()},
            is_mean=(kind == "Trainer" and loss == "loss") or (loss == "train/loss" and "train/epoch" in series),
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{files[0]}: a loss or gradient norm is not a number ({error}). {_ADVICE}") from None


def _find(path: Path) -> list[Path]:
    """Return the file, or the files of a directory to read."""
    if not path.is_dir():
        return [path]
    names = ("metrics.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json")
    matches = [sorted(path.glob(name), key=lambda file: (len(str(file)), file))[-1:] for name in names]
    files = next(filter(None, matches), []) or sorted(path.rglob("*tfevents*"))
    folders = sorted({str(file.parent) for file in files})
    if len(folders) != 1:
        content = f"TensorBoard events of {len(folders)} runs ({some(folders)})" if folders else "nothing that is a log"
        raise DataError(f"{path}: this directory has {content}. {_ADVICE}")
    return files


def _read(files: Sequence[Path]) -> tuple[Kind, Series]:
    file = files[0]
    number = 0
    is_open = False
    series: Series = {}
    try:
        if file.exists() and not file.is_file():
            raise ValueError("not a regular file")
        if "tfevents" in file.name:
            for part in files:
                for step, tag, value in scalars(part.read_bytes()):
                    _add(series, step, {tag: value})
            return "TensorBoard", series
        text = file.read_text(encoding="utf-8-sig")
        is_open = not text.endswith("\n")  # a run may still be writing the last line
        kind, number, entries = _entries(text, is_json=file.suffix in (".json", ".jsonl"))
    except (OSError, ValueError, csv.Error) as error:
        reason = "not text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise DataError(f"{file}: cannot be read ({reason}). {_ADVICE}") from error
    for place, entry in enumerate(entries, start=1):
        try:
            values = json.loads(entry) if isinstance(entry, str) else entry
            by_name = {name.strip().lower(): value for name, value in values.items()}
            at = _number(next(by_name[name] for name in _NAMES["steps"] if name in by_name))
            if at < 0 or at % 1:
                raise ValueError
        except (ValueError, TypeError, AttributeError, StopIteration, RecursionError):
            if is_open and place == len(entries):
                break
            advice = "A line of metrics.jsonl, or of another log, has a step and a loss."
            raise DataError(f"{file}:{number + place}: not a step. {advice}") from None
        _add(series, int(at), {name: value for name, value in values.items() if value != ""})
    return kind, series


def _entries(text: str, *, is_json: bool) -> tuple[Kind, int, Sequence[Any]]:
    """Return the kind of a log, the lines above its first entry, and the entries: objects, or lines with one each."""
    lines = text.splitlines()
    if is_json or text.lstrip().startswith("{"):
        try:
            state = json.loads(text)
        except (ValueError, RecursionError):
            state = None
        is_trainer = isinstance(state, dict) and isinstance(state.get("log_history"), list)
        return ("Trainer", 0, state["log_history"]) if is_trainer else ("JSON lines", 0, lines)
    separator = next((mark for mark in "\t;" if lines and mark in lines[0]), ",")
    names = None
    try:
        columns = len([float(cell) for cell in next(csv.reader(lines, delimiter=separator), [])])
        names = {2: ["step", "loss"], 3: ["step", "loss", "grad_norm"]}.get(columns, ["loss"])
    except ValueError:
        pass  # a header
    rows = list(csv.DictReader(lines, names, restval="", delimiter=separator, skipinitialspace=True))
    if names == ["loss"]:
        rows = [{"step": str(number), **row} for number, row in enumerate(rows, start=1)]
    return "table", int(names is None), rows


def _add(series: Series, step: int, entry: Mapping[str, Any]) -> None:
    for name, value in entry.items():
        values = series.setdefault(name, {})
        if values and step <= next(reversed(values)):  # a run that resumed from an earlier step logs steps again
            for later in [known for known in values if known >= step]:
                del values[later]
        values[step] = value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return math.nan if value is None else float(value)  # what was not finite is null
