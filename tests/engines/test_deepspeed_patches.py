"""Each patch of toolkit/engines/deepspeed_patches.py is still needed: without it, DeepSpeed still has the fault.

A test that fails here after an upgrade is good news: delete the patch.
"""

import contextlib
import importlib
import io
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from engine_states import changes
from non_finite_steps import train_around
from torch import nn
from transformers import AutoConfig

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines import deepspeed_patches
from toolkit.engines.optimizer import Lion
from toolkit.launch.local_ranks import RankFailedError
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity.run.train_in_memory import train_in_memory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measure.step_counter import UPDATE, StepCounter

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]


def plain_engine(
    stage: int = 0,
    accumulation: int = 1,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **sections: Any,
) -> Any:
    """A DeepSpeed engine of a tiny model with two parameter groups, without any patch."""
    deepspeed_patches.skip_shared_memory_op()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **sections,
    }
    return deepspeed.initialize(model=model, optimizer=kind(groups, lr=0.1), config=config)[0]


def backward(engine: Any, factor: float = 1.0) -> None:
    inputs = torch.ones(1, 4, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(inputs).sum() * factor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed chooses the GPU")
def test_the_shared_memory_op_is_skipped_wherever_deepspeed_chooses_the_cpu() -> None:
    """A machine without a GPU needs no DS_ACCELERATOR: DeepSpeed looks by itself, when it is imported."""
    code = "import deepspeed, toolkit.engines.deepspeed_engine; print(deepspeed.ops.__compatible_ops__)"
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "{'deepspeed_shm_comm': False}"


def test_deepspeed_still_builds_the_shared_memory_op(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    builder = SimpleNamespace(
        NAME="deepspeed_shm_comm", load=lambda: loaded.append("op"), absolute_name=lambda: "deepspeed.ops.comm"
    )
    accelerator = SimpleNamespace(create_op_builder=lambda name: builder)
    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(backend, "get_accelerator", lambda: accelerator)
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    backend.build_shm_op()
    assert loaded == ["op"]


def printed_at_start(_: int) -> str:
    from deepspeed.pipe import PipelineModule

    plain_engine()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        PipelineModule(layers=[nn.Linear(4, 4)], num_stages=1)
    return output.getvalue()


def test_a_pipeline_module_still_prints_to_stdout(ranks: Ranks) -> None:
    assert ranks(printed_at_start, 1, 0)[0]


def test_norms_on_a_cpu_are_still_imprecise() -> None:
    gradient = torch.randn(30_000_000, generator=torch.Generator().manual_seed(0))
    assert float(gradient.norm()) != pytest.approx(float(gradient.double().norm()), rel=1e-4)


def counted_step(stage: int) -> tuple[int, int]:
    """Of one update by a plain engine: how often the host reads a device tensor, and the bytes that norms read."""
    engine = plain_engine(stage)
    backward(engine)
    counter = StepCounter()
    counter.part = UPDATE
    counter.start()
    engine.step()
    counts = counter.stop()
    return sum(counts.host_reads.values()), counts.norm_bytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_still_copies_gradients_for_their_norm(ranks: Ranks, stage: int) -> None:
    _, norm_bytes = ranks(counted_step, 1, stage)[0]
    assert norm_bytes >= 8 * (4 * 4 + 4)


def test_zero_still_reads_the_device_repeatedly_in_an_update(ranks: Ranks) -> None:
    reads, _ = ranks(counted_step, 1, 2)[0]
    assert reads > 1


def one_group(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """AdamW with all parameters in one group, whose gradients ZeRO-3 joins."""
    return torch.optim.AdamW([parameter for group in groups for parameter in group["params"]], lr=lr)


def bytes_joined(_: int) -> int:
    engine = plain_engine(3, kind=one_group)
    backward(engine)
    counter = StepCounter()
    counter.part = UPDATE
    counter.start()
    engine.step()
    return counter.stop().moved_by_name[UPDATE, "cat"]


def test_zero_3_still_copies_the_gradients_of_a_sub_group_together(ranks: Ranks) -> None:
    assert ranks(bytes_joined, 1, 0)[0] >= 8 * (4 * 4 + 4)


IN_BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def bytes_of_zeros(_: int) -> int:
    engine = plain_engine(1, **IN_BF16)
    backward(engine)
    counter = StepCounter()
    counter.part = UPDATE
    counter.start()
    engine.step()
    return counter.stop().moved_by_name[UPDATE, "zero_"]


def test_zero_1_still_fills_its_gradients_with_zeros_twice(ranks: Ranks) -> None:
    assert ranks(bytes_of_zeros, 1, 0)[0] >= 2 * 4 * (4 * 4 + 4)


def weights_without_a_gradient(is_patched: bool) -> list[torch.Tensor]:
    """Weights after two steps of two micro-batches; in the second step, nothing depends on the bias."""
    engine = plain_engine(1, accumulation=2, **IN_BF16)
    if is_patched:
        deepspeed_patches.overwrite_first_gradients(engine.optimizer)
    for step in range(2):
        for factor in (1.0, 3.0):
            inputs = torch.full((1, 4), factor, dtype=torch.bfloat16)
            outputs = nn.functional.linear(inputs, engine.module.weight) if step else engine(inputs)
            engine.backward(outputs.sum())
            engine.step()
    return [partition.detach().clone() for partition in engine.optimizer.fp32_groups_flat_partition]


def test_a_gradient_that_a_step_lacks_is_not_that_of_the_step_before(ranks: Ranks) -> None:
    patched, plain = (ranks(weights_without_a_gradient, 1, is_patched)[0] for is_patched in (True, False))
    assert len(patched) == len(plain) == 2
    assert all(map(torch.equal, patched, plain))


def empty_norm(_: int) -> str:
    plain_engine()
    try:
        deepspeed.runtime.utils.get_global_norm_of_tensors([])
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_norm_of_no_tensor_still_fails(ranks: Ranks) -> None:
    assert "non-empty" in ranks(empty_norm, 1, 0)[0]


def test_an_offloaded_step_after_an_overflow_is_still_skipped(
    make_recipe: Make, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_patches, "clear_skipped_gradients", lambda optimizer: None)
    recipe = Strategy.parse("z2-offload").apply(make_recipe(**changes("adamw"), precision="bf16"), 2)
    with pytest.raises(RankFailedError, match="the gradient norm is"):
        ranks(train_around, 2, recipe, "gradient")


def trained_leaf(_: int) -> str:
    leaf = {"leaf_module": {"classes": ["torch.nn.modules.linear.Linear"]}}
    engine = plain_engine(zero_optimization={"stage": 3, **leaf})
    try:
        backward(engine)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_leaf_whose_input_has_no_gradient_still_reduces_zeros(ranks: Ranks) -> None:
    assert "must match" in ranks(trained_leaf, 1, 0)[0]


def test_the_experts_of_a_mixture_train_alone_under_zero_3(make_recipe: Make, ranks: Ranks, tmp_path: Path) -> None:
    tiny_config("mixtral", num_hidden_layers=2, vocab_size=321).save_pretrained(tmp_path / "model")
    fields = {"model__overrides": {}, "model__train_only": ["*.experts.*"]}
    recipe = make_recipe(**changes("sgd"), model__name_or_path=str(tmp_path / "model"), **fields)
    first, last = (ranks(train_in_memory, 2, Strategy.parse(name).apply(recipe, 2))[0] for name in ("z1", "z3"))
    assert last.curve.losses == pytest.approx(first.curve.losses, rel=1e-6)


def weights_after_nan(_: int) -> torch.Tensor:
    engine = plain_engine()
    backward(engine, math.nan)
    engine.step()
    return engine.module.weight.detach()


def test_zero_0_still_applies_a_nan(ranks: Ranks) -> None:
    """So a step is not taken, and `discard_gradients` takes its place."""
    assert ranks(weights_after_nan, 1, 0)[0].isnan().all()


def boundaries_after_discarding(_: int) -> list[bool]:
    engine = plain_engine(accumulation=2)
    backward(engine)
    engine.step()
    backward(engine)
    engine.zero_grad()  # instead of engine.step()
    return [engine.is_gradient_accumulation_boundary() for _ in range(1)]


def test_a_step_that_is_not_taken_is_still_not_counted(ranks: Ranks) -> None:
    # The next micro-batch is the first of its step, and DeepSpeed takes it for the last.
    assert ranks(boundaries_after_discarding, 1, 0) == [[True]]


def linked_states(_: int) -> list[bool]:
    engine = plain_engine(stage=1)
    backward(engine)
    engine.step()
    parameters = (engine.module.weight, engine.module.bias)
    return ["exp_avg" in (parameter._hp_mapping.optim_fragment or ()) for parameter in parameters]


def test_the_second_parameter_group_is_still_not_linked_to_its_states(ranks: Ranks) -> None:
    assert ranks(linked_states, 1, 0) == [[True, False]]


def zero_init_without_communication(_: int) -> str:
    deepspeed_patches.skip_shared_memory_op()
    layer, sizes = (
        nn.Linear(4, 4),
        {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
    )
    try:
        deepspeed.zero.Init(module=layer, config_dict_or_path={**sizes, "zero_optimization": {"stage": 3}})
    except Exception as error:
        return type(error).__name__
    return ""


def test_zero_init_still_needs_deepspeeds_own_process_group(ranks: Ranks) -> None:
    # Without it the batch sizes of the config do not match the one rank that it assumes.
    assert ranks(zero_init_without_communication, 2, 0) == ["AssertionError"] * 2


def test_ulysses_still_reads_key_value_heads_that_gpt2_omits() -> None:
    assert not hasattr(AutoConfig.for_model("gpt2"), "num_key_value_heads")
    source = deepspeed.runtime.sequence_parallel.ulysses_sp.__file__
    with open(source) as file:
        assert "arch_cfg.num_key_value_heads" in file.read()


ULYSSES: dict[str, Any] = {"parallel": {"ulysses": 2, "zero_stage": 1}, "train__steps": 1}


def test_ulysses_attention_still_joins_the_heads(
    make_recipe: Make, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []

    def look(attn_implementation: str) -> None:
        exchange = deepspeed_patches.ALL_ATTENTION_FUNCTIONS[attn_implementation]

        def attend(module: nn.Module, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            output, weights = exchange(module, query, *arguments, **options)
            shapes.append(tuple(output.shape))
            return output.reshape(*output.shape[:2], query.shape[1], -1), weights

        deepspeed_patches.ALL_ATTENTION_FUNCTIONS[attn_implementation] = attend

    monkeypatch.setattr(deepspeed_patches, "keep_heads_separate", look)
    found = ranks(train_in_memory, 2, make_recipe(**ULYSSES), lambda engine: list(shapes))[0].inspected
    assert found
    assert {len(shape) for shape in found} == {3}


def test_bf16_norms_under_ulysses_still_count_the_first_rank_only(
    make_recipe: Make, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_patches, "count_norms_on_all_ranks", lambda optimizer: None)
    monkeypatch.setattr(deepspeed_patches, "fix_gradient_norms", lambda engine, partition: None)
    with pytest.raises(Exception, match=r"non-empty|expects"):
        ranks(train_in_memory, 2, make_recipe(**ULYSSES, precision="bf16"))


def test_deepspeed_still_reduces_the_norm_once_for_each_parameter_group() -> None:
    """So stages with different numbers of groups would wait for each other (equalize_norm_calls)."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    def reductions(groups: int) -> int:
        calls = []

        def norm(gradients: Any, parameters: Any) -> torch.Tensor:
            calls.append("reduction")
            return torch.ones(())

        stand_in = SimpleNamespace(
            bit16_groups=[[]] * groups,
            cpu_offload=False,
            has_moe_layers=False,
            averaged_gradients=[[]] * groups,
            params_in_partition=[[]] * groups,
            get_grad_norm_direct=norm,
            _muon_update_lacks_loss_scale=lambda index: False,
        )
        DeepSpeedZeroOptimizer.scaled_global_norm(stand_in)
        return len(calls)

    assert (reductions(1), reductions(2)) == (1, 2)


def untested_warnings(_: int) -> list[int]:
    """How often DeepSpeed warns of Lion: by itself, as a tested optimizer, and as another one."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.utils.logger.addHandler(handler)
    quiet = deepspeed_patches.without_untested_warning
    counts = []
    for around in (contextlib.nullcontext(), quiet("lion"), quiet("adamw8bit")):
        records.clear()
        with around:
            plain_engine(stage=1, kind=Lion)
        counts.append(sum("untested optimizer" in record.getMessage() for record in records))
    return counts


def test_deepspeed_still_warns_of_optimizers_that_are_tested_here(ranks: Ranks) -> None:
    assert ranks(untested_warnings, 1, 0) == [[1, 0, 1]]
