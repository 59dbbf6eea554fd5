"""The commands of a comparison's page that train one strategy alone: each gives the compared curve, bit for bit."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.main import main

RECIPE = """\
model: {name_or_path: llama-3.2-1b}
data: {seq_len: 128}
batch: {global_batch_size: 8, micro_batch_size: 2}
optimizer: {lr: 1e-3, weight_decay: 0.1}
schedule: {name: cosine, warmup_steps: 100}
train: {steps: 1000, eval_every: 100, eval_samples: 16}
run_dir: runs/real
"""


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ranks")
def test_the_commands_of_a_page_repeat_its_curves_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text(RECIPE)
    compare = ["compare", "--recipe", "one.yaml", "--against", "reference,tp2", "--shrink", "--steps", "6"]
    with pytest.raises(SystemExit) as ended:
        main([*compare, "--reruns", "1", "--report", "page", "--json"])
    assert ended.value.code == 0
    strategies = json.loads(Path("page/comparison.json").read_text())["strategies"]
    commands = re.findall(r"<code>([^<]*dstk train[^<]*)</code>", Path("page/index.html").read_text())
    assert len(commands) == len(strategies) == 2
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for number, (command, strategy) in enumerate(zip(commands, strategies, strict=True)):
        words = html.unescape(command).replace("dstk", f"{sys.executable} -m toolkit", 1)
        done = subprocess.run(
            f"{words} run_dir=again-{number} log.level=warning",
            shell=True,  # as it is pasted
            env=environment,
            timeout=400,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        steps = [json.loads(line) for line in Path(f"again-{number}/metrics.jsonl").read_text().splitlines()]
        assert [step["loss"] for step in steps] == strategy["losses"]
        assert [step["grad_norm"] for step in steps] == strategy["grad_norms"]
