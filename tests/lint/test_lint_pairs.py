"""Pairs of configs: one with a mistake that lint reports, and one close to it of which lint must not say that."""

from typing import Any

import pytest
from lint_cases import Config, ids, lint

Z = "zero_optimization"
SIZE: Config = {"train_batch_size": 8, "gradient_clipping": 1.0}
AUTO: Config = {"train_batch_size": "auto", "gradient_clipping": "auto"}
SP: Config = SIZE | {"sequence_parallel_size": 2}
OFFLOADED = {"device": "cpu"}

Said = tuple[str, str, Config, Config, dict[str, Any]]
PAIRS: tuple[Said, ...] = (
    (
        "DS407",
        "error",
        SIZE | {Z: {"stage": 2}, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        SIZE
        | {Z: {"stage": 2}}
        | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {},
    ),
    ("DS309", "warning", SP, SP | {"compile": {"deepcompile": True, "passes": ["autosp"]}}, {}),
    ("DS609", "warning", SP, SP | {"compile": {"deepcompile": True, "passes": ["autosp"]}}, {}),
    (
        "DS608",
        "warning",
        SIZE | {"tensor_parallel": {"autotp_size": 2}},
        AUTO | {"tensor_parallel": {"autotp_size": 2}},
        {},
    ),
    ("DS110", "warning", {"overlap_comm": True} | SIZE, {"overlap_comm": {"x": 1}} | SIZE, {}),
    ("DS802", "info", SIZE | {Z: {"stage": 2}}, SIZE | {Z: {"stage": 2, "overlap_comm": False}}, {"gpus": 8}),
    ("DS507", "warning", AUTO | {Z: {"stage": 3}}, SIZE | {Z: {"stage": 3}}, {}),
    ("DS507", "info", SIZE | {Z: {"stage": 3}}, SIZE | {Z: {"stage": 3, "offload_param": OFFLOADED}}, {}),
    (
        "DS507",
        "warning",
        AUTO | {Z: {"stage": 3}},
        AUTO | {Z: {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}},
        {},
    ),
    (
        "DS709",
        "warning",
        {"train_batch_size": 8, Z: {"stage": 3, "offload_param": OFFLOADED, "offload_optimizer": OFFLOADED}},
        {"train_batch_size": 8, Z: {"stage": 3, "offload_param": OFFLOADED}},
        {},
    ),
    (
        "DS111",
        "info",
        SIZE | {Z: {"stage": 2, "stage3_max_live_parameters": 1e9}},
        SIZE | {Z: {"stage": 3, "stage3_max_live_parameters": 1e9}},
        {},
    ),
)


FOUND: tuple[Said, ...] = (
    (
        "HF104",
        "error",
        AUTO | {"fp16": {"enabled": True}},
        AUTO | {"fp16": {"enabled": "auto"}},
        {"trainer": {"bf16": True}},
    ),
    ("DS611", "error", SP | {"data_parallel_size": 2}, SP | {"data_parallel_size": 4}, {"gpus": 8}),
    (
        "DS206",
        "warning",
        SIZE | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "adam_w_mode": "false"}}},
        SIZE | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "adam_w_mode": False}}},
        {},
    ),
    (
        "DS507",
        "warning",
        AUTO | {Z: {"stage": 2}, "tensor_parallel": {"autotp_size": 2}},
        AUTO
        | {Z: {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True}, "tensor_parallel": {"autotp_size": 2}},
        {},
    ),
)


@pytest.mark.parametrize(("rule", "severity", "wrong", "near", "context"), [*PAIRS, *FOUND])
def test_a_rule_reports_the_mistake_and_not_what_is_close_to_it(
    rule: str, severity: str, wrong: Config | str, near: Config | str, context: dict[str, Any]
) -> None:
    assert ids(lint(wrong, **context), severity).count(rule) == 1
    assert rule not in ids(lint(near, **context), severity)


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({"BF16": {"enabled": True}}, "bf16"),
        ({"aio": {"thread_count": 1}}, "intra_op_parallelism"),
        ({"optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-3}}}, "AdamW"),
    ],
)
def test_a_name_of_another_kind_has_its_suggestion(config: Config, meant: str) -> None:
    assert [one for one in lint(SIZE | config) if f"Did you mean {meant}?" in one.message]


def test_a_section_inside_itself_is_not_sent_to_the_top_level() -> None:
    found = lint(SIZE | {"fp16": {"enabled": True, "fp16": {"enabled": True}}})
    assert ids(found, "error") == ["DS102"]


def test_what_a_truth_value_as_a_string_does_is_said_for_its_key() -> None:
    (stops,) = [one for one in lint(SIZE | {"wall_clock_breakdown": "false"}) if one.rule.id == "DS206"]
    (counts,) = [one for one in lint(SIZE | {"dump_state": "false"}) if one.rule.id == "DS206"]
    assert (stops.severity, "raises" in stops.effect) == ("error", True)
    assert (counts.severity, "counts as true" in counts.effect) == ("warning", True)


def test_stage_3_keys_of_a_stage_2_file_are_one_info() -> None:
    zero = {"stage": 2, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "sub_group_size": 1e8}
    (found,) = lint(SIZE | {Z: zero, "bf16": {"enabled": True}})
    assert (found.rule.id, found.severity, "2 more" in found.message) == ("DS111", "info", True)
