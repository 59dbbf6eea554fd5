"""Published measurements: how rows are read, what errors mean, and the formulas of others, against closed forms."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_measurements import CELLS, PARAMETERS, SCRIPT, write
from published.errors import ErrorSummary, FitSummary, percentile
from published.formulas import accelerate, deepspeed, eleuther, megatron, parameter_count
from published.rows import MeasurementsError, Row, read, shapeless
from published.sources import SOURCES, outcomes, peak_kind


@pytest.fixture
def row(tmp_path: Path) -> Row:
    (found,) = read(write(tmp_path / "rows.csv", CELLS))
    return found


def test_what_a_row_leaves_out_is_none_or_the_usual(row: Row) -> None:
    assert (row.params_b, row.vpp, row.static_mem_gib, row.notes) == (None, None, None, "")
    assert (row.ffn, row.kv_heads, row.cp) == (4 * row.hidden, row.heads, 1)
    assert row.tied_emb
    assert not row.sp


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 8), ({"global_batch": "8", "micro_batch": "2"}, 2), ({"grad_accum": "3"}, 3), ({"dp": ""}, None)],
)
def test_micro_batches_are_the_global_batch_over_replicas(
    tmp_path: Path, changes: dict[str, str], count: int | None
) -> None:
    (found,) = read(write(tmp_path / "rows.csv", CELLS | changes))
    assert found.micro_batches == count


def test_rows_that_describe_no_model_are_counted(tmp_path: Path) -> None:
    bare = CELLS | {"layers": "", "source_id": "other"}
    path = write(tmp_path / "rows.csv", CELLS, bare, bare, bare | {"kind": "thr"})
    assert len(read(path)) == 1
    assert shapeless(path) == {"other": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": "wide"}, "row made-0001 has hidden=wide, which is not a number"),
        ({"peak_mem_gib": "nan"}, "row made-0001 has peak_mem_gib=nan, which is not a number"),
        ({"seq_len": ""}, "row made-0001 has no seq_len"),
    ],
)
def test_a_cell_that_cannot_be_read_is_named(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(MeasurementsError, match=said):
        read(write(tmp_path / "rows.csv", CELLS | changes))


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, "No such file"),
        (b"layers,hidden\n1,2\n", "has no column arch, attn_impl"),
        (b"\xff\xfe", "not a CSV file"),
    ],
)
def test_the_script_tells_a_bad_file_in_one_line_and_ends_with_2(
    tmp_path: Path, contents: bytes | None, said: str
) -> None:
    path = tmp_path / "rows.csv"
    if contents is not None:
        path.write_bytes(contents)
    done = subprocess.run([sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_page_has_all_sources(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "rows.csv"), "--save", "--source", "alpa_v100"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --save with --source alpa_v100")


def test_the_script_counts_what_it_does_not_model(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", CELLS, CELLS | {"source_id": "alpa_v100"}, CELLS | {"layers": ""})
    done = subprocess.run([sys.executable, str(SCRIPT), str(path), "--worst", "1"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "XLA" in done.stdout
    assert "does not say" in done.stdout
    assert "made-0001" in done.stdout


def test_percentiles_lie_between_neighbours_in_proportion() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile(list(range(101)), 0.95) == 95
    assert percentile([7.0], 0.95) == 7.0


def test_errors_are_relative_to_what_was_measured() -> None:
    found = ErrorSummary.of([(11, 10), (8, 10), (10, 10)])
    assert found is not None
    assert found.median_absolute == pytest.approx(0.1)
    assert found.p95_absolute == pytest.approx(0.19)  # 0.9 of the way from 0.1 to 0.2
    assert found.median_signed == 0
    assert ErrorSummary.of([]) is None


def test_recall_and_precision_are_about_runs_that_did_not_fit() -> None:
    pairs = [(False, False)] * 6 + [(True, False)] * 2 + [(False, True)] + [(True, True)] * 5
    found = FitSummary.of(pairs)
    assert found.recall == 6 / 8
    assert found.precision == 6 / 7
    assert FitSummary.of([(True, True)]).recall is None
    assert FitSummary.of([(True, True)]).precision is None


def test_parameters_are_counted_as_by_hand(row: Row) -> None:
    assert parameter_count(row) == PARAMETERS
    llama = replace(row, arch="llama (RMSNorm)", gated_mlp=True, ffn=96, kv_heads=2, tied_emb=False)
    assert parameter_count(llama) == 4 * (3 * 64**2 + 3 * 64 * 96 + 2 * 64) + 2 * 512 * 64 + 64


def test_deepspeeds_formulas_know_zero_2_and_3(row: Row) -> None:
    held = PARAMETERS / 4
    assert deepspeed(replace(row, zero=2)).peak == pytest.approx(2 * held + 18 * held / 2)
    largest = 512 * 64 / 2  # the embedding
    assert deepspeed(replace(row, zero=3)).peak == pytest.approx(4 * largest + 18 * held / 2)
    assert deepspeed(replace(row, zero=1)).peak is None


def test_megatrons_formula_takes_18_bytes_or_6_and_12_over_the_replicas(row: Row) -> None:
    # Matrices of two layers and the embedding over two ranks; norms of two layers, and half of the final one.
    held = (2 * 12 * 64**2 + 512 * 64) / 2 + (4 * 4 * 64 + 2 * 64) / 2
    assert megatron(row).static == pytest.approx(18 * held)
    assert megatron(replace(row, optimizer_sharding="dist-optimizer")).static == pytest.approx(12 * held)


def test_megatrons_formula_of_activations(row: Row) -> None:
    s, h, t, p = 32, 64, 2, 2
    plain = 4 * s * h * (10 + 24 / t) + 8 * s * p + s * h * p
    found = megatron(row)
    assert found.peak is not None
    assert found.static is not None
    assert found.peak - found.static == pytest.approx(1.05 * plain)
    selective = megatron(replace(row, sp=True, recompute="selective", pp=1))
    whole = 4 * s * h * (18 + 16) + 8 * s + s * h + 4 * s * h * (1 + 512 / h)
    assert selective.peak is not None
    assert selective.static is not None
    assert selective.peak - selective.static == pytest.approx(whole / t)


def test_eleuthers_formula_divides_gradients_from_zero_2_on_over_all_gpus(row: Row) -> None:
    total = 2 * 512 * 64 + 32 * 64 + 4 * (8 * 64 + 12 * 64**2) + 2 * 64
    activations = 32 * 64 * 4 * 34
    assert eleuther(row).static == pytest.approx(2 * total / 4 + 4 * total + 12 * total)
    assert eleuther(row).peak == pytest.approx(2 * total / 4 + 4 * total + 12 * total + activations)
    second = eleuther(replace(row, zero=2, recompute="none"))
    assert second.static == pytest.approx(2 * total / 4 + 4 * total / 8 + 12 * total / 8)
    assert second.peak == pytest.approx(second.static + 1e9 + 32 * 64 * 4 * (34 + 5 * 4 * 32 / 64))


def test_accelerates_formula_is_about_one_gpu(row: Row) -> None:
    alone = replace(row, tp=1, pp=1)
    assert accelerate(alone).peak == 8 * PARAMETERS
    assert accelerate(replace(alone, precision="fp32")).peak == 16 * PARAMETERS
    assert accelerate(row).peak is None


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("torch max_memory_allocated (MB/1024)", "allocated"),
        ("max reserved GiB over ranks (torchtitan metric = max_reserved)", "reserved"),
        ("nvidia-smi snapshot, GB rounded", "nvidia-smi"),
        ("XLA peak GB", "XLA"),
    ],
)
def test_what_was_measured_is_told_apart(row: Row, words: str, kind: str) -> None:
    assert peak_kind(replace(row, peak_mem_kind=words)) == kind


def test_a_row_that_is_not_modelled_has_a_reason(row: Row) -> None:
    unknown, compiled = outcomes([replace(row, source_id="nobody"), replace(row, source_id="alpa_v100")])
    assert unknown.prediction is None
    assert unknown.reason
    assert compiled.reason == SOURCES["alpa_v100"].reason
    assert (unknown.failed, compiled.failed) == (False, False)


def test_a_run_that_fitted_counts_where_others_of_its_source_did_not(row: Row) -> None:
    timed = replace(row, kind="thr")
    assert len(outcomes([timed, replace(timed, source_id="bigscience_tr11")])) == 1
