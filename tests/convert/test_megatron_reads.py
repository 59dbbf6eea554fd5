"""Megatron-Core itself reads what is exported: the same logits as transformers, and the losses that would follow."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import daily
from megatron_runs import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    MegatronLayout,
    import_megatron,
    logits_of_megatron,
)
from test_export_state import draw, save_as_accelerate
from test_export_state import make_config as make_state_config
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from toolkit.config.recipe import Recipe
from toolkit.convert.export_state import export_state
from toolkit.convert.import_run import import_run
from toolkit.convert.megatron_states import MegatronForm, common_state
from toolkit.engines.optimizer import learning_rate

Ranks = Callable[..., list[Any]]
VOCABULARY = 328
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WIDE: dict[str, Any] = {
    "intermediate_size": FFN,
    "num_key_value_heads": GROUPS,
    "head_dim": HIDDEN // HEADS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MIXTURE = WIDE | {"num_experts_per_tok": 2, "sliding_window": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": FFN, "activation_function": "gelu"},
    "gpt2-tied": {"n_inner": FFN, "activation_function": "gelu", "tie_word_embeddings": True},
    "llama": WIDE,
    "mistral": WIDE | {"sliding_window": None},
    "qwen2": WIDE,
    "qwen3": WIDE,
    "mixtral": MIXTURE | {"num_local_experts": EXPERTS},
    "qwen3_moe": MIXTURE | {"num_experts": EXPERTS, "moe_intermediate_size": EXPERT_FFN, "norm_topk_prob": True},
}
MIXTURES = ("mixtral", "qwen3_moe")
ONE = MegatronLayout()
LAYOUTS = {
    "one": ONE,
    "tp2-pp2": MegatronLayout(tp=2, pp=2),
    "ep2": MegatronLayout(ep=2),
}
CASES = [(family, layout) for family in FAMILIES for layout in LAYOUTS if layout != "ep2" or family in MIXTURES]
DAILY = [("qwen3", "one"), ("mixtral", "tp2-pp2")]


def make_config(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family.removesuffix("-tied"), **(SIZES | FAMILIES[family]))


def save_model(family: str, folder: Path) -> Any:
    """A model whose biases and norms differ from those of a new one, and whose logits are not near zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", daily(CASES, lambda i, case: case in DAILY), ids="-".join)
def test_megatron_core_computes_the_logits_of_transformers(ranks: Ranks, tmp_path: Path, case: tuple[str, str]) -> None:
    family, layout = case
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    import_megatron()
    model = save_model(family, tmp_path / "model")
    export_state(tmp_path / "model", tmp_path / "theirs", form="megatron", megatron=MegatronForm(is_local=True))
    ids = torch.randint(VOCABULARY, (3, 16))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    place = str(tmp_path / "theirs" / "iter_0000000")
    read = partial(logits_of_megatron, place, family, ids, VOCABULARY, LAYOUTS[layout])
    found = ranks(read, LAYOUTS[layout].ranks)[0]
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def objects_of(folder: Path) -> set[str]:
    """Keys of what is no tensor."""
    entries = FileSystemReader(folder / "iter_0000000").read_metadata().state_dict_metadata
    return {key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata)}


ATTENTION = ["self_attention.linear_qkv", "self_attention.linear_proj"]
DENSE = [*ATTENTION, "mlp.linear_fc1", "mlp.linear_fc2"]
MOE = ["mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"]
EXTRA: dict[str, tuple[list[str], list[str], list[str]]] = {
    "gpt2": (DENSE, [], []),
    "qwen3": (DENSE, ["self_attention.q_layernorm", "self_attention.k_layernorm"], []),
    "mixtral": (ATTENTION, ["pre_mlp_layernorm"], MOE),
}
"""Layers with an extra state, as megatron-core 0.16.1 asks for them: linear layers, norms and experts.

Those of norms are of a model whose layers are Transformer Engine's (2.20), which has one of the last norm besides.
"""


@pytest.mark.parametrize("is_local", [False, True], ids=["transformer-engine", "local"])
@pytest.mark.parametrize("family", EXTRA)
def test_every_layer_has_the_extra_states_that_megatron_core_asks_for(
    tmp_path: Path, family: str, is_local: bool
) -> None:
    save_model(family, tmp_path / "model")
    export_state(tmp_path / "model", tmp_path / "out", form="megatron", megatron=MegatronForm(is_local=is_local))
    linear, norms, experts = EXTRA[family]
    layers = linear if is_local else [*linear, *norms]
    expected = {
        f"decoder.layers.{layer}._extra_state/shard_{number}_{LAYERS}" for layer in layers for number in range(LAYERS)
    }
    for layer, number, expert in itertools.product(experts, range(LAYERS), range(EXPERTS)):
        expected.add(f"decoder.layers.{layer}._extra_state/shard_{number}.{expert}_{LAYERS}.{EXPERTS}")
    if not is_local:
        expected.add("decoder.final_layernorm._extra_state/shard_0_1")
    assert objects_of(tmp_path / "out") == expected


STYLES = {
    "constant": {},
    "constant_with_warmup": {"warmup_steps": 3},
    "linear": {"warmup_steps": 3},
    "polynomial": {"warmup_steps": 3, "min_lr_ratio": 0.1},
    "cosine": {"warmup_steps": 3},
    "cosine_with_min_lr": {"warmup_steps": 3, "min_lr_ratio": 0.1},
    "inverse_sqrt": {"warmup_steps": 3},
    "warmup_stable_decay": {"warmup_steps": 3, "min_lr_ratio": 0.1, "decay_steps": 4},
}


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("step", [0, 2, 5, 17])
def test_the_scheduler_of_megatron_goes_on_with_the_learning_rates_of_the_recipe(
    make_recipe: Callable[..., Recipe], name: str, step: int
) -> None:
    scheduler_module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    recipe = make_recipe(schedule={"name": name, **STYLES[name]}, train__steps=20)
    settings = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": recipe.optimizer.weight_decay}
    common = common_state(
        step=step,
        updates=step,
        settings=settings,
        recipe=recipe.model_dump(mode="json"),
        is_expert_parallel=False,
    )
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    (plain,) = optimizer.param_groups
    decaying, spared = common["optimizer"]["optimizer"]["param_groups"]
    optimizer.param_groups = [plain | decaying, plain | spared]
    batch = recipe.batch.global_batch_size
    theirs = scheduler_module.OptimizerParamScheduler(
        optimizer,
        # transformers warms up from the final rate there: --lr-warmup-init
        init_lr=common["opt_param_scheduler"]["min_lr"] if name == "warmup_stable_decay" else 0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=1,
        lr_decay_steps=2,
        lr_decay_style="constant",
        start_wd=recipe.optimizer.weight_decay,
        end_wd=recipe.optimizer.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=4 * batch,
        lr_wsd_decay_style="cosine",
    )
    theirs.load_state_dict(common["opt_param_scheduler"])
    rate = learning_rate(recipe)
    for number in range(step, 20):
        expected = pytest.approx(rate(number), rel=1e-12, abs=1e-18)
        assert all(group["lr"] == expected for group in optimizer.param_groups), number
        assert [group["weight_decay"] for group in optimizer.param_groups] == [recipe.optimizer.weight_decay, 0.0]
        theirs.step(increment=batch)


@pytest.mark.parametrize("name", ["cosine_with_restarts", "inverse_sqrt"])
def test_a_schedule_that_megatron_lacks_is_said(make_recipe: Callable[..., Recipe], tmp_path: Path, name: str) -> None:
    config = make_state_config("llama")
    theirs = save_as_accelerate(tmp_path / "theirs", config, draw(config))
    recipe = make_recipe(model={"name_or_path": str(theirs)}, schedule={"name": name})
    import_run(theirs, tmp_path / "ours", recipe)
    done = export_state(tmp_path / "ours", tmp_path / "out", form="megatron")
    assert f"Megatron-LM has no schedule like {name}: choose one of its own by its flags" in done.notices[-1]
    for form in ("dcp", "universal"):
        assert export_state(tmp_path / "ours", tmp_path / form, form=form).notices == ()


def test_megatron_says_of_its_optimizer_what_we_write(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """What Megatron-LM reads of `common.pt` as it goes on: it has no default for these."""
    config = make_state_config("mixtral")
    theirs = save_as_accelerate(tmp_path / "theirs", config, draw(config))
    import_run(theirs, tmp_path / "ours", make_recipe(model={"name_or_path": str(theirs)}))
    for is_expert_parallel in (False, True):
        out = tmp_path / f"out-{is_expert_parallel}"
        form = MegatronForm(is_expert_parallel=is_expert_parallel)
        export_state(tmp_path / "ours", out, form="megatron", megatron=form)
        (file,) = out.glob("iter_*/common.pt")
        common = torch.load(file, weights_only=True)
        assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
        assert common["content_metadata"]["chained_optim_avoid_prefix"]
        optimizers = [common["optimizer"][number] for number in (0, 1)] if is_expert_parallel else [common["optimizer"]]
        assert len(common["optimizer"]) == 2  # the two optimizers, or the groups of one and how it is stored
        for number, optimizer in enumerate(optimizers):
            assert optimizer["param_state_sharding_type"] == "fully_reshardable"
            for group in optimizer["optimizer"]["param_groups"]:
                assert group["is_expert_parallel"] == (number == 1)
                assert {"wd_mult", "lr_mult", "is_decoupled_lr", "default_config", "max_lr", "min_lr"} <= set(group)
                assert {"lr", "betas", "eps", "weight_decay", "bias_correction", "step"} <= set(group)
