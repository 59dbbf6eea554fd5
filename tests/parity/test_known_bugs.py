"""docs/known-bugs.md is true of the installed DeepSpeed: an upgrade that fixes a bug is noticed.

Each bug is compared with the reference; its fixed script must train what the reference trains.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.engines.deepspeed_patches import import_muon_uncompiled
from toolkit.parity import ParityResult, ParityRun
from toolkit.parity.diagnosis import Cause

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "plain_deepspeed"
sys.path.insert(0, str(SCRIPTS))

from accelerate_on_cpu import built  # noqa: E402
from auto_expert_parallel import error  # noqa: E402
from cases import BUGS, GLOBAL_BATCH, WARMUP_STEPS, KnownBug, Runs  # noqa: E402
from muon import LIMIT, RATE, WIDTH, step  # noqa: E402
from nvme import files_written  # noqa: E402
from tensor_parallel import COLUMN, ROW  # noqa: E402
from zero3_experts import norms  # noqa: E402

LAUNCHER = Path(sys.executable).with_name("accelerate")
BY_NAME = {bug.name: bug for bug in BUGS}
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    return Runs(tmp_path_factory.mktemp("known-bugs"), ranks)


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Callable[[str], ParityResult]:
    """The result on a script as it stands; each runs once."""

    @cache
    def of(name: str) -> ParityResult:
        bug = BY_NAME[name]
        return ParityResult.of(runs.plain(bug), runs.reference(bug))

    return of


def run(result: ParityResult) -> ParityRun:
    return result.run


def gradients(result: ParityResult) -> dict[str, Any]:
    return {name: value.astype(np.float64) for name, value in result.run.first_gradients.items()}


def norm(values: list[Any]) -> float:
    return float(np.sqrt(sum(np.sum(value**2) for value in values)))


def at_stage(stage: int, runs: Runs) -> ParityResult:
    """The Ulysses script under another stage."""
    bug = replace(
        BY_NAME["ulysses-zero-2"],
        parallel={"ulysses": 2, "zero_stage": stage},
        config={"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0},
    )
    return ParityResult.of(runs.plain(bug), runs.reference(bug))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_script_fixed_as_the_page_says_trains_what_the_reference_trains(bug: KnownBug, runs: Runs) -> None:
    result = ParityResult.of(runs.plain(bug, repaired=True), runs.reference(bug))
    assert result.passed, str(result)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_page_has_the_numbers_of_each_bug(bug: KnownBug) -> None:
    assert f"<!-- numbers: {bug.name} -->" in (ROOT / "docs" / "known-bugs.md").read_text()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("pipeline-clipping", Cause.CLIPPING),
        ("tensor-parallel-marks", Cause.CLIPPING),
        ("experts-clipping", Cause.CLIPPING),
        ("ulysses-zero-2", Cause.SCALING),
        ("mean-of-means", Cause.TOKEN_WEIGHTING),
        ("mean-of-means-pipeline", Cause.TOKEN_WEIGHTING),
        ("default-clipping", Cause.CLIPPING),
        ("warmup", Cause.SCHEDULE),
        ("autotp-batch", Cause.BATCH_SIZE),
        ("empty-micro-batch-zero-0", Cause.NOT_FINITE),
        ("empty-micro-batch-zero-1", Cause.NOT_FINITE),
    ],
)
def test_the_comparison_names_the_cause(name: str, cause: Cause, plain: Callable[[str], ParityResult]) -> None:
    diagnosis = plain(name).diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == cause


class TestClipping:
    def test_a_pipeline_with_zero_0_clips_by_the_norm_of_its_first_stage(
        self, plain: Callable[[str], ParityResult]
    ) -> None:
        result = plain("pipeline-clipping")
        first_stage = [
            value
            for name, value in gradients(result).items()
            if name.startswith(("transformer.wte", "transformer.wpe", "transformer.h.0."))
        ]
        assert not result.wrong_gradients
        assert result.curves.first_loss_beyond == 2
        assert result.run.curve.grad_norms[0] == pytest.approx(norm(first_stage), rel=1e-5)

    def test_split_parameters_without_a_mark_count_on_the_first_rank_only(
        self, plain: Callable[[str], ParityResult]
    ) -> None:
        result = plain("tensor-parallel-marks")
        counted = []
        for name, value in gradients(result).items():
            leaf = name.split(".")[-2]
            dim = 0 if leaf in COLUMN else 1
            counted.append(np.split(value, 2, axis=dim)[0] if leaf in (*COLUMN, *ROW) else value)
        assert not result.wrong_gradients
        assert result.curves.first_loss_beyond == 2
        assert result.run.curve.grad_norms[0] == pytest.approx(norm(counted), rel=1e-5)

    def test_a_config_that_does_not_mention_clipping_clips_at_1(self, plain: Callable[[str], ParityResult]) -> None:
        result = plain("default-clipping")
        ratios = [row.ratio for row in result.updates]
        assert not result.wrong_gradients
        assert ratios == pytest.approx([1 / result.run.curve.grad_norms[0]] * len(ratios), rel=1e-3)


class TestExperts:
    def test_without_zero_deepspeed_clips_by_the_mean_of_what_each_rank_counts(
        self, plain: Callable[[str], ParityResult]
    ) -> None:
        result = plain("experts-clipping")
        counted: tuple[list[Any], list[Any]] = ([], [])
        for name, value in gradients(result).items():
            parts = np.split(value, 2) if ".experts." in name else (value, value)
            for rank, part in zip(counted, parts, strict=True):
                rank.append(part)
        assert not result.wrong_gradients
        assert result.curves.first_loss_beyond == 2
        assert result.run.curve.grad_norms[0] == pytest.approx(np.mean([norm(rank) for rank in counted]), rel=1e-5)

    def test_zero_3_beside_tensor_parallelism_clips_on_each_rank_by_the_experts_of_its_own_lane(
        self, ranks: Ranks
    ) -> None:
        # Squares: 16 of the matrix that all ranks have, and 4, 16, 36, 64 of the experts on ranks 0 to 3.
        lanes = [(16 + 4 + 36) ** 0.5, (16 + 16 + 64) ** 0.5]
        right = (16 + 4 + 16 + 36 + 64) ** 0.5
        assert np.array(ranks(norms, 4)) == pytest.approx(np.array([(own, right) for own in lanes * 2]))

    def test_a_sum_over_the_tensor_parallel_ranks_makes_it_the_norm_of_the_model(self, ranks: Ranks) -> None:
        clipped_by, right = np.array(ranks(partial(norms, repaired=True), 4)).T
        assert clipped_by == pytest.approx(right)

    def test_auto_ep_fails_with_the_installed_transformers(self, ranks: Ranks) -> None:
        assert "_CanRecordRegistry.get() takes 2 positional arguments but 3 were given" in ranks(error, 2)[0]


class TestUlysses:
    def test_gradients_of_zero_2_are_as_many_times_too_large_as_ranks_share_a_sequence(
        self, plain: Callable[[str], ParityResult]
    ) -> None:
        result = plain("ulysses-zero-2")
        assert [row.ratio for row in result.gradients] == pytest.approx([2.0] * len(result.gradients), rel=1e-5)
        assert min(row.cosine for row in result.gradients) == pytest.approx(1.0, abs=1e-6)

    def test_adam_hides_it_from_the_loss_curve(self, runs: Runs) -> None:
        adamw = BY_NAME["ulysses-zero-2"].with_adamw()
        report = ParityResult.of(runs.plain(adamw), runs.reference(adamw)).curves
        assert report.max_loss_difference < 1e-6
        assert report.max_norm_difference == pytest.approx(1.0, abs=1e-4)

    @pytest.mark.parametrize("stage", [0, 1])
    def test_those_of_zero_0_and_1_are_too_large_like_those_of_zero_2(self, stage: int, runs: Runs) -> None:
        result = at_stage(stage, runs)
        assert [row.ratio for row in result.gradients] == pytest.approx([2.0] * len(result.gradients), rel=1e-5)

    def test_those_of_zero_3_are_right(self, runs: Runs) -> None:
        result = at_stage(3, runs)
        assert result.passed, str(result)


class TestBatches:
    def test_autotp_updates_once_more_for_each_rank_that_shares_the_model(
        self, plain: Callable[[str], ParityResult], runs: Runs
    ) -> None:
        bug, result = BY_NAME["autotp-batch"], plain("autotp-batch")
        half = replace(bug, mathematics={**bug.mathematics, "batch__global_batch_size": GLOBAL_BATCH // 2})
        assert len(result.run.learning_rates) == 2 * len(result.run.curve)
        assert not ParityResult.of(result.run, runs.reference(half)).wrong_gradients

    def test_a_mean_of_means_is_no_mean_over_tokens(self, plain: Callable[[str], ParityResult]) -> None:
        result = plain("mean-of-means")
        assert result.wrong_gradients == {row.name for row in result.gradients}
        assert result.curves.first_loss_beyond == 1
        assert result.gradients[0].cosine < 0.99

    def test_a_pipeline_takes_the_same_mean_of_means(self, plain: Callable[[str], ParityResult]) -> None:
        replicas, pipeline = plain("mean-of-means"), plain("mean-of-means-pipeline")
        assert ParityResult.of(run(pipeline), run(replicas)).parameters < 1e-6

    def test_zero_0_writes_a_gradient_that_is_not_a_number_into_every_weight(
        self, plain: Callable[[str], ParityResult]
    ) -> None:
        result = plain("empty-micro-batch-zero-0")
        assert result.curves.first_diverging_step == 3
        assert all(np.isnan(value).all() for value in result.run.parameters.values())

    def test_zero_1_skips_the_step_and_goes_on(self, plain: Callable[[str], ParityResult]) -> None:
        result = plain("empty-micro-batch-zero-1")
        assert np.isfinite(result.run.curve.losses).tolist() == [True, True, False, True, True]
        assert all(np.isfinite(value).all() for value in result.run.parameters.values())
        assert result.parameters > 1e-3


def test_warmup_lr_takes_two_steps_at_a_rate_of_zero_and_is_no_straight_line(
    plain: Callable[[str], ParityResult],
) -> None:
    result = plain("warmup")
    straight = [0.1 * step / WARMUP_STEPS for step in range(WARMUP_STEPS + 1)]
    assert result.baseline.learning_rates[: WARMUP_STEPS + 1] == pytest.approx(straight)
    late = [0.0, *(0.1 * np.log(step) / np.log(WARMUP_STEPS) for step in range(1, WARMUP_STEPS + 1))]
    assert result.run.learning_rates[: WARMUP_STEPS + 1] == pytest.approx(late)


class TestAccelerateOnCpuRanks:
    @pytest.mark.parametrize("asked", ["fsdp", "deepspeed"])
    def test_it_builds_ddp_whatever_is_asked_for(self, asked: str, ranks: Ranks) -> None:
        assert ranks(built, 2, asked) == [(2, "DistributedDataParallel")] * 2

    def test_its_launcher_starts_one_process(self, tmp_path: Path) -> None:
        launched = subprocess.run(
            [LAUNCHER, "launch", "--cpu", "--num_processes", "2", SCRIPTS / "accelerate_on_cpu.py"],
            env=os.environ | {"HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert launched.stdout == "1 process, Linear\n"


@pytest.mark.whole
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_clipping_divides_muons_updates_by_their_norm(zero_stage: int, ranks: Ranks) -> None:
    import_muon_uncompiled()
    norm, change = ranks(step, 2, zero_stage, 0.0)[0]
    assert LIMIT < norm < (4 * WIDTH) ** 0.5
    assert change == pytest.approx(RATE * norm, rel=1e-3)
    assert ranks(step, 2, zero_stage, LIMIT)[0] == pytest.approx((norm, RATE * LIMIT), rel=1e-3)


@pytest.mark.whole
def test_without_zero_clipping_leaves_muons_updates(ranks: Ranks) -> None:
    import_muon_uncompiled()
    assert ranks(step, 2, 0, LIMIT)[0][1] == pytest.approx(ranks(step, 2, 0, 0.0)[0][1], rel=1e-3)


def test_without_zero_3_the_optimizer_offloaded_to_nvme_is_still_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(files_written, 1, 2, str(tmp_path)) == [0]
