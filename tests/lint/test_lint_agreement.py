"""Compare the linter with DeepSpeed, Accelerator and the Trainer themselves."""

import contextlib
import copy
import importlib.util
import inspect
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lint_cases import ADAMW, TORCH_ADAMW, Config, ids, lint, planted, valid
from lint_readers import outcomes
from rank_parent import become_rank_parent

from toolkit.lint import Finding, LintContext, Linter
from toolkit.lint.finding import RULES
from toolkit.lint.key_schema import Node, members, schema
from toolkit.lint.linter import check_config
from toolkit.lint.rules import accelerate_file as accelerate
from toolkit.lint.rules import auto_values as auto

ROOT = Path(__file__).parents[2]
Z = "zero_optimization"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    become_rank_parent()


def rejection(config: Config) -> str | None:
    """Return the error with which DeepSpeed rejects a config."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def errors(config: Config) -> list[str]:
    found = check_config(config, LintContext())
    return [one.rule for one in found if (one.severity or RULES[one.rule].severity) == "error"]


def test_every_key_of_the_installed_deepspeed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema, made again from the live DeepSpeed, with the keys that nothing in its source reads."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("generate_lint_schema", ROOT / "docs" / "generate_lint_schema.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.text() == generator.FILE.read_text(), "run: python docs/generate_lint_schema.py"


VALUES = (
    *(True, False, None, 0, 1, -1, 2, 3, 2.5, 1.0, 1e9, -0.5, 0.5, float("nan"), float("inf")),
    *("auto", "true", "false", "x", "", "1e-4", "5", "5.0", "2.5", "nan", "inf", " 7 ", "1_000", "cpu", "nvme", "fp16"),
    *("BF16", "none", [], [1], ["a"], {}, {"enabled": True}, {"x": 1}),
)
BASES: tuple[Config, ...] = (
    {"train_micro_batch_size_per_gpu": 2, "optimizer": TORCH_ADAMW, Z: {"stage": 1}},
    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": True}, Z: {"stage": 3}},
    {"train_batch_size": 8, "fp16": {"enabled": True}, Z: {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, Z: {"stage": 0}},
)
OF_THE_MACHINE = {("aio", "use_gds")}
"""Accepted or rejected depending on the machine."""


def paths(prefix: tuple[str, ...], node: Node) -> Iterator[tuple[str, ...]]:
    for key, child in members(node).items():
        yield (*prefix, key)
        yield from paths((*prefix, key), child)


def mutated(count: int, seed: int) -> Iterator[Config]:
    """Yield configs with one or two values of any type at any key, sometimes under a misspelled key."""
    draw = random.Random(seed)
    known = [*paths((), {"keys": schema()["keys"]}), *(tuple(key.split(".")) for key in schema()["removed"])]
    known = [path for path in known if path not in OF_THE_MACHINE]
    for _ in range(count):
        config = copy.deepcopy(draw.choice(BASES))
        for _ in range(draw.choice((1, 1, 2))):
            path = draw.choice(known)
            if draw.random() < 0.1:
                path = (*path[:-1], path[-1] + draw.choice(("s", "_x")))
            inner: Any = config
            for part in path[:-1]:
                if not isinstance(inner.get(part), dict):
                    inner[part] = {}
                inner = inner[part]
            inner[path[-1]] = copy.deepcopy(draw.choice(VALUES))
        yield config


def check_that_lint_rejects_what_deepspeed_rejects(count: int, seed: int) -> None:
    rejected = [(config, why) for config in mutated(count, seed) if (why := rejection(config)) is not None]
    assert len(rejected) > count / 3
    assert [(config, why) for config, why in rejected if not errors(config)] == []


def test_what_deepspeed_rejects_lint_rejects() -> None:
    check_that_lint_rejects_what_deepspeed_rejects(400, seed=1)


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(2, 8))
def test_what_deepspeed_rejects_lint_rejects_in_thousands_of_configs(seed: int) -> None:
    check_that_lint_rejects_what_deepspeed_rejects(3000, seed)


AUTO_EP: dict[str, tuple[Any, ...]] = {
    "autoep_size": (1, 2, 3, 4, 0, "2", True, 2.0),
    "expert_tensor_parallel_size": (1, 2, 0),
    "async_split_plan": (True, False, 1),
    "score_func": ("softmax", "relu", None),
    "score_apply": ("post", "after"),
    "combine_impl": ("auto", "fused_weighted_sum", "sum"),
    "row_weighting_impl": ("eager", "fused", "slow"),
    "gate_up_impl": ("separate", "fused", "both"),
    "use_grouped_mm": (True, False),
    "comm_backend": ("comm", "deepep", "nccl"),
    "comm_max_tokens_per_rank": (0, 4096, -1),
    "comm_num_sm": (12, 0),
    "expert_activation": ("swiglu", "relu", None),
    "preset_model": ("mixtral", "deepseek_v3", "olmoe", None),
    "num_expert_groups": (None, 4, 0),
    "num_limited_groups": (None, 2, 8),
    "has_shared_experts": (True, None, "yes"),
    "expert_w1": ("w1", "", "a.b", 1, None),
}


def test_what_auto_ep_refuses_lint_refuses_and_nothing_else() -> None:
    """Composed sections against DeepSpeed's own validation, with and without AutoTP."""
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config

    draw, refused = random.Random(4), 0
    for _ in range(1500):
        section = {key: draw.choice(AUTO_EP[key]) for key in draw.sample(sorted(AUTO_EP), draw.choice((1, 2, 3)))}
        tp, before, offload = draw.choice((1, 1, 2)), draw.random() < 0.2, draw.random() < 0.2
        preset = draw.choice(("mixtral", None))
        config: Config = {"train_batch_size": 8, "expert_parallel": {"enabled": True, **section}}
        config |= {"tensor_parallel": {"autotp_size": tp, "preset_model": preset}}
        config |= {"use_data_before_expert_parallelism": before, "gradient_clipping": 1.0}
        config |= {Z: {"stage": 2, "offload_optimizer": {"device": "cpu" if offload else "none"}}}
        try:
            validate_autoep_config(
                *(parse_autoep_config(config["expert_parallel"]), 8, 1, tp, 1),
                zero_stage=2,
                tp_preset_model=preset,
                zero_offload_optimizer=offload,
                use_data_before_expert_parallel=before,
            )
            why = None
        except (ValueError, TypeError) as error:
            why, refused = str(error), refused + 1
        said = [one.rule for one in check_config(config, LintContext(gpus=8)) if one.rule.startswith("DS65")]
        assert (why is None) == (not said), (section, tp, why, said)
    assert 500 < refused < 1300


def test_an_unknown_key_is_an_error_only_in_sections_that_deepspeed_validates() -> None:
    """An unknown key in each section: an error if DeepSpeed rejects it, and only then."""
    sections = [path for path in paths((), {"keys": schema()["keys"]}) if "section" in (_at(path) or {})]
    assert len(sections) > 30
    for path in sections:
        if _at(path)["section"] == "open" or path == ("bfloat16",):
            continue
        config: Config = {"train_batch_size": 1}
        inner: Any = config
        for part in path:
            inner = inner.setdefault(part, {})
        inner["nobody_has_this_key"] = 1
        rejected = rejection(config) is not None
        reported = [one.rule.id for one in lint(config, runner="deepspeed") if one.path[:-1] == path]
        named = {"DS102", "DS103"} & set(reported)
        assert named == ({"DS102"} if rejected else {"DS103"}), path


def _at(path: tuple[str, ...]) -> Node:
    node: Node = {"keys": schema()["keys"]}
    for part in path:
        node = members(node)[part]
    return node


def documented() -> dict[str, Config]:
    """What DeepSpeed's documentation and tests write, with kernels that need no compiler."""
    small: Config = {"train_batch_size": 4, "steps_per_print": 1, "optimizer": TORCH_ADAMW}
    out: dict[str, Config] = {
        "the first example": small | {"gradient_accumulation_steps": 1, "zero_optimization": True},
        "micro-batch": {"train_micro_batch_size_per_gpu": 1, "optimizer": TORCH_ADAMW, "prescale_gradients": False},
        "clipping": small | {"gradient_clipping": 1.0, "wall_clock_breakdown": False},
        "no clipping": small | {"gradient_clipping": 0.0, Z: {"stage": 1}},
        "accumulation": {**small, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
        "bf16": small | {"bf16": {"enabled": True}, Z: {"stage": 2}},
        "bf16, fp32 sums": small
        | {"bf16": {"enabled": True}, Z: {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
        "bf16 without ZeRO": small | {"bf16": {"enabled": True}, Z: {"stage": 0}},
        "states in bf16": small
        | {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            Z: {"stage": 2},
        },
        "old name of bf16": small | {"bfloat16": {"enabled": True}, Z: {"stage": 2}},
        "autocast": small | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, Z: {"stage": 1}},
        "communication": small | {"communication_data_type": "fp32", Z: {"stage": 2, "reduce_scatter": True}},
        "SGD": small | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        "SGD, allowed": small
        | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, Z: {"stage": 1}, "zero_allow_untested_optimizer": True},
        "Adam, coupled": small
        | {
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False}},
            Z: {"stage": 1},
        },
        "WarmupLR": small
        | {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10},
            }
        },
        "WarmupDecayLR": small
        | {
            Z: {"stage": 2},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}},
        },
        "OneCycle": small
        | {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}, Z: {"stage": 1}},
        "WarmupCosineLR": small
        | {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}}},
        "profilers": small
        | {
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 3,
                "detailed": True,
            }
        },
        "monitors": small | {"tensorboard": {"enabled": False, "output_path": "x/", "job_name": "j"}},
        "checkpointing": small
        | {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": False}},
        "tags": small | {"checkpoint": {"tag_validation": "Ignore", "load_universal": False}},
        "elements of texts": small | {Z: {"stage": "1", "reduce_bucket_size": "500000000"}},
        "an unknown key": small | {"my_own_key": 3},
        "a stage that moves nothing": small | {Z: {"stage": 1, "offload_param": {"device": "cpu"}}},
        "a switch of old": small | {Z: {"stage": 2, "cpu_offload": False}},
        "data efficiency": small | {"data_efficiency": {"enabled": False, "seed": 1234}},
        "compile": small | {"compile": {"deepcompile": False}},
        "timers": small | {"timers": {"throughput": {"enabled": True, "synchronized": True}}},
    }
    for stage in (0, 1, 2, 3):
        out[f"ZeRO-{stage}"] = small | {Z: {"stage": stage}}
    buckets = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
    }
    out["ZeRO-2 of the tutorial"] = small | {Z: {"stage": 2, **buckets, "reduce_scatter": True}}
    out["ZeRO-3 of the documentation"] = small | {
        Z: {
            "stage": 3,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6,
            "sub_group_size": 1e12,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    }
    host = {"device": "cpu", "pin_memory": False}
    out["offload"] = small | {Z: {"stage": 2, "offload_optimizer": host}, "zero_force_ds_cpu_optimizer": False}
    return out


def test_lint_reports_no_error_in_configs_that_deepspeed_trains_with(ranks: Callable[..., list[Any]]) -> None:
    configs = documented()
    (trained,) = ranks(outcomes, 1, [(config, "deepspeed", {}) for config in configs.values()])
    assert {name: one.error for name, one in zip(configs, trained, strict=True) if one.error} == {}
    assert {name: found for name, config in configs.items() if (found := errors(config))} == {}


def test_the_valid_configs_of_these_tests_are_valid_for_deepspeed() -> None:
    configs = {name: config | {"train_batch_size": 8} for name, config in valid().items()}
    assert len(configs) == 8
    assert {name: why for name, config in configs.items() if (why := rejection(config)) is not None} == {}


def test_deepspeed_accepts_a_file_that_was_fixed(tmp_path: Path) -> None:
    accepted = 0
    for case in planted(120, seed=9):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(case.config))
        linted = Linter(context=LintContext(gpus=8), fixes=True, runner="deepspeed").run([str(path)])
        if not _stops(linted.findings):
            fixed = json.loads(path.read_text())
            fixed.pop("train_batch_size", None)
            assert rejection({"train_micro_batch_size_per_gpu": 4} | fixed) is None, case
            accepted += 1
    assert accepted > 60


def _stops(findings: list[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def test_the_auto_keys_are_those_that_the_trainer_replaces() -> None:
    from transformers.integrations import deepspeed as integration

    source = inspect.getsource(integration.HfTrainerDeepSpeedConfig)
    replaced = set(re.findall(r'self\.fill_(?:match|only)\(\s*"([\w.]+)"', source))
    assert replaced <= auto.REPLACED["trainer"]
    assert auto.REPLACED["trainer"] - replaced <= auto.REPLACED["accelerate"]


def test_the_auto_keys_are_those_that_accelerator_replaces() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    source = inspect.getsource(Accelerator._prepare_deepspeed) + inspect.getsource(DeepSpeedPlugin)
    known = {name for name in re.findall(r'"([a-z]\w*(?:\.\w+)+)"', source) if name.split(".")[0] in schema()["keys"]}
    whole = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    assert auto.REPLACED["accelerate"] == known | whole


def test_the_keys_of_accelerates_config_are_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    assert set(ClusterConfig.__dataclass_fields__) <= set(accelerate._FACTS["keys"])
    options = {action.dest for action in launch_command_parser()._actions}
    assert {*accelerate._FACTS["deepspeed_keys"], *accelerate._FACTS["other_keys"]} <= options


def test_an_optimizer_section_names_parameters_of_the_live_classes() -> None:
    assert errors({"train_batch_size": 1, "optimizer": ADAMW}) == []
    assert ids(lint({"train_batch_size": 1, "optimizer": ADAMW}), "error") == []
