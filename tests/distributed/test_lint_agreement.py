"""The linter against DeepSpeed, Accelerator and the Trainer themselves."""

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
from rank_parent import become_rank_parent

from toolkit.dsconfig.lint import Facts, Finding, Linter
from toolkit.dsconfig.lint.inspect import examine
from toolkit.dsconfig.lint.rules import RULES, accelerate, auto
from toolkit.dsconfig.lint.schema import Node, members, schema

ROOT = Path(__file__).parents[2]
Z = "zero_optimization"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    become_rank_parent()


def refusal(config: Config) -> str | None:
    """What DeepSpeed says against a config."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def errors(config: Config) -> list[str]:
    found = examine(config, Facts())
    return [one.rule for one in found if (one.severity or RULES[one.rule].severity) == "error"]


def test_every_key_of_the_installed_deepspeed_is_known() -> None:
    """The schema, made again from the live DeepSpeed."""
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
"""Refused or not by what the machine has."""


def paths(prefix: tuple[str, ...], node: Node) -> Iterator[tuple[str, ...]]:
    for key, child in members(node).items():
        yield (*prefix, key)
        yield from paths((*prefix, key), child)


def mutated(count: int, seed: int) -> Iterator[Config]:
    """A config with one or two values of any type at any key, now and then under a name that is not quite a key."""
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
    rejected = [(config, why) for config in mutated(count, seed) if (why := refusal(config)) is not None]
    assert len(rejected) > count / 3
    assert [(config, why) for config, why in rejected if not errors(config)] == []


def test_what_deepspeed_rejects_lint_rejects() -> None:
    check_that_lint_rejects_what_deepspeed_rejects(400, seed=1)


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(2, 8))
def test_what_deepspeed_rejects_lint_rejects_in_thousands_of_configs(seed: int) -> None:
    check_that_lint_rejects_what_deepspeed_rejects(3000, seed)


def test_each_single_key_is_judged_as_deepspeed_judges_it() -> None:
    """A key of another name in each section: refused where DeepSpeed refuses it, and only there."""
    sections = [path for path in paths((), {"keys": schema()["keys"]}) if "section" in (_at(path) or {})]
    for path in sections:
        if _at(path)["section"] == "open" or path == ("bfloat16",):
            continue
        config: Config = {"train_batch_size": 1}
        inner: Any = config
        for part in path:
            inner = inner.setdefault(part, {})
        inner["nobody_has_this_key"] = 1
        refused = refusal(config) is not None
        judged = [one.rule.id for one in lint(config, runner="deepspeed") if one.path[:-1] == path]
        named = {"DS102", "DS103"} & set(judged)
        assert named == ({"DS102"} if refused else {"DS103"}), path


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


REFUSED_BY_THE_ENGINE: dict[str, Config] = {
    "DS202": {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "torch_adam": True}}},
    "HF102": {"train_batch_size": 4, "gradient_clipping": "auto", "optimizer": TORCH_ADAMW, Z: {"stage": 1}},
    "DS203": {"train_batch_size": 4, "steps_per_print": 0, "optimizer": TORCH_ADAMW},
    "DS205": {"train_batch_size": 4, "data_types": {"grad_accum_dtype": "FP32"}, "optimizer": TORCH_ADAMW},
    "DS207": {"train_batch_size": 4, "gradient_clipping": None, "optimizer": TORCH_ADAMW, Z: {"stage": 1}},
    "DS403": {"train_batch_size": 4, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    | {"optimizer": TORCH_ADAMW},
    "DS407": {"train_batch_size": 4, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    | {"optimizer": TORCH_ADAMW, Z: {"stage": 2}},
    "DS409": {"train_batch_size": 4, "data_types": {"param_dtype": "bf16"}, "optimizer": TORCH_ADAMW},
    "DS503": {"train_batch_size": 4, Z: {"stage": 3, "offload_param": {"device": "nvme"}}, "optimizer": TORCH_ADAMW},
    "DS508": {"train_batch_size": 4, Z: {"stage": 1, "compute_grad_norm": False}, "optimizer": TORCH_ADAMW},
    "DS511": {"train_batch_size": 4, Z: {"stage": 1, "legacy_stage1": True}, "optimizer": TORCH_ADAMW},
    "DS513": {"train_batch_size": 4, "prescale_gradients": True, Z: {"stage": 2}, "optimizer": TORCH_ADAMW},
    "DS515": {"train_batch_size": 4, Z: {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    "DS516": {"train_batch_size": 4, "managed_gradient_accumulation": False, "optimizer": TORCH_ADAMW}
    | {Z: {"stage": 1, "overlap_comm": True}},
    "DS517": {"train_batch_size": 4, Z: {"stage": 2, "zenflow": {}}, "optimizer": TORCH_ADAMW},
    "DS518": {"train_batch_size": 4, "torch_autocast": {"enabled": True}, "optimizer": TORCH_ADAMW}
    | {Z: {"stage": 1, "zero_quantized_weights": True}},
    "DS701": {"train_batch_size": 4, "optimizer": {"type": "sgd", "params": {"lr": 0.1}}},
    "DS702": {"train_batch_size": 4, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}},
    "DS704": {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "max_grad_norm": 0}}},
    "DS705": {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "beta": 0}}},
    "DS706": {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0], "torch_adam": True}},
    },
    "DS751": {"train_batch_size": 4, "optimizer": TORCH_ADAMW, "scheduler": {"type": "warmuplr", "params": {}}},
    "DS752": {"train_batch_size": 4, "optimizer": TORCH_ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": {}}},
    "DS753": {"train_batch_size": 4, "optimizer": TORCH_ADAMW, "scheduler": {"type": "WarmupLR", "params": {"x": 1}}},
    "DS754": {"train_batch_size": 4, "optimizer": TORCH_ADAMW, "scheduler": {"type": "WarmupLR"}},
    "DS755": {"train_batch_size": 4, "optimizer": TORCH_ADAMW}
    | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
    "DS761": {"train_batch_size": 4, "optimizer": TORCH_ADAMW, Z: {"stage": 1}}
    | {"scheduler": {"type": "StepLR", "params": {"step_size": 2}}},
}
"""By the rule that must say so: DeepSpeed takes the config, and fails when it builds the engine or takes a step."""


def train(configs: list[Config]) -> list[str | None]:
    """On one rank: what stops two steps of a tiny model with each config."""
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    out: list[str | None] = []
    for config in configs:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        engine = None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
                dtype = next(engine.module.parameters()).dtype
                for _ in range(2):
                    loss = engine(torch.randn(4, 8, dtype=dtype)).float().pow(2).mean()
                    engine.backward(loss)
                    engine.step()
            out.append(None)
        except Exception as error:
            out.append(f"{type(error).__name__}: {error}"[:200])
        finally:
            if engine is not None:
                engine.destroy()
    return out


def test_lint_calls_nothing_an_error_that_deepspeed_trains_with(ranks: Callable[..., list[Any]]) -> None:
    configs = documented()
    (trained,) = ranks(train, 1, [*configs.values()])
    assert {name: why for name, why in zip(configs, trained, strict=True) if why} == {}
    assert {name: found for name, config in configs.items() if (found := errors(config))} == {}


def test_lint_finds_what_stops_the_engine_later(ranks: Callable[..., list[Any]]) -> None:
    configs = REFUSED_BY_THE_ENGINE
    assert [rule for rule, config in configs.items() if refusal(config)] == []
    (trained,) = ranks(train, 1, [*configs.values()])
    assert [rule for rule, why in zip(configs, trained, strict=True) if why is None] == []
    assert [rule for rule, config in configs.items() if rule not in errors(config)] == []


def test_the_valid_configs_of_these_tests_are_valid_for_deepspeed() -> None:
    for name, config in valid().items():
        one_gpu = config | {"train_batch_size": 8}
        assert refusal(one_gpu) is None, name


def test_deepspeed_accepts_a_file_that_was_mended(tmp_path: Path) -> None:
    for case in planted(120, seed=9):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(case.config))
        linted = Linter(facts=Facts(gpus=8), mends=True, runner="deepspeed").run([str(path)])
        if not _stops(linted.findings):
            mended = json.loads(path.read_text())
            mended.pop("train_batch_size", None)
            assert refusal({"train_micro_batch_size_per_gpu": 4} | mended) is None, case


def _stops(findings: list[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def test_the_auto_values_are_those_that_the_trainer_replaces() -> None:
    from transformers.integrations import deepspeed as integration

    source = inspect.getsource(integration.HfTrainerDeepSpeedConfig)
    replaced = set(re.findall(r'self\.fill_(?:match|only)\(\s*"([\w.]+)"', source))
    assert replaced <= auto.REPLACED["trainer"]
    assert auto.REPLACED["trainer"] - replaced <= auto.REPLACED["accelerate"]


def test_the_auto_values_are_those_that_accelerator_replaces() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    source = inspect.getsource(Accelerator._prepare_deepspeed) + inspect.getsource(DeepSpeedPlugin)
    known = {name for name in re.findall(r'"([a-z]\w*(?:\.\w+)+)"', source) if name.split(".")[0] in schema()["keys"]}
    whole = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    assert auto.REPLACED["accelerate"] == known | whole


def test_the_keys_of_accelerates_config_are_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    assert set(ClusterConfig.__dataclass_fields__) <= set(accelerate._KEYS)
    options = {action.dest for action in launch_command_parser()._actions}
    assert {*accelerate._INSIDE, *accelerate._BESIDE} <= options


def test_an_optimizer_section_names_parameters_of_the_live_classes() -> None:
    assert errors({"train_batch_size": 1, "optimizer": ADAMW}) == []
    assert ids(lint({"train_batch_size": 1, "optimizer": ADAMW}), "error") == []
