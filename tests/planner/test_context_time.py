"""The time of context parallelism against closed forms: bytes over the link, sends behind attention, equal work."""

from dataclasses import replace

import pytest
from training_setups import changed, step_request

from toolkit.config.context_exchange import gathered_bytes
from toolkit.config.layout import Layout
from toolkit.estimate.model_facts import ModelFacts
from toolkit.hardware import gpu
from toolkit.models.shape import find_config, local_config
from toolkit.parallel.context.sequence import TILE as TILE_OF_ATTENTION
from toolkit.parallel.context.sequence import SequenceSlice
from toolkit.planner.cluster import Cluster
from toolkit.planner.collectives import LINK_SHARE
from toolkit.planner.context_time import DOCUMENT_IMBALANCE
from toolkit.planner.layer_time import TILE, attention_seconds
from toolkit.planner.layout_candidates import layouts
from toolkit.planner.request import PlanRequest
from toolkit.planner.step_request import StepRequest
from toolkit.planner.step_time import predict_step

H100 = gpu("H100-80")
CLUSTER = Cluster.of(H100)


def setup(layout: str, seq_len: int, model: str = "llama-3.1-8b", link: float = 1.0, **changes: object) -> StepRequest:
    """One micro-batch of one sequence; `link`: the factor of the link's bandwidth."""
    config = find_config(model)
    assert config is not None
    cluster = replace(CLUSTER, link_bytes_per_second=link * CLUSTER.link_bytes_per_second)
    fields = {"micro_batch_size": 1, "accumulation": 1, "seq_len": seq_len, "cluster": cluster} | changes
    return step_request(ModelFacts.from_config(config).shape, Layout.parse(layout), **fields)  # type: ignore[arg-type]


def on_the_link(asked: StepRequest, shares: float) -> float:
    """Seconds in which so many times a layer's keys and values cross a link, in all layers."""
    size = gathered_bytes(asked.shape, tp=asked.layout.tp, tokens=asked.setup.seq_len, itemsize=2)
    return asked.shape.layers * shares * size / (LINK_SHARE * asked.cluster.link_bytes_per_second)


@pytest.mark.parametrize("layout", ["dp1-cp4-z3", "dp1-cp4-tp2-z3", "dp1-cp8-z3"])
def test_gathering_sends_keys_and_values_three_times(layout: str) -> None:
    fast, slow = (setup(layout, 65536, link=link) for link in (1.0, 0.01))
    cp = fast.layout.cp
    added = predict_step(slow).context - predict_step(fast).context
    assert added == pytest.approx(on_the_link(slow, 3 * (cp - 1) / cp) - on_the_link(fast, 3 * (cp - 1) / cp))


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_ring_hides_what_takes_no_longer_than_a_block(cp: int) -> None:
    """All but the gradients of the last block, if the link is fast; what is left of three rounds, if it is slow."""
    fast, faster, slow, slower = (setup(f"dp1-cp{cp}-z3", 1 << 20, link=link) for link in (1.0, 2.0, 1e-5, 5e-6))
    seconds = [predict_step(each).context for each in (fast, faster, slow, slower)]
    alone = (on_the_link(each, 1 / cp) for each in (fast, faster))
    assert seconds[0] - seconds[1] == pytest.approx(next(alone) - next(alone), rel=1e-6)
    every = (on_the_link(each, 3 * (cp - 1) / cp) for each in (slower, slow))
    assert seconds[3] - seconds[2] == pytest.approx(next(every) - next(every), rel=1e-6)


def test_recomputation_exchanges_keys_and_values_of_the_forward_pass_again() -> None:
    asked = setup("dp1-cp4-z3", 65536, link=0.001)
    again = changed(asked, layout=replace(asked.layout, recompute="full"))
    assert predict_step(again).context == pytest.approx(4 / 3 * predict_step(asked).context, rel=0.02)


@pytest.mark.parametrize("cp", [2, 8])
def test_ranks_share_attention_equally(cp: int) -> None:
    alone, shared = (setup(layout, 131072) for layout in ("dp1-z3", f"dp1-cp{cp}-z3"))
    whole, part = (attention_seconds(H100, each.shape, each.work, each.execution) for each in (alone, shared))
    assert cp * part.forward == pytest.approx(whole.forward, rel=1e-3)
    assert cp * part.backward == pytest.approx(whole.backward, rel=1e-3)
    pairs = []
    for rank in range(cp):
        slice_of_rank = SequenceSlice(rank=rank, ranks=cp, length=4096, starts=((0,),))
        pairs.append(sum(tile.pairs for tile in slice_of_rank.tiles(range(4096))))
    assert len(set(pairs)) == 1


def test_documents_take_the_longer_the_less_equal_they_can_be_shared_out() -> None:
    packed, apart = (setup("dp1-cp4-z3", 65536, documents=documents) for documents in (False, True))
    seconds = attention_seconds(H100, apart.shape, apart.work, apart.execution)
    more = apart.shape.layers * (DOCUMENT_IMBALANCE - 1) * (seconds.forward + seconds.backward)
    assert predict_step(apart).context - predict_step(packed).context == pytest.approx(more)


def test_windows_are_computed_in_the_tiles_that_the_attention_has() -> None:
    assert TILE == TILE_OF_ATTENTION
    shape = replace(setup("dp1-cp4-z3", 65536).shape, windowed=1.0, window=1024)
    asked = setup("dp1-cp4-z3", 65536)
    seconds = []
    for length in (65536, 131072):
        work = replace(asked.work, tokens=length // 4, seq_len=length)
        seconds.append(attention_seconds(H100, shape, work, asked.execution).forward)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.01)


def request(seq_len: int, gpus: int = 16, batch: int = 8, model: str = "llama-3.1-8b") -> PlanRequest:
    fields = {"cluster": CLUSTER, "seq_len": seq_len}
    return PlanRequest.of(model, local_config(model), gpus=gpus, global_batch_size=batch, **fields)


def test_long_sequences_are_split_and_short_ones_are_not() -> None:
    long, short = ({layout.cp for layout in layouts(request(length))} for length in (32768, 4096))
    assert long == {1, 2, 4, 8}
    assert short == {1}


def test_a_plan_tries_no_context_parallelism_where_training_refuses_it() -> None:
    config = local_config("gpt2") | {"n_positions": 16384, "attn_pdrop": 0.1}
    asked = PlanRequest.of("gpt2", config, gpus=4, global_batch_size=4, cluster=CLUSTER, seq_len=16384)
    assert {layout.cp for layout in layouts(asked)} == {1}


def test_training_accepts_every_layout_with_context_parallelism() -> None:
    asked = request(32768, model="qwen3-30b-a3b")
    split = [layout for layout in layouts(asked) if layout.cp > 1]
    assert {(layout.tp, layout.pp, layout.ep) for layout in split} >= {(1, 1, 1), (2, 1, 4), (2, 2, 2), (1, 1, 8)}
    assert all(asked.refusal(layout) is None for layout in split)


def test_a_batch_of_one_long_sequence_needs_context_parallelism_or_model_parallel_ranks() -> None:
    tried = list(layouts(replace(request(131072, batch=1), fixed={"tp": 1, "pp": 1, "ulysses": 1})))
    assert {layout.cp for layout in tried} == {16}
