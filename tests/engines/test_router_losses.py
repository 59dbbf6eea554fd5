"""The losses that balance experts: Hugging Face's own gradient in one process, and the same in every layout."""

import json
import math
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daily import daily
from safetensors.torch import load_file

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import Engine
from toolkit.engines.dropout import DropoutStream
from toolkit.engines.reference_engine import ReferenceEngine
from toolkit.engines.router_losses import sequence_loss, z_loss
from toolkit.engines.router_records import RouterOutput
from toolkit.engines.routing import Routing, check_routing
from toolkit.errors import ModelError
from toolkit.model_init.build_model import build_model, load_config
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
FORMULA = (
    "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoe_swa",
    "ernie4_5_moe", "flex_olmo", "mellum", "minimax", "laguna", "minimax_m2", "flint", "phimoe", "jamba", "qwen3_next",
    "granitemoehybrid", "qwen3_5_moe_text",
)  # fmt: skip
"""Families whose own loss in transformers has the formula."""


@pytest.fixture(scope="session")
def moe_recipe(make_recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A recipe of a tiny model of a family; changes as of `make_recipe`, and of its config with `config`."""

    def make(family: str = "mixtral", *, config: dict[str, Any] | None = None, **changes: Any) -> Recipe:
        folder = tmp_path_factory.mktemp(family)
        sizes = {"num_hidden_layers": 2, "vocab_size": 320} | (config or {})
        (folder / "config.json").write_text(json.dumps(tiny_config(family, **sizes).to_dict()))
        model = {"name_or_path": str(folder), **{k[7:]: v for k, v in changes.items() if k.startswith("model__")}}
        rest = {k: v for k, v in changes.items() if not k.startswith("model__")}
        return make_recipe(**{"train__steps": 3, "model": model} | rest)

    return make


def engine_of(recipe: Recipe) -> ReferenceEngine:
    return ReferenceEngine(Job.of(recipe, 1), build_model(recipe), torch.device("cpu"))


def a_batch(recipe: Recipe, lengths: list[int]) -> MicroBatch:
    torch.manual_seed(3)
    shape = (len(lengths), recipe.data.seq_len)
    labels = torch.randint(0, 300, shape)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return MicroBatch(input_ids=torch.randint(0, 300, shape), labels=labels, lengths=torch.tensor(lengths))


def gradients(engine: ReferenceEngine, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Of one step, before it is taken."""
    found: dict[str, torch.Tensor] = {}
    engine.before_update = lambda: found.update({name: value.clone() for name, value in engine.full_gradients()})
    targets = sum(int((batch.labels != -100).sum()) for batch in batches)
    engine.train_step(batches, target_tokens=targets, learning_rate=0.0)
    return found


@pytest.mark.parametrize("lengths", [[32, 32], [32, 7]], ids=["full", "padded"])
@pytest.mark.parametrize("family", daily(FORMULA, lambda _, family: family in ("mixtral", "gpt_oss")))
def test_the_default_is_the_gradient_of_hugging_faces_own_loss(
    moe_recipe: Make, family: str, lengths: list[int]
) -> None:
    asked = {
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "num_hidden_layers": 4 if family == "flint" else 2,
    }
    recipe = moe_recipe(family, config=asked, batch={"global_batch_size": 2, "micro_batch_size": 2})
    engine = engine_of(recipe)
    batch = a_batch(recipe, lengths)
    ours = gradients(engine, [batch])

    model = build_model(recipe).train()
    DropoutStream(model, batch.input_ids.device).start(batch.dropout_seed)  # where routers draw noise, the same
    mask = (torch.arange(recipe.data.seq_len) < torch.tensor(lengths)[:, None]).long()
    out = model(
        batch.input_ids,
        attention_mask=mask,
        labels=batch.labels,
        shift_labels=batch.labels,
        use_cache=False,
        output_router_logits=True,
    )
    out.loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # a frozen bias
            continue
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


def scores_of(logits: torch.Tensor, *, sigmoid: bool) -> torch.Tensor:
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("sigmoid", [True, False])
def test_the_sequence_loss_is_deepseeks(sigmoid: bool) -> None:
    samples, length, count, k, lengths = 3, 8, 5, 2, [8, 3, 6]
    torch.manual_seed(0)
    logits, experts = torch.randn(samples * length, count), torch.randint(0, count, (samples * length, k))
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).float().flatten()
    ours = sequence_loss(RouterOutput(logits, experts), mask, torch.tensor(lengths), lambda x: x, sigmoid=sigmoid)
    losses = []
    for sample, tokens in enumerate(lengths):
        rows = slice(sample * length, sample * length + tokens)
        f = [count / (k * tokens) * (experts[rows] == e).sum() for e in range(count)]
        p = [scores_of(logits[rows], sigmoid=sigmoid)[:, e].sum() / tokens for e in range(count)]
        losses.append(sum(one * other for one, other in zip(f, p, strict=True)))
    assert ours.item() == pytest.approx(float(sum(losses) / samples), rel=1e-6)


def test_the_z_loss_is_the_mean_over_tokens_without_padding() -> None:
    logits = torch.tensor([[1.0, 2.0], [0.5, -1.0], [9.0, 9.0]])
    ours = z_loss(
        RouterOutput(logits, torch.zeros(3, 1, dtype=torch.long)), torch.tensor([1.0, 1, 0]), torch.tensor(2.0)
    )
    squares = [math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits[:2].tolist()]
    assert ours.item() == pytest.approx(sum(squares) / 2, rel=1e-6)


ALL = {
    "micro_batch": {"router_z_loss": 0.1},
    "global": {"router_aux_loss": {"coefficient": 0.5, "scope": "global"}, "router_z_loss": 0.1},
    "noise": {"router_aux_loss": {"coefficient": 0.5, "scope": "global"}},
    "capacity": {"expert_capacity_factor": 0.8, "router_aux_loss": {"coefficient": 0.1}},
    "deepseek": {"router_aux_loss": {"coefficient": 0.5, "scope": "sequence"}, "router_bias_update": 0.01},
}
LAYOUTS = {
    "dp2-z1": (2, {"zero_stage": 1}),
    "z3": (2, {"zero_stage": 3}),
    "pp2-z0-recompute": (2, {"pp": 2, "zero_stage": 0, "recompute": "full"}),
    "pp2-dp2-z1": (4, {"pp": 2, "zero_stage": 1}),
    "tp2-sp-z1": (2, {"tp": 2, "sequence_parallel": True, "zero_stage": 1}),
    "tp2-pp2-z1": (4, {"tp": 2, "pp": 2, "zero_stage": 1}),
    "tp2-sp-pp2-z1": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "zero_stage": 1}),
    "tp2-sp-dp2-ep2-z2": (4, {"tp": 2, "ep": 2, "sequence_parallel": True, "zero_stage": 2}),
    "ep2-z3": (2, {"ep": 2, "zero_stage": 3}),
    "cp2-z1": (2, {"cp": 2, "zero_stage": 1}),
    "cp2-ep2-z3": (2, {"cp": 2, "ep": 2, "zero_stage": 3}),
    "cp2-pp2-z1": (4, {"cp": 2, "pp": 2, "zero_stage": 1}),
    "cp2-tp2-sp-z1": (4, {"cp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}),
    "ddp": (2, {}),
    "fsdp": (2, {}),
}
# Where ranks share sequences, a rank draws the noise of its own tokens, and under cp capacities are refused.
CASES = [
    (kind, layout)
    for kind, layout in product(ALL, LAYOUTS)
    if not (kind == "noise" and {"sp", "cp2"} & {*layout.split("-")}) and not (kind == "capacity" and "cp2" in layout)
]
DAILY = {
    ("micro_batch", "pp2-z0-recompute"),
    ("global", "tp2-sp-pp2-z1"),
    ("deepseek", "ep2-z3"),
    ("deepseek", "cp2-z1"),
    ("global", "cp2-tp2-sp-z1"),
    ("capacity", "tp2-sp-dp2-ep2-z2"),
}


@pytest.fixture(scope="session")
def reference_of(moe_recipe: Make, ranks: Ranks) -> Callable[[str], ParityRun]:
    return cache(
        lambda kind: ranks(train_in_memory, 1, balanced(moe_recipe, kind, train__engine="reference"), of_biases)[0]
    )


def balanced(moe_recipe: Make, kind: str, **changes: Any) -> Recipe:
    """Of samples with padding, which the losses must not count; the first layer of DeepSeek-V3 is dense."""
    fields = {f"model__{name}": value for name, value in ALL[kind].items()}
    family = {"deepseek": "deepseek_v3", "noise": "phimoe"}.get(kind, "mixtral")
    config = {"first_k_dense_replace": 1} if family == "deepseek_v3" else {}
    if kind == "micro_batch":
        config = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return moe_recipe(family, config=config, data__packing="padded", **fields, **changes)


def of_biases(engine: Engine) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in engine.buffers() if "correction_bias" in name}


@pytest.mark.parametrize("case", daily(CASES, lambda _, case: case in DAILY), ids="-".join)
def test_every_layout_trains_what_one_process_trains(
    moe_recipe: Make, ranks: Ranks, reference_of: Callable[[str], ParityRun], case: tuple[str, str]
) -> None:
    kind, layout = case
    world_size, parallel = LAYOUTS[layout]
    changes = {"train__engine": layout} if layout in ("ddp", "fsdp") else {"parallel": parallel}
    run = ranks(train_in_memory, world_size, balanced(moe_recipe, kind, **changes), of_biases)[0]
    reference = reference_of(kind)
    assert run.curve.losses == pytest.approx(reference.curve.losses, rel=1e-6)
    assert run.curve.grad_norms == pytest.approx(reference.curve.grad_norms, rel=1e-6)
    for name, value in reference.first_gradients.items():
        np.testing.assert_allclose(run.first_gradients[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert run.inspected == reference.inspected
    if kind == "deepseek":
        assert any(any(bias) for bias in reference.inspected.values())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama4_text", {"model__router_z_loss": 0.1}, "no router that can be watched"),
        ("mixtral", {"model__router_bias_update": 0.1}, "no bias that corrects"),
        ("deepseek_v3", {"model__router_aux_loss": {}}, "no router_aux_loss_coef"),
        ("laguna", {"model__router_aux_loss": {"coefficient": 1.0, "scope": "sequence"}}, "two kinds of scores"),
        ("ernie4_5_moe", {"model__router_bias_update": 0.1, "parallel": {"zero_stage": 3}}, "would be sharded"),
        ("longcat_flash", {"model__router_z_loss": 0.1}, "no router that can be watched"),
    ],
)
def test_a_balancing_that_the_family_does_not_allow_is_refused(
    moe_recipe: Make, family: str, changes: dict[str, Any], message: str
) -> None:
    recipe = moe_recipe(family, config={"num_hidden_layers": 4}, **changes)
    with pytest.raises(ModelError, match=message):
        check_routing(recipe, load_config(recipe.model))


def test_loads_count_experts_that_hand_a_token_on_as_it_is(moe_recipe: Make) -> None:
    """LongCat-Flash's routers choose from zero experts as well."""
    recipe = moe_recipe("longcat_flash", config={"num_hidden_layers": 4}, batch__micro_batch_size=2)
    config = load_config(recipe.model)
    engine = engine_of(recipe)
    assert engine.routing is not None
    assert engine.routing.count == config.n_routed_experts + config.zero_expert_num
    batch = a_batch(recipe, [32, 32])
    engine.train_step([batch], target_tokens=64, learning_rate=0.0)
    loads = engine.routing.totals[2:].view(-1, engine.routing.count).sum(dim=1)
    assert set(loads.tolist()) == {0.0, 64.0 * config.moe_topk}


def test_loads_count_tokens_that_skip_the_experts(moe_recipe: Make) -> None:
    """ZAYA's routers have one logit more than experts, and hand tokens that skip them to the first with weight 0."""
    balance = {"model__router_aux_loss": {"coefficient": 0.5}, "model__router_z_loss": 0.1}
    recipe = moe_recipe("zaya", batch__micro_batch_size=2, **balance)
    engine = engine_of(recipe)
    assert engine.routing is not None
    with torch.no_grad():
        for name, bias in engine.model.named_buffers():
            if name.endswith("balancing_biases"):
                bias[-1] = 1.0  # all tokens skip
    engine.train_step([a_batch(recipe, [32, 32])], target_tokens=64, learning_rate=0.0)
    experts = load_config(recipe.model).num_experts
    loads = engine.routing.totals[2:].view(2, experts + 1)
    assert loads.tolist() == [[0.0] * experts + [64.0]] * 2


def drop_on_the_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Routing.finish

    def forgetful(routing: Routing, received: torch.Tensor | None = None) -> Any:
        sums = finish(routing, received)
        return sums if sums is None or received is not None else torch.zeros_like(sums)

    monkeypatch.setattr(Routing, "finish", forgetful)


def scale_by_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Routing.loss
    monkeypatch.setattr(Routing, "loss", lambda routing: 2 * loss(routing))


@pytest.mark.whole
@pytest.mark.parametrize(("plant", "layout"), [(drop_on_the_first_stage, "pp2-z0-recompute"), (scale_by_dp, "dp2-z1")])
def test_a_lost_or_scaled_loss_shows(
    moe_recipe: Make,
    ranks: Ranks,
    reference_of: Callable[[str], ParityRun],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    layout: str,
) -> None:
    reference = reference_of("micro_batch")
    plant(monkeypatch)
    world_size, parallel = LAYOUTS[layout]
    run = ranks(train_in_memory, world_size, balanced(moe_recipe, "micro_batch", parallel=parallel))[0]
    assert run.curve.grad_norms[0] != pytest.approx(reference.curve.grad_norms[0], rel=1e-3)
    assert run.curve.losses[0] == pytest.approx(reference.curve.losses[0], rel=1e-6)  # the token loss cannot tell


@pytest.mark.whole
def test_a_resumed_run_has_the_biases_of_one_that_was_not_interrupted(
    moe_recipe: Make, train: Callable[..., str], tmp_path: Path
) -> None:
    settings = {"model": balanced(moe_recipe, "deepseek").model.model_dump(mode="json"), "data__packing": "padded"}
    train("run_dir=all", "parallel.zero_stage=3", world_size=2, **settings)
    changes = {"checkpoint": {"every": 2}}
    train("run_dir=half", "checkpoint.keep=9", "parallel.zero_stage=3", world_size=2, **settings, **changes)
    train("run_dir=on", "--resume", "half/step-00000002", "parallel.pp=2", world_size=2, **settings)

    def biases(run: str) -> dict[str, list[float]]:
        tensors = load_file(tmp_path / run / "model" / "model.safetensors")
        return {name: value.tolist() for name, value in tensors.items() if "correction_bias" in name}

    assert biases("on") == biases("all")
    assert any(any(bias) for bias in biases("all").values())
    lines = [json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["layer_expert_load"][0] is None and line["router_aux_loss"] > 0 for line in lines)
