"""docs/which-layout.md says what `dstk memory` prints: each row fits, with the figures that stand in it."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "which-layout.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
assert len(ROWS) > 15
GIB = 2**30


def estimate(model: str, options: str, capsys: pytest.CaptureFixture[str]) -> Any:
    words = shlex.split(options)
    length = [] if "--seq" in words else ["--seq", "4096"]
    with pytest.raises(SystemExit) as ended:
        main(["memory", "--model", model, "--gpu", "H100-80", *length, *words, "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    return json.loads(printed.out)


@pytest.mark.daily
@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:2]).replace("`", "") for row in ROWS])
def test_a_row_is_what_the_command_prints(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    model, options, gib, micro, simpler, because = row
    found = estimate(model.strip("`"), options.strip("`"), capsys)
    assert found["fits"]
    assert (f"{found['total'] / GIB:.1f}", str(found["largest_micro_batch"])) == (gib, micro)
    if simpler:
        _, other, needs = simpler.split("`")
        assert f"{estimate(model.strip('`'), other, capsys)['total'] / GIB:.1f}" == needs.strip()
    host = re.search(r"(\d+) GiB of host memory", because)
    assert bool(host) == ("--offload-optimizer" in options)
    if host:
        assert max(sum(stage["host"].values()) for stage in found["stages"]) / GIB == pytest.approx(
            int(host[1]), abs=0.5
        )


def test_the_rows_go_from_one_gpu_to_many() -> None:
    axes = [re.findall(r"\b(?:dp|tp|pp)(\d+)", row[1]) for row in ROWS]
    assert {1, 2, 4, 8, 16, 32, 64, 512} == {math.prod(map(int, sizes)) for sizes in axes}
