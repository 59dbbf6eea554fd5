"""Pairs of configs: one with a mistake that lint reports, and one close to it of which lint must not say that."""

from typing import Any

import pytest
from lint_cases import ADAMW, Config, ids, lint

Z = "zero_optimization"
SIZE: Config = {"train_batch_size": 8, "gradient_clipping": 1.0}
AUTO: Config = {"train_batch_size": "auto", "gradient_clipping": "auto"}
SP: Config = SIZE | {"sequence_parallel_size": 2}
OFFLOADED = {"device": "cpu"}
OFFLOADS: Config = AUTO | {Z: {"stage": 2, "offload_optimizer": OFFLOADED}}
MACHINES = """distributed_type: DEEPSPEED
num_processes: 16
num_machines: 2
machine_rank: 1
main_process_ip: {}
deepspeed_config:
  zero_stage: 2
  deepspeed_multinode_launcher: standard
"""

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
    ("HF109", "warning", OFFLOADS, AUTO | {Z: {"stage": 2}}, {"trainer": {"optim": "sgd"}}),
    ("HF109", "warning", OFFLOADS, OFFLOADS | {"optimizer": ADAMW}, {"trainer": {"optim": "adafactor"}}),
    ("HF110", "error", AUTO | {Z: False}, AUTO | {Z: {"stage": 0}}, {"trainer": {"seed": 1}}),
    ("AC113", "warning", MACHINES.format("localhost"), MACHINES.format("node-1"), {}),
    ("AC113", "warning", MACHINES.format("0.0.0.0"), MACHINES.format("0.0.0.0").replace("es: 2", "es: 1"), {}),
    (
        "DS816",
        "warning",
        SIZE | {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 4}},
        SIZE | {"activation_checkpointing": {"contiguous_memory_optimization": False, "number_checkpoints": 4}},
        {},
    ),
)


def test_accelerate_offloads_adam_in_place_of_an_optimizer_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import deepspeed.ops.adam
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    made: list[Any] = []
    monkeypatch.setattr(deepspeed.ops.adam, "DeepSpeedCPUAdam", lambda _, **values: made.append(values))
    map_pytorch_optim_to_deepspeed(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9))
    assert made == [{"lr": 0.1, "weight_decay": 0, "adamw_mode": False}]


def test_an_optimizer_that_accelerate_offloads_as_it_is_has_no_finding() -> None:
    for optim in ("adamw_torch", "adamw_torch_fused", "adagrad", "lion_32bit"):
        assert "HF109" not in ids(lint(OFFLOADS, trainer={"optim": optim}))


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
        ({"optimizer": {"type": "cpu_adam", "params": {"lr": 1e-3}}}, "AdamW"),
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
