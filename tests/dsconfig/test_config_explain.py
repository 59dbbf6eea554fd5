"""`--explain`: every key that is ever generated is explained, and the stated default is DeepSpeed's own."""

import inspect
import re
from typing import Any

import pytest
from config_jobs import job

from toolkit.dsconfig.build import ConfigJob
from toolkit.dsconfig.explain import KEYS, OPTIMIZER_DEFAULTS, SCHEDULER_DEFAULTS, explain
from toolkit.dsconfig.merge import leaves
from toolkit.dsconfig.trainer import trainer_config

_FILES = {"parallel": {"offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": "/n"}}
_WATCHED = {"monitors": ("tensorboard", "wandb", "csv", "comet"), "profile_step": 3, "activation_checkpointing": True}
JOBS: dict[str, ConfigJob] = {
    "fp32": job("dp8-z0", precision="fp32"),
    "fp16": job("dp8-z2", precision="fp16"),
    "autocast": job("dp8-z0"),
    "zero1": job("dp8-z1", **_WATCHED),
    "zero2_offload": job("dp8-z2", placed={"offload_optimizer": "cpu"}),
    "nvme": job("dp8-z3", **_FILES),
    "offload": job("dp8-z3", placed={"offload_optimizer": "cpu", "offload_params": "cpu"}),
    "zeropp": job("dp16-z3", nodes=2, parallel={"hpz": 8, "quantized_weights": True, "quantized_gradients": True}),
    "pipeline": job("dp4-pp2-z1"),
    "ulysses": job("dp4-u2-z3"),
    **{f"optimizer-{name}": job("dp8-z0", optimizer=name) for name in ("adagrad", "lamb", "muon")},
    **{f"scheduler-{name}": job("dp8-z1", scheduler=name) for name in SCHEDULER_DEFAULTS},
}


def with_optimizer(name: str) -> ConfigJob:
    made = job("dp8-z1")
    section = made.recipe.optimizer.model_copy(update={"name": name})
    return ConfigJob(
        recipe=made.recipe.model_copy(update={"optimizer": section}),
        layout=made.layout,
        batch=made.batch,
        shape=made.shape,
    )


JOBS |= {f"optimizer-{name}": with_optimizer(name) for name in ("sgd", "adam")}


@pytest.mark.parametrize("name", JOBS)
def test_every_key_is_explained(name: str) -> None:
    made = JOBS[name]
    rows = explain(made.config, made)
    assert [row.path for row in rows] == [path for path, _ in leaves(made.config)]
    assert all(row.purpose.endswith(".") and row.why for row in rows)


def test_every_auto_says_who_fills_it_in() -> None:
    made = job(scheduler="WarmupDecayLR")
    rows = [row for row in explain(trainer_config(made), made) if row.value == "auto"]
    assert len(rows) == 13
    assert all(row.why.startswith("filled in from ") for row in rows)


def test_no_key_is_explained_that_is_never_generated() -> None:
    generated = {path for made in JOBS.values() for path, _ in leaves(made.config)}
    assert KEYS.keys() - generated == set()


@pytest.mark.parametrize("name", JOBS)
def test_stated_defaults_are_those_of_deepspeed(name: str) -> None:
    made = JOBS[name]
    stated = {row.path: row.default for row in explain(made.config, made)}
    real = {path: live_default(path, made) for path in stated}
    assert stated == real


def live_default(path: str, made: ConfigJob) -> Any:
    """What the installed DeepSpeed takes where the key is absent."""
    section, _, name = path.rpartition(".")
    if section.startswith("optimizer"):
        return _optimizer_default(name, made.config["optimizer"]["type"])
    if section.startswith("scheduler"):
        return _scheduler_default(name, made.config["scheduler"]["type"])
    return _plain(_LIVE[section](name, made))


def _optimizer_default(name: str, kind: str) -> Any:
    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime.config import ADAM_W_MODE_DEFAULT
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    if name == "adam_w_mode":
        return ADAM_W_MODE_DEFAULT
    if name in ("type", "fused"):
        return None
    if name == "torch_adam":
        return False  # optimizer_parameters.pop(TORCH_ADAM_PARAM, False)
    if kind == "Muon":
        return inspect.signature(muon_update).parameters[name].default if name == "ns_method" else None
    classes: dict[str, Any] = {
        "AdamW": FusedAdam,
        "Adam": FusedAdam,
        "SGD": torch.optim.SGD,
        "Adagrad": torch.optim.Adagrad,
        "Lamb": FusedLamb,
    }
    return _plain(inspect.signature(classes[kind]).parameters[name].default)


def _scheduler_default(name: str, kind: str) -> Any:
    from deepspeed.runtime import lr_schedules

    if name == "type":
        return None
    default = inspect.signature(getattr(lr_schedules, kind)).parameters[name].default
    return None if default is inspect.Parameter.empty else default


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return getattr(value, "value", value)


def _of_model(module: str, name: str, **known: Any) -> Any:
    import importlib

    return getattr(importlib.import_module(f"deepspeed.{module}"), name)(**known)


def _field(model: Any, name: str) -> Any:
    """A field by its name, or by the alias that configs use."""
    fields = type(model).model_fields
    own = next((field for field, details in fields.items() if name in (field, details.alias)), None)
    assert own is not None, name
    return getattr(model, own)


def _top(name: str, made: ConfigJob) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    live = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})
    if name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        from deepspeed.runtime import constants

        return getattr(constants, f"{name.upper()}_DEFAULT")
    value = getattr(live, name)
    return {"torch.float32": "fp32"}.get(str(value), value)


def _object(module: str, name: str) -> Any:
    def read(key: str, made: ConfigJob) -> Any:
        return getattr(_of_model(module, name, param_dict={}), key)

    return read


def _pydantic(module: str, name: str) -> Any:
    def read(key: str, made: ConfigJob) -> Any:
        return _field(_of_model(module, name), key)

    return read


def _zero(name: str, made: ConfigJob) -> Any:
    if name == "stage":
        return _field(_of_model("runtime.zero.config", "DeepSpeedZeroConfig"), name)
    return _field(_of_model("runtime.zero.config", "DeepSpeedZeroConfig", stage=made.layout.zero_stage), name)


def _pipeline(name: str, made: ConfigJob) -> Any:
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.pipe import engine

    if name == "use_reentrant":  # the engine puts it in where it is not given
        source = inspect.getsource(engine.PipelineEngine)
        (default,) = re.findall(r"_config\.pipeline\['use_reentrant'\] = (\w+)", source)
        return default == "True"
    return get_pipeline_config({})[name]


def _autocast(name: str, made: ConfigJob) -> Any:
    from deepspeed.runtime import config

    return config.get_torch_autocast_enabled({}) if name == "enabled" else config.get_torch_autocast_dtype({})


def _data_types(name: str, made: ConfigJob) -> Any:
    from deepspeed.runtime import constants

    return getattr(constants, f"{name.upper()}_DEFAULT")


def _aio(name: str, made: ConfigJob) -> Any:
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    return get_aio_config({})[name]


_OFFLOAD = "runtime.zero.offload_config"
_LIVE = {
    "": _top,
    "zero_optimization": _zero,
    "zero_optimization.offload_optimizer": _pydantic(_OFFLOAD, "DeepSpeedZeroOffloadOptimizerConfig"),
    "zero_optimization.offload_param": _pydantic(_OFFLOAD, "DeepSpeedZeroOffloadParamConfig"),
    "bf16": _pydantic("runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": _pydantic("runtime.precision_config", "DeepSpeedFP16Config"),
    "torch_autocast": _autocast,
    "data_types": _data_types,
    "pipeline": _pipeline,
    "aio": _aio,
    "tensorboard": _pydantic("monitor.config", "TensorBoardConfig"),
    "wandb": _pydantic("monitor.config", "WandbConfig"),
    "csv_monitor": _pydantic("monitor.config", "CSVConfig"),
    "comet": _pydantic("monitor.config", "CometConfig"),
    "flops_profiler": _object("profiling.config", "DeepSpeedFlopsProfilerConfig"),
    "activation_checkpointing": _object(
        "runtime.activation_checkpointing.config", "DeepSpeedActivationCheckpointingConfig"
    ),
}


def test_every_parameter_with_a_default_is_explained() -> None:
    tables = {"optimizer": OPTIMIZER_DEFAULTS, "scheduler": SCHEDULER_DEFAULTS}
    names = {f"{kind}.params.{name}" for kind in tables for table in tables[kind].values() for name in table}
    assert len(names) > 15
    assert names - KEYS.keys() == set()
