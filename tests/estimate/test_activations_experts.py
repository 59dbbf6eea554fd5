"""The estimate of activations of ranks that share out experts, against what such ranks keep with known routing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from measured_activations import Case, kept_bytes
from training_setups import changed, memory_request
from transformers import AutoModelForCausalLM

from toolkit.config.layout import Layout
from toolkit.errors import LayoutError
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.parameters import Parameter
from toolkit.models.shape import find_config
from toolkit.parallel.experts.sharding import experts_in
from toolkit.parallel.tiny_model import tiny_config


@dataclass(frozen=True, kw_only=True)
class Shared(Case):
    """A case on ranks of which each has a part of the experts."""

    tp: int = 1
    ep: int = 1
    inner: bool = False
    imbalance: float = 1.0

    def rank_pass(self, *, tp: int = 1) -> Any:
        experts = "inner" if self.inner else "whole"
        alone = super().rank_pass(tp=self.tp)
        return changed(alone, dp=self.ep, ep=self.ep, experts=experts, imbalance=self.imbalance)


def _measure(cases: list[Shared]) -> list[int]:
    """On a rank: what its part of each model keeps. The first rank gets more rows where the load is uneven."""
    import copy

    from torch import distributed as dist

    from toolkit.parallel.experts.sharding import ExpertSharder, experts_in
    from toolkit.parallel.loss import token_loss_sum
    from toolkit.parallel.model_structure import analyze_model
    from toolkit.parallel.tensor.parallelize import TensorParallelizer
    from toolkit.parallel.tensor.vocabulary import VocabularyShard, vocab_parallel_token_loss_sum

    found = []
    for case in cases:
        size, rank = dist.get_world_size(), dist.get_rank()
        alone = [dist.new_group([one]) for one in range(size)][rank]
        every = dist.group.WORLD
        assert every is not None
        tensor, expert = (every, alone) if case.tp > 1 else (alone, every)
        model = case.model()
        with torch.device("meta"):
            twin = type(model)(copy.deepcopy(model.config))
        structure = analyze_model(twin)
        sharder = ExpertSharder(model, tensor, expert, inner=case.inner, sequence_parallel=case.sequence_parallel)
        loss_sum: Callable[..., torch.Tensor] = token_loss_sum
        if case.tp > 1:
            split = TensorParallelizer(
                model, structure, tensor, sequence_parallel=case.sequence_parallel, experts=sharder
            )
            for index in range(structure.count):
                split.parallelize_layer(index)
            split.parallelize_vocabulary()
            shard = VocabularyShard.of(model.config.get_text_config().vocab_size, tensor)

            loss_sum = partial(vocab_parallel_token_loss_sum, shard=shard, group=tensor)
        else:
            for layer in structure.layer_list(model):
                sharder.shard_layer(layer, "")
        for _, experts in experts_in(model):
            _route(experts, count=experts.num_experts * (1 if case.inner else size), imbalance=case.imbalance)
        torch.manual_seed(0)
        found.append(kept_bytes(case, case.prepared(model), loss_sum))
    return found


def _route(experts: Any, *, count: int, imbalance: float) -> None:
    """Hand rows out in turn: to all `count` experts, or so many more to the first half of them."""

    def hook(module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, index, weights = arguments
        places = torch.arange(index.numel())
        first = int(index.numel() * imbalance / 2)
        half = torch.where(places < first, places % (count // 2), count // 2 + places % (count // 2))
        chosen = half if imbalance != 1 else places % count
        return hidden, chosen.view_as(index), weights

    experts.register_forward_pre_hook(hook)


DAILY = [
    Shared(family="mixtral", ep=2, imbalance=1.5),
    Shared(family="mixtral", tp=2, sequence_parallel=True),
]
WHOLE = [
    *(Shared(family=family, ep=2, recompute=again) for family in ("qwen2_moe", "olmoe") for again in ("none", "full")),
    *(Shared(family="qwen3_moe", tp=2, inner=inner, sequence_parallel=sp) for inner in (0, 1) for sp in (0, 1)),
    Shared(family="gpt_oss", attention="eager", ep=2),
    Shared(family="gpt_oss", attention="eager", tp=2, inner=True),
    Shared(family="mixtral", tp=2, imbalance=1.5),
    Shared(family="mixtral", ep=2),
]


@pytest.mark.parametrize("cases", [DAILY, pytest.param(WHOLE, marks=pytest.mark.whole)], ids=["daily", "whole"])
def test_the_first_rank_keeps_what_is_estimated_within_a_percent(
    ranks: Callable[..., list[Any]], cases: list[Shared]
) -> None:
    measured = ranks(_measure, 2, cases)[0]
    errors = {str(case): case.predicted_kept() / own - 1 for case, own in zip(cases, measured, strict=True)}
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=0.01)


FAMILIES = ("mixtral", "gpt_oss", "deepseek_v3", "granitemoe")
MIXTURES = ("qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v2", "glm4_moe", "dots1", "ernie4_5_moe",
            "minimax_m2", "afmoe", "hunyuan_v1_moe", "flex_olmo", "exaone_moe", "solar_open", "aria_text")  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.whole) for one in MIXTURES)])
def test_the_parameters_of_experts_are_told_by_their_names(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    told = {name for name, p in model.named_parameters() if Parameter(name=name, shape=tuple(p.shape)).is_experts}
    assert told == {f"{path}.{name}" for path, inside in experts_in(model) for name, _ in inside.named_parameters()}
    assert told


def test_more_imbalance_than_ranks_is_refused() -> None:
    model = ModelFacts.from_config(find_config("mixtral-8x7b") or {})
    work = {"micro_batch_size": 1, "seq_len": 4096, "imbalance": 9.0}
    settings = DeepSpeedSettings(zero_stage=1, precision="bf16")
    with pytest.raises(LayoutError, match="8 or less"):
        memory_request(model, Layout.parse("dp8-ep8-z1"), work, settings).peak()
