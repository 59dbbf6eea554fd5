"""The files in ds_configs/: what the generator writes; DeepSpeed, accelerate and the Trainer train with them."""

import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from config_jobs import job

from toolkit.dsconfig.trainer import accelerate_config

FOLDER = Path(__file__).parents[2] / "ds_configs"
FILES = sorted(FOLDER.glob("*.json"))
AUTO = [path for path in FILES if path.stem.endswith("_auto")]
PLAIN = [path for path in FILES if path not in AUTO]
# Without a drive, this one is zero3_offload_all.
TRAINED = [path for path in AUTO if path.stem != "zero3_nvme_auto"]
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def trainer_ranks(ranks: Ranks) -> Ranks:
    """Ranks from a process that has imported the Trainer too."""
    from transformers import Trainer

    assert Trainer
    return ranks


def read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def on_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """`config` without what needs a GPU, a drive or a compiler.

    That is pinned memory, side streams, fused and vectorised kernels, quantized collectives, and files.
    """
    config = copy.deepcopy(config)
    if "optimizer" in config:
        config["optimizer"]["params"] |= {"torch_adam": True, "fused": False}
    config["zero_force_ds_cpu_optimizer"] = False
    config.pop("aio", None)
    zero = config["zero_optimization"]
    zero["overlap_comm"] = False
    for section in ("offload_optimizer", "offload_param"):
        if section in zero:
            zero[section] = {"device": "cpu", "pin_memory": False}
    if "zero_hpz_partition_size" in zero:
        zero |= {"zero_hpz_partition_size": 2, "zero_quantized_weights": False, "zero_quantized_gradients": False}
    return config


def autos(config: Any) -> Iterator[Any]:
    """The values that are still `auto`."""
    for value in config.values():
        if isinstance(value, dict):
            yield from autos(value)
        elif value == "auto":
            yield value


def test_committed_configs_are_what_the_generator_writes() -> None:
    sys.path.insert(0, str(FOLDER))
    from generate import configs

    assert {path.name: read(path) for path in FILES} == configs()


def test_the_readme_lists_every_config() -> None:
    listed = re.findall(r"`(\w+\.json)`", (FOLDER / "README.md").read_text())
    assert set(listed) == {path.name for path in FILES}


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_deepspeed_reads_the_file_itself(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = read(path)
    read_back = DeepSpeedConfig(config | {"train_batch_size": None})
    assert read_back.zero_optimization_stage == config["zero_optimization"]["stage"]
    assert read_back.gradient_clipping == config["gradient_clipping"]


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_deepspeed_takes_a_step_with_each_config(path: Path, ranks: Ranks) -> None:
    assert ranks(_one_step, 2, on_cpu(read(path)))[0]


def _one_step(config: dict[str, Any]) -> bool:
    import deepspeed
    import torch

    import toolkit.engines.deepspeed_engine  # noqa: F401  (keeps DeepSpeed from compiling CPU collectives)

    config |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    stage = config["zero_optimization"]["stage"]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    before = model[0].weight.detach().clone() if stage < 3 else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2):
        dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
        engine.backward(engine(torch.ones(1, 8, dtype=dtype)).float().sum())
        engine.step()
    applied = bool(engine.was_step_applied())
    return applied and (before is None or not torch.equal(before.to(model[0].weight.dtype), model[0].weight))


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_the_trainer_fills_in_every_auto_and_takes_a_step(path: Path, tmp_path: Path, trainer_ranks: Ranks) -> None:
    state = trainer_ranks(_trainer_step, 2, on_cpu(read(path)), str(tmp_path))[0]
    stage = read(path)["zero_optimization"]["stage"]
    assert state == {"autos": 0, "stage": stage, "steps": 1, "micro": 1, "train": 4, "clip": 0.7, "bf16": True}


def _trainer_step(config: dict[str, Any], folder: str) -> dict[str, Any]:
    import torch
    from accelerate import PartialState
    from transformers import Trainer, TrainingArguments

    import toolkit.engines.deepspeed_engine  # noqa: F401

    # Without a GPU the Trainer finds no backend and would train alone without a word: give it a configured state.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    arguments = TrainingArguments(
        accelerator_config={"use_configured_state": True},
        output_dir=folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.7,
        max_steps=1,
        use_cpu=True,
        bf16=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        deepspeed=config,
    )
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    trainer = Trainer(model=_tiny_gpt2(), args=arguments, train_dataset=samples)
    trainer.train()
    engine = trainer.model_wrapped
    used = engine.config
    return {
        "autos": len([*autos(used)]),
        "stage": engine.zero_optimization_stage(),
        "steps": engine.global_steps,
        "micro": engine.train_micro_batch_size_per_gpu(),
        "train": engine.train_batch_size(),
        "clip": engine.gradient_clipping(),
        "bf16": used["bf16"]["enabled"],
    }


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_accelerator_fills_in_every_auto_and_takes_a_step(path: Path, trainer_ranks: Ranks) -> None:
    state = trainer_ranks(_accelerator_step, 2, on_cpu(read(path)))[0]
    assert state == {"autos": 0, "stage": read(path)["zero_optimization"]["stage"], "train": 4, "steps": 1}


@pytest.mark.parametrize("layout", ["dp2-z0", "dp2-z1", "dp2-z2", "dp2-z3"])
def test_accelerator_prepares_an_optimizer_with_the_json_of_its_yaml(layout: str, trainer_ranks: Ranks) -> None:
    """Nothing in it is `auto`, and accelerate's own accumulation and precision do not count."""
    made = on_cpu(accelerate_config(job(layout)))
    made |= {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    state = trainer_ranks(_accelerator_step, 2, made, False)[0]
    assert state == {"autos": 0, "stage": int(layout[-1]), "train": 4, "steps": 1}


def _accelerator_step(config: dict[str, Any], in_arguments: bool = True) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    import toolkit.engines.deepspeed_engine  # noqa: F401

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    if in_arguments:
        plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2, gradient_clipping=0.7)
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16", gradient_accumulation_steps=2)
    else:
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = _tiny_gpt2()
    loader = torch.utils.data.DataLoader([torch.arange(8) for _ in range(4)], batch_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "autos": len([*autos(engine.config)]),
        "stage": engine.zero_optimization_stage(),
        "train": engine.train_batch_size(),
        "steps": engine.global_steps,
    }


def _tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=32))
