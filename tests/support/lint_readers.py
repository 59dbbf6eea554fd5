"""What the programs that read a config do with it: whether they stop, and what they then train with."""

import contextlib
import copy
import gc
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml

from toolkit.config.layout import Layout

Config = dict[str, Any]
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "torch_adam": True}}
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


NO_COMPILER = "a kernel would be compiled"
"""The error of what is not known: tests compile nothing."""


class NeedsCompilerError(BaseException):
    """No Exception, which DeepSpeed would catch."""


class Outcome(NamedTuple):
    """What came of a config. The rest is empty after an error."""

    error: str | None
    read: Mapping[str, Any] = {}
    """What the reader took from it."""
    weights: tuple[float, ...] = ()
    """After two steps."""


def completed(config: Config, runner: str) -> Config:
    """Add what every run needs, and kernels that need no compiler: PyTorch's."""
    config = copy.deepcopy(config)
    if not any(name in config for name in _SIZES):
        config["train_micro_batch_size_per_gpu"] = "auto" if runner == "trainer" else 4
    if runner == "deepspeed":
        config.setdefault("optimizer", copy.deepcopy(TORCH_ADAMW))
    optimizer = config.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if isinstance(params, dict) and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        params.setdefault("torch_adam", True)
    if runner == "trainer":
        config.setdefault("zero_optimization", {"stage": 0})
    return config


def outcomes(cases: list[tuple[Config | str, str, Mapping[str, Any]]]) -> list[Outcome]:
    """On each rank: what becomes of configs (or texts), each with its runner and what is given beside it."""
    import accelerate.commands.launch  # noqa: F401
    import deepspeed
    import transformers.trainer  # noqa: F401

    gc.freeze()  # the readers collect garbage at every start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.ops.op_builder.builder.OpBuilder.jit_load = _refuse_to_compile
    # DeepSpeed refuses fp16 on a CPU for its speed: PyTorch computes with it.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    return [_outcome(*case) for case in cases]


def _refuse_to_compile(*args: Any, **kwargs: Any) -> Any:
    raise NeedsCompilerError


def _outcome(example: Config | str, runner: str, given: Mapping[str, Any]) -> Outcome:
    read = {"deepspeed": _deepspeed, "trainer": _trainer, "accelerate": _accelerate, "toolkit": _toolkit}[runner]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return read(example, given)
    except NeedsCompilerError:
        return Outcome(NO_COMPILER)
    except (Exception, SystemExit) as error:
        return Outcome(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


def _file(text: str, name: str) -> str:
    path = Path(f"{os.getpid()}-{name}")
    path.write_text(text)
    return str(path)


def _trained(model: Any, config: Any) -> Outcome:
    import torch

    torch.manual_seed(0)
    parameters = list(model.parameters())
    with contextlib.ExitStack() as stack:
        if any(hasattr(one, "ds_id") for one in parameters):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        weights = torch.cat([one.detach().float().flatten() for one in parameters]).tolist()
    read = {name: str(value) for name, value in vars(config).items() if name != "_param_dict"}
    return Outcome(None, read, tuple(weights))


def _deepspeed(example: Config | str, given: Mapping[str, Any]) -> Outcome:
    import deepspeed
    import hjson
    import torch
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
    from deepspeed.utils import groups

    if isinstance(example, str):  # as DeepSpeedConfig reads its file
        example = hjson.loads(example, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    config = completed(example, "deepspeed")
    layout = Layout.parse(given.get("layout", "tp1"))
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)]
    if layout.ep > 1:
        layers.insert(2, _experts(layout.ep))
    if layout.pp > 1:
        model = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=lambda out, _: out.float().pow(2).mean())
    else:
        model = torch.nn.Sequential(*layers)
    engine, before = None, dict(vars(groups))
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config, mpu=_groups(layout)
        )
        torch.manual_seed(torch.distributed.get_rank())
        for _ in range(2):
            if layout.pp > 1:
                engine.train_batch(iter([(torch.randint(16, (4, 8)), torch.zeros(1))] * 64))
                continue
            for _ in range(int(engine.gradient_accumulation_steps())):
                engine.backward(30 * engine(torch.randint(16, (4, 8))).float().pow(2).mean())
                engine.step()
        return _trained(engine.module, engine._config)
    finally:
        if engine is not None:
            engine.destroy()
        vars(groups).update(before)  # an mpu would stay for the next config


def _experts(ranks: int) -> Any:
    """DeepSpeed's own layer, as a script has it that shares experts out."""
    import torch
    from deepspeed.moe.layer import MoE

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2 * ranks, ep_size=ranks)

        def forward(self, x: Any) -> Any:
            return self.moe(x)[0]

    return Experts()


def _groups(layout: Layout) -> Any:
    """The groups of a tensor-parallel script."""
    if layout.tp == 1:
        return None
    import torch
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    dp = max(1, torch.distributed.get_world_size() // layout.tp)
    return PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=1, num_mp=layout.tp, num_dp=dp))


def _trainer(example: Config | str, given: Mapping[str, Any]) -> Outcome:
    import torch
    from accelerate.state import AcceleratorState, PartialState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    AcceleratorState._reset_state()
    PartialState._reset_state()
    text = example if isinstance(example, str) else json.dumps(completed(example, "trainer"))
    config = _file(text, "hf.json")
    wanted: Config = {"per_device_train_batch_size": 2, "max_steps": 2, "report_to": [], "save_strategy": "no"}
    with mock.patch.dict(os.environ):
        arguments = TrainingArguments(output_dir="out", deepspeed=config, **wanted | dict(given.get("trainer", {})))
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
        row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
        trainer = Trainer(model=model, args=arguments, train_dataset=[row] * 8)
        trainer.train()
        outcome = _trained(trainer.deepspeed.module, trainer.deepspeed._config)
        trainer.save_model(f"{os.getpid()}-saved")
        saved = sorted(path.name for path in Path(f"{os.getpid()}-saved").iterdir())
        shutil.rmtree(f"{os.getpid()}-saved")
        return outcome._replace(read={**outcome.read, "saved": saved})


def _accelerate(example: Config | str, given: Mapping[str, Any]) -> Outcome:
    import torch
    from accelerate import Accelerator
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DummyOptim
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    AcceleratorState._reset_state()
    PartialState._reset_state()
    if not isinstance(example, str):
        named = _file(json.dumps(completed(example, "accelerate")), "named.json")
        section = {"deepspeed_config_file": named}
        example = yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": section})
    arguments = launch_command_parser().parse_args(["--config_file", _file(example, "accelerate.yaml"), "train.py"])
    arguments, defaults, precision_is_written = _validate_launch_command(arguments)
    with mock.patch.dict(os.environ):
        if not arguments.use_deepspeed:
            return Outcome(None, {name: str(value) for name, value in vars(arguments).items()})
        written = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_is_written else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(written)  # as accelerate launch does
        command, environment = prepare_deepspeed_cmd_env(arguments)
        os.environ.update(environment)
        if given.get("mixed_precision"):
            os.environ["ACCELERATE_MIXED_PRECISION"] = given["mixed_precision"]
        accelerator = Accelerator()
        plugin = accelerator.state.deepspeed_plugin
        read = {"config": str(plugin.deepspeed_config), "command": str(command), "init": str(plugin.zero3_init_flag)}
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if "optimizer" in plugin.deepspeed_config:
            optimizer = DummyOptim(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(torch.arange(16), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(batch).float().pow(2).mean())
            optimizer.step()
        return _trained(model.module, model._config)._replace(read=read)


def _toolkit(example: Config | str, given: Mapping[str, Any]) -> Outcome:
    from toolkit.config.recipe import Recipe
    from toolkit.dsconfig.build import ConfigJob, shape_of
    from toolkit.dsconfig.merge import merge_user_config

    sections: Config = {"model": {"name_or_path": "gpt2"}, "data": {"source": "x", "tokenizer": "bytes", "seq_len": 8}}
    sections |= {"batch": {"global_batch_size": 4, "micro_batch_size": 4}, "train": {"steps": 9}}
    sections |= {"precision": "bf16", "optimizer": {"name": "adamw", "lr": 1e-3}}
    built = ConfigJob.of(Recipe.model_validate(sections), 1, shape_of("gpt2")).config
    assert isinstance(example, dict)
    return Outcome(None, merge_user_config(built, example))
