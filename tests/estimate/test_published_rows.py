"""Published runs: every value of a column becomes a public option or is refused; errors and formulas by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_measurements import CELLS, PARAMETERS, SCRIPT, write
from nonempty import nonempty
from published import formulas, reader
from published.errors import ErrorSummary, FitSummary, percentile
from published.outcomes import outcomes
from published.rows import GIB, NAMES, RESULTS, SETTINGS, MeasurementsError, Row, read
from training_setups import changed

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.framework_profile import FrameworkProfile

COLUMNS = NAMES | RESULTS | SETTINGS
ROW: Row = dict.fromkeys(COLUMNS, "") | CELLS


def test_a_row_becomes_public_options() -> None:
    run = reader.read(
        ROW | {"vpp": "2", "sp": "1", "attn_impl": "flash", "notes": "dropout 0.0; flags: use-mcore-models"}
    )
    setup = run.request.setup
    assert run.request.framework == FrameworkProfile(name="megatron", virtual_stages=2, dropout=False)
    assert str(run.request.setup.layout) == "dp2-tp2-pp2-z0"
    assert run.request.setup.layout.sequence_parallel
    assert (setup.accumulation, setup.computation.attention, setup.layout.recompute) == (8, "flash", "full")
    assert run.request.setup.model.parameters.numel == PARAMETERS
    assert run.stage == 1


def test_a_deepspeed_row_becomes_a_deepspeed_config() -> None:
    zero = {
        "framework": "DeepSpeed ZeRO-3",
        "zero": "3",
        "tp": "1",
        "pp": "1",
        "dp": "8",
        "pp_stage": "",
        "grad_dtype": "fp32",
    }
    run = reader.read(ROW | zero | {"notes": "reduce_bucket_size 5e7, overlap_comm"})
    assert isinstance(run.request.framework, DeepSpeedSettings)
    found = run.request.framework
    assert (found.zero_stage, found.accumulation_bytes, found.reduce_bucket_size) == (3, 4, 50_000_000)
    assert reader.read(ROW | zero | {"grad_dtype": "bf16"}).request.framework.accumulation_bytes == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"framework": "Alpa (JAX)"},
        {"arch": "mamba"},
        {"precision": "fp8"},
        {"precision": "fp32"},
        {"grad_dtype": "bf16"},
        {"recompute": "selective(op)"},
        {"attn_impl": "ring"},
        {"optimizer_sharding": "fsdp"},
        {"compile": "1"},
        {"ep": "8"},
        {"gpu": "TPU"},
        {"n_gpus": "64"},
        {"dp": ""},
        {"global_batch": "15"},
        {"notes": "dropout 0.0; an invented switch"},
        {"notes": "qk-layernorm"},
        {"gated_mlp": "1"},
        {"kv_heads": "2"},
        {"pp_stage": "2"},
        {"micro_batch": "0"},
        {"optimizer_sharding": "DS ZeRO-1 fp16 (fp16 grads)"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_a_value_that_no_option_means_is_refused_and_names_its_column(changes: dict[str, str]) -> None:
    (column,) = changes
    (outcome,) = outcomes([ROW | changes])
    assert column in outcome.refused
    assert outcome.peak is None


def test_columns_that_a_config_of_deepspeed_does_not_have_are_refused() -> None:
    zero = {"framework": "DeepSpeed ZeRO-2", "zero": "2", "tp": "1", "pp": "1", "dp": "8", "pp_stage": ""}
    assert not outcomes([ROW | zero])[0].refused
    assert "compile" in outcomes([ROW | zero | {"compile": "1"}])[0].refused
    assert "notes" in outcomes([ROW | zero | {"notes": "dropout 0.0"}])[0].refused
    assert "notes" in outcomes([ROW | {"notes": "overlap_comm"}])[0].refused
    assert "vpp" in outcomes([ROW | zero | {"vpp": "2"}])[0].refused
    assert outcomes([ROW | zero | {"cp": "2", "n_gpus": "16"}])[0].refused


@pytest.mark.parametrize("column", sorted(SETTINGS))
def test_no_column_of_settings_is_ignored(column: str) -> None:
    (outcome,) = outcomes([ROW | {column: "something new"}])
    assert outcome.refused


def test_the_names_of_a_run_say_nothing() -> None:
    (plain,) = outcomes([ROW])
    for column in nonempty(NAMES - {"source_id"}):
        assert outcomes([ROW | {column: "gpt3_uneven_pipeline"}])[0].peak == plain.peak


def test_the_peak_is_that_of_the_stage_that_was_measured() -> None:
    run = reader.read(ROW)
    stages = run.request.stages()
    (last,) = outcomes([ROW])
    (most,) = outcomes([ROW | {"pp_stage": "", "mem_rank": "max over ranks"}])
    assert last.peak == stages[1].allocated
    assert most.peak == max(stage.allocated for stage in stages)


def test_what_was_measured_is_what_is_compared() -> None:
    kinds = {}
    for words in ("torch max_memory_allocated", "max reserved GiB over ranks", "nvidia-smi snapshot"):
        (outcome,) = outcomes([ROW | {"peak_mem_kind": words}])
        kinds[outcome.kind] = outcome.peak
    run = reader.read(ROW)
    stage = run.request.stages()[1]
    assert kinds == {"allocated": stage.allocated, "reserved": stage.reserved, "nvidia-smi": stage.occupied}


@pytest.mark.parametrize(
    ("columns", "said"), [(COLUMNS - {"zero"}, "has no column zero"), (COLUMNS | {"muon"}, "no reader knows: muon")]
)
def test_a_file_with_other_columns_is_refused(tmp_path: Path, columns: frozenset[str], said: str) -> None:
    with pytest.raises(MeasurementsError, match=said):
        read(write(tmp_path / "rows.csv", CELLS, columns=columns))


def test_rows_that_say_nothing_about_memory_are_left_out(tmp_path: Path) -> None:
    timed = CELLS | {"peak_mem_gib": "", "source_id": "timed"}
    others = [timed | {"source_id": "judged", "fits": fits} for fits in "01"]
    assert [row["source_id"] for row in read(write(tmp_path / "rows.csv", CELLS, timed, *others))] == [
        "made",
        "judged",
        "judged",
    ]


def test_rotary_embeddings_have_no_table_of_positions() -> None:
    rotary = reader.read(ROW | {"notes": "flags: position-embedding-type"})
    assert rotary.request.setup.model.parameters.numel == PARAMETERS - 32 * 64


def test_the_script_prints_errors_results_and_refusals(tmp_path: Path) -> None:
    (outcome,) = outcomes([ROW])
    assert outcome.peak is not None
    near = CELLS | {"peak_mem_gib": str(outcome.peak / GIB / 1.05)}
    path = write(tmp_path / "rows.csv", near, near, CELLS | {"arch": "mamba"}, CELLS | {"fits": "0"})
    run = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "arch: mamba" in run.stdout
    assert "5.0" in run.stdout
    missing = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "none.csv"], capture_output=True, text=True, check=False
    )
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)


def test_errors_are_relative_to_what_was_measured() -> None:
    found = ErrorSummary.of([(111.0, 100.0), (80.0, 100.0), (100.0, 100.0)])
    assert found is not None
    assert found.median_absolute == pytest.approx(0.11)
    assert found.median_signed == 0
    assert found.within == pytest.approx(1 / 3)
    assert ErrorSummary.of([]) is None
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0], 0.95) == pytest.approx(3.8)


def test_recall_and_precision_of_both_results() -> None:
    pairs = [(False, False)] * 6 + [(True, False)] * 2 + [(False, True)] + [(True, True)] * 5
    found = FitSummary.of(pairs)
    assert (found.recall, found.precision) == (6 / 8, 6 / 7)
    assert (found.fit_recall, found.fit_precision) == (5 / 6, 5 / 7)
    assert FitSummary.of([(True, True)]).recall is None
    assert FitSummary.of([(True, True)]).precision is None


def test_the_plain_formulas_are_those_of_the_papers() -> None:
    run = reader.read(ROW | {"recompute": "none", "attn_impl": "unfused"})
    held, s, h, a, t = PARAMETERS / 4, 32, 64, 4, 2
    assert formulas.states(run) == pytest.approx(16 * held)
    sharded = replace(run, request=changed(run.request, zero_stage=1))
    assert formulas.states(sharded) == pytest.approx((4 + 12 / 2) * held)
    # Two stages of two layers, two micro-batches in flight.
    assert formulas.activations(run) == pytest.approx(4 * (s * h * (10 + 24 / t) + 5 * a * s * s / t))
