"""`dstk schedule`: timelines in a terminal and in a pipe, as JSON and as SVG."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text

from toolkit.cli.main import main
from toolkit.config.pipeline_schedules import KINDS, schedule_of

SVG = "{http://www.w3.org/2000/svg}"


def dstk(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["schedule", *arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


def rows(out: str) -> Iterator[tuple[str, str, str]]:
    """Timeline, bubble and memory of each rank."""
    for line in out.splitlines():
        found = re.match(r"(?:stage|rank) \d+ +(.*?) +([\d.]+) %  +(.*)$", line)
        if found:
            yield found[1], found[2], found[3]


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "title"),
    [("1", "1", "1f1b: 1 pipeline rank, 1 micro-batch"), ("2", "4", "1f1b: 2 pipeline ranks, 4 micro-batches")],
)
def test_the_title_counts_ranks_and_micro_batches(
    ranks: str, micro_batches: str, title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dstk(capsys, "--pp", ranks, "--micro-batches", micro_batches).splitlines()[0] == title


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_pipe_the_timeline_has_every_pass_in_order(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = dstk(capsys, "--pp", "4", "--micro-batches", "8", "--kind", kind)
    marks = {"F": "-", "D": "=", "B": "=", "W": "~"}
    expected = [
        [(marks[each], str(micro_batch)) for each, _, micro_batch in order]
        for order in schedule_of(kind, pp=4, micro_batches=8).orders
    ]
    shown = [[(line[0], number) for number, line in re.findall(r"(\d)([-=~]+)", row)] for row, _, _ in rows(out)]
    assert shown == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pp", "4", "--micro-batches", "8"],
        ["--pp", "4", "--micro-batches", "500", "--kind", "zb-h1"],
        ["--pp", "8", "--micro-batches", "64", "--kind", "interleaved", "--virtual-stages", "4"],
        ["--pp", "40", "--micro-batches", "40", "--kind", "gpipe"],
        ["--pp", "3", "--micro-batches", "5", "--stage-times", "0.1,1,7", "--backward", "0.3", "--comm", "2"],
    ],
)
@pytest.mark.parametrize("columns", [80, 133, 200])
@pytest.mark.parametrize("colors", [True, False])
def test_no_row_is_wider_than_the_terminal(
    arguments: list[str], columns: int, colors: bool, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, value in (("FORCE_COLOR", "1"), ("COLORTERM", "truecolor"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    if not colors:
        monkeypatch.setenv("NO_COLOR", "1")
    out = dstk(capsys, *arguments)
    plain = [line.plain for line in Text.from_ansi(out).split("\n")]
    assert all(len(line) <= columns for line in plain if line.startswith((" ", "stage", "rank")))
    assert len(list(rows("\n".join(plain)))) == min(int(arguments[1]), 32)
    assert ("[38;2;255;255;255;48;2;0;114;178m" in out) == colors
    assert any("==" in line for line in plain) != colors


def test_what_does_not_fit_is_cut_in_the_middle_or_sampled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    cut = [row for row, _, _ in rows(dstk(capsys, "--pp", "4", "--micro-batches", "64"))]
    assert all(row.count("...") == 1 for row in cut)
    assert cut[0].startswith("0--1--2--3--")
    assert cut[0].endswith("63====")
    sampled = [row for row, _, _ in rows(dstk(capsys, "--pp", "32", "--micro-batches", "64"))]
    assert not any(re.search(r"[\d.]", row) for row in sampled)
    lengths = [len(row.strip()) for row in sampled]
    assert all(later <= earlier + 2 for earlier, later in pairwise(lengths))  # later stages start later and end earlier
    assert lengths[0] > lengths[-1] + 10


def test_the_json_has_the_bubble_the_memory_and_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(dstk(capsys, "--pp", "4", "--micro-batches", "8", "--json"))
    assert found["bubble"] == pytest.approx(3 / 11)
    assert found["step"] == pytest.approx(11)
    assert found["makespan"] == pytest.approx(33)
    assert [rank["in_flight"] for rank in found["ranks"]] == [4, 3, 2, 1]
    assert found["ranks"][3]["operations"][:2] == [
        {"kind": "F", "stage": 3, "micro_batch": 0, "start": 3.0, "end": 4.0},
        {"kind": "D", "stage": 3, "micro_batch": 0, "start": 4.0, "end": 6.0},
    ]
    compared = {(row["kind"], row["virtual_stages"]): row for row in found["compared"]}
    assert compared["interleaved", 2]["bubble"] == pytest.approx(1.5 / 9.5)
    assert compared["zb-h1", 1]["step"] == pytest.approx(9)
    assert compared["zb-v", 2]["step"] == pytest.approx(8.5)


def test_stage_times_transfers_and_the_backward_pass_count(capsys: pytest.CaptureFixture[str]) -> None:
    def makespan(*arguments: str) -> float:
        return json.loads(dstk(capsys, "--pp", "2", "--micro-batches", "3", "--json", *arguments))["makespan"]

    assert makespan() == pytest.approx(4 * 3)
    assert makespan("--backward", "3") == pytest.approx(4 * 4)
    assert makespan("--stage-times", "1,2") == pytest.approx(3 * 6 + 3)
    assert makespan("--comm", "0.25") == pytest.approx(13)  # there and back twice: what lies between hides the rest
    assert makespan("--comm", "0.25", "--blocking") == pytest.approx(13.5)
    chunks = ["--kind", "zb-v", "--stage-times"]
    assert makespan(*chunks, "1,1,1,1") == makespan(*chunks, "1,1") < makespan(*chunks, "1,1,1,2")
    chunked = dstk(capsys, "--pp", "2", "--micro-batches", "4", "--kind", "interleaved", "--json")
    assert json.loads(chunked)["makespan"] == pytest.approx(3 * 4 + 3 / 2)


def test_the_picture_has_every_pass_where_it_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    shape = ["--pp", "4", "--micro-batches", "8", "--kind", "interleaved", "--virtual-stages", "3"]
    dstk(capsys, *shape, "--svg", str(path))
    picture = ElementTree.parse(path).getroot()
    numbers = [text for text in picture.iter(f"{SVG}text") if text.get("class") == "number"]
    order = schedule_of("interleaved", pp=4, micro_batches=8, virtual_stages=3).orders[0]
    assert [int(text.text or "") for text in numbers[:48]] == [micro_batch for _, _, micro_batch in order]
    bars = {path.get("class"): path.get("d", "").count("M") for path in picture.iter(f"{SVG}path")}
    assert bars == {"F": 16, "F c1": 8, "D": 16, "D c1": 8}
    places = [float(text.get("x", "")) for text in numbers[:48]]
    assert all(before < after for before, after in pairwise(places))
