"""What `dstk config` can add, on a real DeepSpeed engine: it starts, steps, and the option is in force."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_jobs import job

from toolkit.dsconfig.build import ConfigJob

Ranks = Callable[..., list[Any]]


def on_two_cpus(layout: str, **options: Any) -> dict[str, Any]:
    """The config of a job on two CPU ranks."""
    made = job(layout, **options)
    return ConfigJob(
        recipe=made.recipe, layout=made.layout, batch=made.batch, shape=made.shape, device="cpu", options=made.options
    ).config


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("name", "kind"), [("adagrad", "Adagrad"), ("muon", "MuonWithAuxAdam")])
def test_an_optimizer_that_no_recipe_has_takes_a_step(name: str, kind: str, stage: int, ranks: Ranks) -> None:
    state = ranks(_steps, 2, on_two_cpus(f"dp2-z{stage}", precision="fp32", optimizer=name))[0]
    assert state["optimizer"] == kind
    assert state["steps"] == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_may_be_summed_in_the_weights_precision(stage: int, ranks: Ranks) -> None:
    config = on_two_cpus(f"dp2-z{stage}", gradient_dtype="bf16", communication_dtype="bf16")
    state = ranks(_steps, 2, config)[0]
    assert (state["sums"], state["reduced"]) == ("torch.bfloat16", "torch.bfloat16")


def test_hpz_keeps_a_secondary_partition(ranks: Ranks) -> None:
    assert ranks(_steps, 2, on_two_cpus("dp2-z3", parallel={"hpz": 2}))[0]["hpz"] == 2


def test_a_scheduler_moves_the_learning_rate(ranks: Ranks) -> None:
    state = ranks(_steps, 2, on_two_cpus("dp2-z1", scheduler="WarmupCosineLR"))[0]
    assert state["lr"] == pytest.approx(2e-4 / 10)  # the second of ten steps of warm-up, from 0


def test_the_csv_monitor_writes_to_its_directory(tmp_path: Path, ranks: Ranks) -> None:
    config = on_two_cpus("dp2-z1", monitors=("csv",), log_dir=str(tmp_path), run_name="night")
    ranks(_steps, 2, config)
    assert [*(tmp_path / "night").glob("*.csv")]


def test_the_profiler_measures_the_step_after_profile_step(tmp_path: Path, ranks: Ranks) -> None:
    config = on_two_cpus("dp2-z1", profile_step=1)
    config["flops_profiler"]["output_file"] = str(tmp_path / "profile.txt")
    ranks(_steps, 2, config)
    assert "Profile Summary at step 2" in (tmp_path / "profile.txt").read_text()


def test_activation_checkpointing_is_configured(ranks: Ranks) -> None:
    config = on_two_cpus("dp2-z1", activation_checkpointing=True, cpu_checkpointing=True)
    assert ranks(_steps, 2, config)[0]["cpu_checkpointing"] is True


def _steps(config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    import torch

    import toolkit.engines.deepspeed_engine  # noqa: F401  (keeps DeepSpeed from compiling CPU collectives)

    torch.compiler.set_stance("force_eager")  # Muon compiles its update: a minute
    config |= {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 8, dtype=dtype)).float().sum())
        engine.step()
    return {
        "steps": engine.global_steps,
        "optimizer": type(engine.basic_optimizer).__name__,
        "sums": str(engine.get_data_types()[1]),
        "reduced": str(engine.communication_data_type),
        "hpz": engine.zero_hpz_partition_size(),
        "lr": engine.get_lr()[0],
        "cpu_checkpointing": engine._config.activation_checkpointing_config.cpu_checkpointing,
    }
