"""What is said of published runs of 2021 and of FSDP2: closed forms, figures of the logs, and sums against replays."""

from dataclasses import replace
from pathlib import Path

import pytest
from made_measurements import CELLS, LLAMA, WIDE, write
from published import fsdp, megatron_2021, megatron_deepspeed, zero3
from published.formulas import parameter_count
from published.megatron_2021_layer import LayerWidths, recomputed_peak
from published.megatron_deepspeed_reserve import replayed
from published.megatron_stage import gpt_stage
from published.rows import GIB, Row, read

from toolkit.estimate.states import fsdp2


@pytest.fixture
def row(tmp_path: Path) -> Row:
    (found,) = read(write(tmp_path / "rows.csv", CELLS))
    return found


def test_megatrons_layer_holds_what_korthikanti_counts_when_it_is_recomputed() -> None:
    # Of sbh(10 + 24/t) + 5as²b/t bytes the input is not counted. At the worst moment, the backward pass of the last
    # matrix, the second dropout's mask is gone, the norms' statistics are there, and besides: the output, the gradients
    # of branch, residual and the matrix's input, and that of its weight, 4h²/t elements.
    s, b, h, a, t = 1024, 4, 8192, 32, 4
    kept = s * b * h * (10 + 24 / t) + 5 * a * s * s * b / t - 2 * s * b * h - s * b * h + 16 * s * b
    worst = kept + 2 * s * b * h * (1 + 1 + 1 + 4 / t) + 2 * 4 * h * h / t
    assert recomputed_peak(LayerWidths(seq_len=s, samples=b, hidden=h, heads=a, ffn=4 * h, tp=t)) == worst


def test_megatron_keeps_20_bytes_a_parameter_and_the_last_input_with_its_gradient(row: Row) -> None:
    # A stage in the middle of logs that report after one update, on a V100: 15492.846 MiB.
    found = megatron_2021.predict(replace(row, **WIDE))  # type: ignore[arg-type]
    assert not isinstance(found, str)
    a_layer = 12 * 8192**2 // 4 + 8192 * 3 // 4 + 8192 + 8192 + 8192 + 4 * 8192
    assert found.static == 4 * a_layer * 20 + 2 * 4 * 1024 * 8192 * 2
    assert found.peak == found.static
    assert found.static == pytest.approx(15492.84619140625 * 2**20, rel=1e-4)


def test_a_pipeline_of_deepspeed_keeps_its_buffers_between_two_steps(row: Row) -> None:
    middle = gpt_stage(replace(row, **WIDE), 1)  # type: ignore[arg-type]
    static, peak = megatron_deepspeed.allocated(middle.row, middle)
    hidden_state, mask = 4 * 1024 * 8192 * 2, 2 * 1024**2
    assert static == 14 * middle.held.numel + hidden_state // 4 + hidden_state + mask + middle.held.buffer_bytes + 4
    # Logged on a V100: 10837.395 and 17461.948 MiB.
    assert static == pytest.approx(10837.39501953125 * 2**20, rel=1e-5)
    assert peak == pytest.approx(17461.94775390625 * 2**20, rel=1e-5)


def test_a_replay_allocates_at_most_what_the_sums_say(row: Row) -> None:
    # Two ways to the same peak: sums over a stage's worst moment, and every allocation of two steps in its order.
    first = gpt_stage(replace(row, **WIDE | {"dp": 4, "zero": 1, "global_batch": 512}), 0)  # type: ignore[arg-type]
    static, peak = megatron_deepspeed.allocated(first.row, first)
    allocator = replayed(first, 4, static)
    assert allocator.peak_allocated == pytest.approx(peak, rel=0.01)
    assert peak < allocator.reserved < 1.4 * peak


def test_micro_batches_in_flight_follow_1f1b(row: Row) -> None:
    def in_flight(stage: int, micro_batches: int) -> set[int]:
        return {m.in_flight for m in gpt_stage(replace(row, pp=4, global_batch=2 * micro_batches), stage).moments}

    assert in_flight(0, 8) == {4}
    assert in_flight(3, 8) == {1}
    # As many micro-batches as stages: the second backward pass has no forward pass before it.
    assert in_flight(0, 4) == {4, 3}
    assert in_flight(1, 4) == {3}


def test_fsdp_shards_the_states_and_not_the_root_group(row: Row) -> None:
    llama = replace(row, **LLAMA)  # type: ignore[arg-type]
    few, many = fsdp.predict(replace(llama, dp=2)), fsdp.predict(replace(llama, dp=4))
    assert not isinstance(few, str)
    assert not isinstance(many, str)
    assert few.peak is not None
    assert many.peak is not None
    # Weights, moments and reduced gradients: 16 bytes a parameter, and the margin of 3 %.
    assert few.peak - many.peak == pytest.approx(1.03 * 16 * parameter_count(llama) / 4, rel=1e-3)
    assert few.peak < GIB


def test_fsdp_gathers_what_lies_outside_the_layers_throughout(row: Row) -> None:
    llama = replace(row, **LLAMA)  # type: ignore[arg-type]
    held = fsdp.architecture(llama).holdings(layers=4, by_decay=False)
    outside = 2 * 512 * 64 + 64
    assert held.numel == outside + 4 * held.layer_numel
    assert fsdp2().states(held, shards=2).gathered == 2 * (outside + 2 * held.layer_numel)


def test_zero_3_puts_a_sub_groups_gradients_together_in_16_and_in_32_bits(row: Row) -> None:
    # DeepSpeedExamples, training/bf16_master_weight: 25.74 GiB, 31.38 at the peak, which is the update of a billion
    # elements.
    model = {"layers": 32, "hidden": 4096, "ffn": 16384, "vocab": 50000, "seq_len": 512, "tp": 1, "pp": 1, "dp": 4}
    found = zero3.predict(replace(row, source_id="ds_bf16_master", **model))  # type: ignore[arg-type]
    assert not isinstance(found, str)
    assert found.peak is not None
    assert found.static == pytest.approx(25.74 * GIB, rel=0.005)
    assert found.peak == pytest.approx(31.38 * GIB, rel=0.005)
    assert 6e9 <= found.peak - found.static < 6.2e9
