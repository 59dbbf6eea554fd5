"""Curves from elsewhere: the Trainer's state, TensorBoard events, tables and JSON lines, and how they are aligned.

tests/fixtures/curves/ has a run of the Trainer with TensorBoard, and scalars of SummaryWriter, as write.py there wrote
them.
"""

import json
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import DataError
from toolkit.parity import Cause
from toolkit.parity.comparison import Comparison
from toolkit.parity.finished_runs import compare_runs, read_runs
from toolkit.parity.run_log import read_log
from toolkit.parity.tensorboard_events import scalars

CURVES = Path(__file__).parents[1] / "fixtures" / "curves"
STATE = CURVES / "trainer" / "checkpoint-10" / "trainer_state.json"
LOSSES = [round(5 - 0.1 * step + 0.013 * (step % 3), 4) for step in range(1, 31)]

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def metrics(losses: Sequence[float] = LOSSES, *, first: int = 1) -> str:
    steps = enumerate(losses, start=first)
    return "".join(f"{json.dumps({'step': step, 'loss': loss, 'grad_norm': 1 + 1 / step})}\n" for step, loss in steps)


def trainer(every: int = 10, losses: Sequence[float] = LOSSES) -> str:
    """What the Trainer would log of these losses: their mean, and the norm of the last step."""
    entries: list[dict[str, Any]] = [
        {"step": end, "loss": sum(losses[end - every : end]) / every, "grad_norm": 1 + 1 / end, "epoch": 1.0}
        for end in range(every, len(losses) + 1, every)
    ]
    entries += [{"step": len(losses), "eval_loss": 2.5}, {"step": len(losses), "train_loss": 3.0}]
    return json.dumps({"global_step": len(losses), "log_history": entries}, indent=2)


def table(losses: Sequence[float] = LOSSES, *, header: str = "step,loss\n", mark: str = ",") -> str:
    return header + "".join(f"{step}{mark}{loss}\n" for step, loss in enumerate(losses, start=1))


def refused(path: Path, names: Sequence[str] = ()) -> str:
    with pytest.raises(DataError) as raised:
        read_log(path, names)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def curve_of(found: Comparison) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return found.baselines[0].run.curve.steps, found.baselines[0].run.curve.losses


class TestTheTrainer:
    def test_its_state_and_its_events_are_the_same_curve(self) -> None:
        found = compare_runs([STATE, CURVES / "trainer" / "runs"])
        assert found.passed
        assert curve_of(found)[0] == (2, 4, 6, 8, 10)
        assert found.baselines[0].run.curve.grad_norms

    def test_its_loss_is_the_mean_of_the_steps_since_the_last_log(self) -> None:
        """The same run with a log of every step is the oracle."""
        found = compare_runs([STATE, CURVES / "trainer-every-step" / "trainer_state.json"])
        assert found.passed
        every = read_log(CURVES / "trainer-every-step" / "trainer_state.json").losses
        assert curve_of(found)[1] == pytest.approx([(every[n - 1] + every[n]) / 2 for n in (2, 4, 6, 8, 10)], rel=1e-6)

    def test_an_output_directory_stands_for_its_newest_checkpoint(self, write: Write, tmp_path: Path) -> None:
        for step in (5, 10, 9):
            write(f"checkpoint-{step}/trainer_state.json", trainer(1, LOSSES[:step]))
        assert len(read_log(tmp_path).losses) == 10

    def test_other_runs_are_averaged_over_the_same_steps(self, write: Write) -> None:
        found = compare_runs([write("a/metrics.jsonl", metrics()), write("b.json", trainer())])
        assert found.passed
        steps, losses = curve_of(found)
        assert steps == (10, 20, 30)
        assert losses == pytest.approx([sum(LOSSES[end - 10 : end]) / 10 for end in steps])
        assert any("b.json: a loss is the mean since the one before" in note for note in found.notes)

    def test_a_single_loss_of_the_same_step_is_not_taken_for_its_mean(self, write: Write) -> None:
        logged = "".join(f"{json.dumps({'step': step, 'loss': LOSSES[step - 1]})}\n" for step in (10, 20, 30))
        with pytest.raises(DataError, match="no step has a loss in every run"):
            compare_runs([write("a.jsonl", logged), write("b.json", trainer())])

    def test_means_over_other_intervals_are_compared_where_both_end(self, write: Write) -> None:
        found = compare_runs([write("a.json", trainer(10)), write("b.json", trainer(5))])
        assert found.passed
        assert curve_of(found)[0] == (10, 20, 30)

    def test_means_whose_steps_overlap_are_not_compared(self, write: Write) -> None:
        found = compare_runs([write("a.json", trainer(10)), write("b.json", trainer(15))])
        assert curve_of(found)[0] == (30,)

    def test_validation_losses_are_compared_by_name(self, write: Write) -> None:
        assert read_log(write("a.json", trainer()), ["eval_loss"]).losses == {30: 2.5}

    def test_losses_that_it_rounds_are_no_difference(self, write: Write) -> None:
        rounded = json.loads(trainer(1))
        for entry in rounded["log_history"][:-2]:
            entry["loss"] = round(entry["loss"], 2)
        paths = [write("a/metrics.jsonl", metrics()), write("b.json", json.dumps(rounded))]
        assert compare_runs(paths).passed

    def test_a_difference_beyond_the_decimals_is_one(self, write: Write) -> None:
        wrong = write("b.json", trainer(10, [loss + 0.02 for loss in LOSSES]))
        found = compare_runs([write("a/metrics.jsonl", metrics()), wrong])
        (result,) = found.results
        assert (result.outcome, result.diagnosis and result.diagnosis.cause) == ("differs", Cause.UNKNOWN)
        assert "log of every step" in str(result.diagnosis)
        assert found.to_dict()["strategies"][0]["first_diverging_step"] == 10

    def test_a_state_of_our_own_checkpoints_is_not_a_log(self, write: Write) -> None:
        assert "trainer_state.json:1: not a step" in refused(write("trainer_state.json", '{"step_": 4}\n'))


class TestTensorBoard:
    def test_scalars_are_those_that_tensorboard_reads(self) -> None:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        files = sorted(CURVES.rglob("*tfevents*"))
        assert len(files) == 2
        for file in files:
            expected = [
                (event.step, value.tag, value.simple_value)
                for event in LegacyEventFileLoader(str(file)).Load()
                for value in event.summary.value
                if value.WhichOneof("value") == "simple_value"
            ]
            found = list(scalars(file.read_bytes()))
            assert [one for one in found if not one[1].startswith("tensor/")] == expected

    def test_tensors_of_one_number_are_scalars_and_histograms_are_not(self) -> None:
        (file,) = (CURVES / "writer").iterdir()
        found = list(scalars(file.read_bytes()))
        assert [(step, value) for step, tag, value in found if tag == "tensor/new style"] == [(1, 2.5), (2, 2.25)]
        assert {tag for _, tag, _ in found} == {"tensor/new style", "lm loss", "lm loss vs samples", "grad-norm"}

    def test_megatrons_loss_and_norm_are_found(self) -> None:
        log = read_log(CURVES / "writer")
        assert (log.loss_name, list(log.losses), list(log.grad_norms)) == ("lm loss", [10, 20, 30], [10, 20, 30])

    def test_a_last_record_that_is_being_written_is_skipped(self) -> None:
        (file,) = (CURVES / "writer").iterdir()
        data = file.read_bytes()
        whole = list(scalars(data))
        parts = [list(scalars(data[:size])) for size in range(0, len(data), 31)]
        assert parts == [whole[: len(part)] for part in parts]
        assert {len(part) for part in parts} == set(range(len(whole) + 1))

    @pytest.mark.parametrize("place", [0, 9])
    def test_damage_is_refused_by_its_place(self, place: int, tmp_path: Path) -> None:
        (file,) = (CURVES / "writer").iterdir()
        data = bytearray(file.read_bytes())
        data[place] ^= 255
        damaged = tmp_path / "events.out.tfevents.1"
        damaged.write_bytes(data)
        assert refused(damaged).startswith(f"{damaged}: cannot be read (")

    @pytest.mark.parametrize(
        "data",
        [b"hello, this is not an event file", random.Random(0).randbytes(100), bytes(64)],
        ids=["text", "noise", "zeros"],
    )
    def test_other_files_are_refused(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "events.out.tfevents.1"
        path.write_bytes(data)
        assert "TensorBoard" in refused(path)

    def test_steps_that_a_resumed_run_logs_again_count_once(self, tmp_path: Path) -> None:
        (file,) = (CURVES / "writer").iterdir()
        for number in (1, 2):
            (tmp_path / f"events.out.tfevents.{number}").write_bytes(file.read_bytes())
        assert read_log(tmp_path).losses == read_log(file).losses

    def test_a_directory_with_several_runs_is_refused(self) -> None:
        assert "this directory has TensorBoard events of 2 runs" in refused(CURVES)


class TestTables:
    @pytest.mark.parametrize(
        "text",
        [
            table(),
            table(header="Step;train_loss\n", mark=";"),
            table(header="iteration\tlm loss\n", mark="\t"),
            table(header=""),
            table(header="", mark="\t"),
            "".join(f"{loss}\n" for loss in LOSSES),
            ",step,loss\n" + "".join(f"{n},{n + 1},{loss}\n" for n, loss in enumerate(LOSSES)),
            table().replace("\n", "\r\n"),
            "\ufeff" + table(),
            table() + "31,",
        ],
        ids=["header", "semicolon", "tabs", "bare", "bare tabs", "one column", "pandas", "crlf", "bom", "growing"],
    )
    def test_forms_of_one_curve(self, text: str, write: Write) -> None:
        log = read_log(write("curve.csv", text))
        assert [*log.losses.items()] == [*enumerate(LOSSES, start=1)]

    def test_three_bare_columns_have_the_norm(self, write: Write) -> None:
        log = read_log(write("curve.tsv", "1\t5.0\t0.5\n2\t4.0\t0.25\n"))
        assert (log.losses, log.grad_norms) == ({1: 5.0, 2: 4.0}, {1: 0.5, 2: 0.25})

    def test_empty_cells_are_no_values(self, write: Write) -> None:
        """As Lightning writes: validation and training in rows of their own."""
        text = "epoch,step,train_loss,val_loss\n0,9,4.0,\n0,9,,4.5\n0,19,3.0,\n"
        assert read_log(write("metrics.csv", text)).losses == {9: 4.0, 19: 3.0}

    def test_deepspeed_counts_samples(self, write: Write) -> None:
        text = "step,train_loss\n" + "".join(f"{64 * n},{loss}\n" for n, loss in enumerate(LOSSES, start=1))
        assert list(read_log(write("Train_Samples_train_loss.csv", text)).losses) == list(range(1, 31))

    def test_a_curve_that_begins_at_step_zero_counts_from_zero(self, write: Write) -> None:
        text = "iter,loss\n" + "".join(f"{10 * n},{loss}\n" for n, loss in enumerate(LOSSES[::10]))
        found = compare_runs([write("a/metrics.jsonl", metrics()), write("b.csv", text)])
        assert found.passed
        assert curve_of(found) == ((1, 11, 21), tuple(LOSSES[::10]))

    def test_a_validation_before_training_is_of_step_zero(self, write: Write) -> None:
        assert list(read_log(write("a.csv", "step,eval_loss\n0,5\n10,4\n"), ["eval_loss"]).losses) == [0, 10]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "it has no step"),
            ("hello\n", "it has no step"),
            ('{"step": 1}\n', "its steps have no values"),
            ("step\n1\n", "its steps have no values"),
            ("epoch,loss\n1,2\n", ":2: not a step"),
            ("step,loss\n1,4,5\n", ":2: not a step"),
            ("step,loss\n1.5,4\n", ":2: not a step"),
            ("step,loss\n-1,4\n", ":2: not a step"),
            ("step,loss\nnan,4\n", ":2: not a step"),
            ("1,2,3,4\n", ":1: not a step"),
            (
                "step,loss\n1,abc\n",
                "a loss or gradient norm is not a number (could not convert string to float: 'abc')",
            ),
            (
                "step,accuracy,my loss\n1,2,3\n",
                "it has no loss under a known name, only my loss, accuracy. Choose one with --loss",
            ),
            ("step,loss,train_loss\n1,2,3\n", "it has several losses: loss, train_loss. Choose one with --loss NAME."),
        ],
    )
    def test_anything_else_is_one_line(self, text: str, message: str, write: Write) -> None:
        assert message in refused(write("curve.csv", text))

    def test_a_name_chooses(self, write: Write) -> None:
        path = write("curve.csv", "step,my loss,loss\n1,3,2\n")
        assert read_log(path, ["my loss"]).losses == {1: 3.0}
        assert read_log(path).losses == {1: 2.0}

    def test_a_name_that_no_run_has_is_refused(self, write: Write) -> None:
        with pytest.raises(DataError, match=r"^--loss my: no run calls its loss that"):
            read_runs([write("curve.csv", table())], ["my"])


class TestJsonLines:
    def test_a_last_line_that_is_being_written_is_skipped(self, write: Write) -> None:
        assert len(read_log(write("a.jsonl", metrics() + '{"step": 31, "lo')).losses) == 30

    def test_a_run_that_resumed_from_an_earlier_step_counts_from_there(self, write: Write) -> None:
        log = read_log(write("a.jsonl", metrics(LOSSES[:20]) + metrics([1.0, 2.0], first=11)))
        assert [*log.losses.items()] == [*enumerate([*LOSSES[:10], 1.0, 2.0], start=1)]

    def test_lines_of_other_things_are_skipped(self, write: Write) -> None:
        text = '{"step": 1, "loss": 2.0}\n{"step": 1, "eval_loss": 2.5}\n{"step": 2, "loss": null}\n'
        assert list(read_log(write("a.jsonl", text)).losses) == [1, 2]

    def test_runs_that_begin_later_are_compared_at_their_steps(self, write: Write) -> None:
        found = compare_runs([write("a/metrics.jsonl", metrics()), write("b.jsonl", metrics(LOSSES[10:], first=11))])
        assert found.passed
        assert curve_of(found)[0] == tuple(range(11, 31))
        assert "from step 11 to 30" in str(found.notes)

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"step": true, "loss": 1}\n', '{"step": "x", "loss": 1}\n'])
    def test_garbage_is_one_line(self, text: str, write: Write) -> None:
        assert ":1: not a step" in refused(write("a.jsonl", text + "\n"))


def test_a_special_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(struct.pack("<4d", 1, 2, 3, 4))
    assert "cannot be read (not text)" in refused(tmp_path / "a.csv")


def test_without_norms_in_every_log_none_are_compared(write: Write) -> None:
    found = compare_runs([write("a/metrics.jsonl", metrics()), write("b.csv", table())])
    (strategy,) = found.to_dict()["strategies"]
    assert (strategy["result"], strategy["grad_norms"], strategy["norm_difference"]) == ("same", [], None)
    assert "without gradient norms" in str(found.notes)


def test_rates_of_different_libraries_are_not_compared(write: Write) -> None:
    """The Trainer logs the rate of the step, others that of the next."""
    own = write("a/metrics.jsonl", '{"step": 1, "loss": 2.5, "lr": 0.1}\n{"step": 2, "loss": 2.25, "lr": 0.2}\n')
    history = [{"step": 1, "loss": 2.5, "learning_rate": 0.2}, {"step": 2, "loss": 2.25, "learning_rate": 0.3}]
    assert compare_runs([own, write("b.json", json.dumps({"log_history": history}))]).passed


def test_the_precision_of_others_is_named_as_an_assumption(write: Write) -> None:
    paths = [write("a/metrics.jsonl", metrics()), write("b.csv", table())]
    assert any("b.csv: the precision is unknown" in note for note in compare_runs(paths).notes)
    assert not any("the precision is unknown" in note for note in compare_runs(paths, tolerance=0.1).notes)
