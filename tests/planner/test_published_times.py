"""Published runs: columns become options of the time model, and what is not understood is refused."""

import pytest

from made_measurements import CELLS  # isort: skip
import published_experts
from published import time_reader
from published.reader import RefusedError
from published.rows import NAMES, RESULTS, SETTINGS, Row
from published.times import errors_sheet, ranking_sheet, timed_runs

ROW: Row = (
    dict.fromkeys(NAMES | RESULTS | SETTINGS, "")
    | CELLS
    | {"source_id": "made", "gpus_per_node": "8", "step_time_s": "2.5", "vpp": "1", "gpu": "A100-80GB-SXM"}
)


def test_a_row_becomes_public_options() -> None:
    asked = time_reader.read(ROW | {"precision": "MXFP8", "vpp": "2", "pp": "2", "attn_impl": "flash"})
    assert asked.execution.framework == "megatron"
    assert (asked.execution.precision, asked.execution.attention, asked.execution.virtual_stages) == (
        "mxfp8",
        "cudnn",
        2,
    )
    assert asked.cluster.gpu.name == "A100-SXM-80GB"
    assert asked.layout.world_size == int(ROW["n_gpus"])


@pytest.mark.parametrize(
    ("words", "bytes_per_second"),
    [("8x200Gb/node", 25e9), ("1600 Gbps node-node", 25e9), ("inter-node 800 Gb/s", 12.5e9), ("", 25e9)],
)
def test_the_network_is_what_the_notes_say(words: str, bytes_per_second: float) -> None:
    asked = time_reader.read(ROW | {"notes": words})
    assert asked.cluster.network_bytes_per_second == bytes_per_second


@pytest.mark.parametrize(
    "changes", [{"gpu": "H100-96GB-HBM2e-500W"}, {"framework": "Colossal"}, {"arch": "mamba"}, {"tp": ""}, {"ep": "4"}]
)
def test_what_is_not_understood_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(RefusedError, match=next(iter(changes))):
        time_reader.read(ROW | changes)


def test_throughput_and_flops_give_the_same_step_as_seconds() -> None:
    asked = time_reader.read(ROW)
    tokens = asked.setup.global_batch_size * asked.setup.seq_len
    rate = str(tokens / asked.gpus / 2.5)
    assert time_reader.measured_seconds(ROW, asked) == 2.5
    by_tokens = ROW | {"step_time_s": "", "tokens_per_s_gpu": rate}
    assert time_reader.measured_seconds(by_tokens, asked) == pytest.approx(2.5)


def test_the_first_choice_is_judged_by_what_was_measured() -> None:
    # Twice the micro-batches of half the size: predicted slower. One group says so too, the other does not.
    rows = [
        ROW | {"model": model, "micro_batch": size, "step_time_s": seconds, "tp": "1", "pp": "1", "dp": ROW["n_gpus"]}
        for model, times in (("a", ("2.0", "1.0")), ("b", ("3.0", "4.0")))
        for size, seconds in zip(("1", "2"), times, strict=True)
    ]
    runs = timed_runs(row | {"global_batch": "64"} for row in rows)
    line = ranking_sheet(runs).rows[0]
    assert line[1:4] == ["2", "4", "87.5"]
    assert errors_sheet(runs).rows[0][2:4] == ["4", "0"]


def test_published_steps_of_experts_are_predicted_as_the_table_says() -> None:
    # The table: benchmarks/results/published_experts.md.
    asked = [row for row in published_experts.rows() if row["asked"] == "1"]
    assert len(asked) == 4
    for row in asked:
        _, step, memory = published_experts.predicted(row)
        assert memory is not None
        assert memory.verdict != "does not fit"
        assert step.seconds * float(row["tokens_per_s_gpu"]) * step.gpus == pytest.approx(step.tokens, rel=0.15)
