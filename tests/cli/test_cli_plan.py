"""`dstk plan`: a table, JSON, one layout, reasons; and one line with exit code 2 for what cannot be planned."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.main import main

GPT2 = ["plan", "--model", "gpt2", "--gpus", "8xA100-40", "--seq", "512", "--global-batch", "64"]


def dstk(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def plans(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    return json.loads(dstk(capsys, *arguments, "--json"))["plans"]


def test_the_json_has_what_other_programs_rely_on(capsys):
    found = plans(capsys, *GPT2, "--top", "3")
    assert len(found) == 3
    for plan in found:
        assert plan["fits"]
        assert sum(plan["terms"].values()) == pytest.approx(plan["step_seconds"])
        assert plan["tokens_per_second_per_gpu"] * plan["step_seconds"] * 8 == pytest.approx(64 * 512)
        assert {"layout", "micro_batch_size", "recompute", "schedule", "memory_bytes"} <= plan.keys()


def test_one_layout_is_predicted_as_the_search_predicts_it(capsys):
    best = plans(capsys, *GPT2, "--top", "1")[0]
    assert plans(capsys, *GPT2, "--layout", best["strategy"]) == [best]
    parts = ["--layout", best["layout"], "--micro", str(best["micro_batch_size"]), "--recompute", best["recompute"]]
    assert plans(capsys, *GPT2, *parts) == [best]


def test_a_layout_that_does_not_fit_is_predicted_and_marked(capsys):
    big = ["plan", "--model", "llama-3-8b", "--gpus", "8xA100-40", "--seq", "2048", "--global-batch", "64"]
    found = plans(capsys, *big, "--layout", "dp8-z1", "--micro", "8")[0]
    assert not found["fits"]
    assert found["memory_bytes"] > 40 * 2**30
    assert "!" in dstk(capsys, *big, "--layout", "dp8-z1", "--micro", "8")


def test_what_only_training_refuses_is_predicted_with_a_note(capsys):
    with pytest.raises(SystemExit) as end:
        main([*GPT2, "--layout", "pp2-z0", "--micro", "4", "--json"])
    captured = capsys.readouterr()
    assert end.value.code == 0
    assert json.loads(captured.out)["plans"][0]["layout"] == "dp4-tp1-pp2-z0"
    assert captured.err.startswith("note: training refuses it")
    assert captured.err.count("\n") == 1


def test_the_table_names_the_terms_and_the_cost(capsys):
    out = dstk(capsys, *GPT2, "--tokens", "1e10", "--price", "2")
    assert "compute" in out
    assert "USD" in out


OFFLOADED = ["plan", "--model", "opt-6.7b", "--gpus", "1xRTX4090", "--seq", "2048", "--global-batch", "8"]


def test_offload_says_how_much_of_a_hosts_memory_it_takes(capsys):
    layout = ["--layout", "z3-recompute-offload-m1"]
    held = plans(capsys, *OFFLOADED, *layout)[0]["host_bytes_per_node"]
    printed = dstk(capsys, *OFFLOADED, *layout)
    assert f"offload keeps up to {held / 2**30:.2f} GiB in the memory of a host, of 1.82 TiB" in printed
    assert "memory of a host" not in dstk(capsys, *OFFLOADED, "--layout", "z3-recompute-m1")


def test_a_narrow_table_breaks_layouts_between_their_parts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = dstk(capsys, *OFFLOADED, "--layout", "z3-recompute-offload-m1").splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith(" dp1-"))
    parts = [line.split()[0] for line in lines[first : first + 2]]
    assert parts == ["dp1-tp1-pp1-z3-", "recompute-offload-m1"]


@pytest.mark.parametrize("columns", ["80", "90", "100", "120"])
def test_a_term_and_its_share_are_on_one_line(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    words = [*OFFLOADED, "--tokens", "1e6", "--layout"]
    for layout in ("z3-recompute-offload-m1", "z3-recompute-m1"):
        lines = dstk(capsys, *words, layout).splitlines()[1:]
        assert not [line for line in lines if line.strip() == "%" or re.search(r"[a-z] \d+ *$", line)]
        assert max(len(line) for line in lines[:4]) <= int(columns)
        assert any(re.search(r", \d+ kg CO2 at most", line) for line in lines)


def test_a_step_of_many_seconds_has_no_exponent(capsys):
    slow = ["plan", "--model", "llama-3-70b", "--gpus", "8xL4", "--seq", "8192", "--global-batch", "1024"]
    printed = dstk(capsys, *slow, "--layout", "z3-recompute-m1")
    assert re.search(r" \d+,\d{3} ", printed)
    assert "e+0" not in printed


def test_a_batch_that_leaves_layouts_out_of_the_search_is_noted(capsys):
    words = ["plan", "--model", "gpt2", "--gpus", "6xA100-40", "--seq", "512", "--top", "1", "--global-batch"]
    with pytest.raises(SystemExit):
        main([*words, "64"])
    noted = capsys.readouterr().err
    assert "--global-batch 64 is not a multiple of 6 GPUs" in noted
    assert "60 and 66 are" in noted
    with pytest.raises(SystemExit):
        main([*words, "66"])
    assert "multiple" not in capsys.readouterr().err


def test_why_says_so_where_no_term_differs(capsys, monkeypatch):
    monkeypatch.setattr("toolkit.cli.plan.table._LEAST", 1e6)
    line = dstk(capsys, *GPT2, "--why", "tp4-z1").splitlines()[-1]
    assert re.search(r", [\d.e-]+ s against [\d.e-]+ s: no term differs by more than \d+ %$", line)


def test_why_names_options_where_the_micro_batch_does_not_divide_the_batch(capsys):
    line = refusal(capsys, *GPT2, "--why", "z1-m5")
    assert "--global-batch 64 with --micro 5 and dp=8: 64 is not a multiple of" in line
    assert "Use --global-batch 40 or 80, or --micro one of 1, 2, 4, 8." in line


@pytest.mark.parametrize("layout", [(), ("--layout", "tp2-pp2-z1")])
def test_this_toolkits_pipelines_have_no_virtual_stages(capsys, layout):
    line = refusal(capsys, *GPT2, *layout, "--virtual-stages", "3")
    assert (
        "--virtual-stages 3: the toolkit's chunks are part of a layout, such as pp4x2. "
        "Give it with another --framework." in line
    )


def test_why_names_the_terms_that_a_layout_loses_by(capsys):
    assert "tensor" in dstk(capsys, *GPT2, "--why", "tp4-z1")
    assert "first choice" in dstk(capsys, *GPT2, "--why", plans(capsys, *GPT2, "--top", "1")[0]["strategy"])


def test_another_framework_overlaps_and_fuses_more(capsys):
    one = ["plan", "--model", "llama-3-8b", "--gpus", "8xA100-80", "--seq", "2048", "--global-batch", "64"]
    one += ["--layout", "dp8-z1", "--micro", "2"]
    ours, theirs = plans(capsys, *one)[0], plans(capsys, *one, "--framework", "megatron")[0]
    assert theirs["terms"]["compute"] < ours["terms"]["compute"]


def test_a_slower_network_slows_what_crosses_it(capsys, tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text("gpus_per_node: 4\nnetwork_bytes_per_second: 1e8\n")
    fast, slow = (
        plans(capsys, *GPT2, "--layout", "dp8-z1", "--micro", "4", *more)[0] for more in ([], ["--cluster", str(file)])
    )
    assert slow["terms"]["data"] > 10 * fast["terms"]["data"]


@pytest.mark.parametrize(
    ("content", "kernel"),
    [("rails: 8\n", "not a fact"), ("gpus_per_node: no\n", "above 0"), ("- 8\n", "not a mapping"), ("a: [\n", "YAML")],
)
def test_a_cluster_file_with_mistakes_is_refused(capsys, tmp_path: Path, content: str, kernel: str):
    file = tmp_path / "cluster.yaml"
    file.write_text(content)
    assert kernel in refusal(capsys, *GPT2, "--cluster", str(file))


def test_a_search_for_a_catalogue_model_needs_no_torch():
    code = (
        "import sys; from toolkit.cli.main import cli; cli.main(sys.argv[1:], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    search = [*GPT2[:2], "gpt3-175b", "--gpus", "1024xA100", "--seq", "2048", "--global-batch", "1536"]
    assert subprocess.run([sys.executable, "-c", code, *search], capture_output=True).returncode == 0


def test_a_cluster_file_with_the_former_names_of_latencies_is_read(capsys, tmp_path: Path):
    steps = []
    for name in ("network_seconds", "network_latency_seconds"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"gpus_per_node: 4\n{name}: 1.0e-2\n")
        (plan,) = plans(capsys, *GPT2, "--layout", "dp8-z1", "--micro", "4", "--cluster", str(file))
        steps.append(plan["step_seconds"])
    (plan,) = plans(capsys, *GPT2, "--layout", "dp8-z1", "--micro", "4")
    assert steps[0] == steps[1] > plan["step_seconds"]


DPO = """\
model: {name_or_path: gpt2}
data: {source: pairs.jsonl, format: preference, tokenizer: gpt2, seq_len: 512}
batch: {global_batch_size: 64, micro_batch_size: 1}
optimizer: {lr: 1e-6}
train:
  steps: 10
  objective: {name: dpo, reference: REFERENCE}
"""


def test_a_recipe_is_planned_with_its_objective(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A reference in memory takes a forward pass of each step and a copy of the weights, another one a pass before."""
    plan_of = {}
    table_of = {}
    for reference in ("initial", "online", "org/model", "none"):
        path = tmp_path / "dpo.yaml"
        path.write_text(DPO.replace("REFERENCE", reference))
        command = ["plan", "--recipe", str(path), "--gpus", "8xA100-40", "--layout", "dp8-z1", "--micro", "4"]
        (plan_of[reference],) = plans(capsys, *command)
        table_of[reference] = dstk(capsys, *command)
    assert plan_of["initial"]["terms"]["reference"] == 0
    assert plan_of["online"]["terms"]["reference"] > 0
    assert plan_of["online"]["memory_bytes"] > plan_of["initial"]["memory_bytes"]
    seconds = plan_of["initial"]["reference_seconds"]
    assert seconds == plan_of["online"]["terms"]["reference"] == plan_of["org/model"]["reference_seconds"]
    assert plan_of["online"]["reference_seconds"] == plan_of["none"]["reference_seconds"] == 0
    share = 100 * seconds / plan_of["initial"]["step_seconds"]
    assert 20 < share < 40
    line = "dp8-tp1-pp1-z1-m4: the reference reads the data set before training, "
    assert f"{line}{seconds:.3g} s for every 64 samples (dstk data counts them), {share:.0f} %" in table_of["initial"]
    assert line not in table_of["online"]
    assert line not in table_of["none"]


def test_options_beside_a_recipe_take_the_place_of_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--recipe", "gpt2-pretrain", "--gpus", "8xA100-40", "--layout", "dp8-z1", "--micro", "4"]
    (plan,) = plans(capsys, *command, "--seq", "512", "--global-batch", "64")
    assert plan["tokens_per_second_per_gpu"] * plan["step_seconds"] * 8 == pytest.approx(64 * 512)
