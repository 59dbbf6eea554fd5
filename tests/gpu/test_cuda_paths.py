"""Code that only a GPU runs, on fake tensors of a stub GPU: devices, dtypes, shapes and arguments, without a value.

tests/support/stub_cuda.py has the stub; docs/cuda-paths.md lists what is reached and what cannot be.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from cuda_facts import Facts
from rehearsed_models import EXPERTS, LLAMA
from stub_cuda import StubProcess, why_not
from stub_facts import MEMORY_BYTES, NAME, PEAK_BYTES

from toolkit.config.recipe import Recipe

pytestmark = pytest.mark.daily
GPU = "cuda:0"
DROPOUT: dict[str, Any] = {
    "name_or_path": "gpt2-tiny",
    "overrides": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 322, "resid_pdrop": 0.1},
}
MakeRecipe = Callable[..., Recipe]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A rank of a layout with a recipe."""

    name: str
    layout: str
    rank: int = 0
    behind: str = ""
    """The case of the pipeline stage before this one, whose headers it receives."""
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    precision: str = "bf16"
    weights: str = "bfloat16"
    """The dtype of the parameters."""
    reads: tuple[str, ...] = ()
    """Where the host reads the GPU beside the one read of a step."""

    def recipe(self, make_recipe: MakeRecipe) -> Recipe:
        batch = {"global_batch_size": 8, "micro_batch_size": 2}
        return make_recipe(model=self.model, batch=batch, precision=self.precision)


def case(layout: str, name: str = "", **changes: Any) -> Case:
    """The case of a layout, which is its name unless one is given."""
    return Case(name=name or layout, layout=layout, **changes)


DEEP = LLAMA | {"overrides": LLAMA["overrides"] | {"num_hidden_layers": 4}}
"""A model with layers for two chunks on each of two stages."""
ADAPTERS = LLAMA | {"lora": {"r": 4, "dropout": 0.1}}
OFFLOADED = case("dp2-z2-offload")
CASES = [
    case("reference", precision="fp32", weights="float32"),
    case("dp2-ddp", weights="float32"),
    case("dp2-z0", weights="float32"),
    case("dp2-z1"),
    case("dp2-z2", model=LLAMA | {"attn_implementation": "flash_attention_2"}),
    case("dp2-z3"),
    case("tp2-z1", rank=1, model=DROPOUT),
    case("tp2-z1-sp", model=DROPOUT),
    case("pp2-z1", "first stage"),
    case("pp2-z1", "last stage", rank=1, behind="first stage"),
    case("tp2-pp2-dp2-z1"),
    case("dp2-ep2-z2", model=EXPERTS),
    case("u2-z3"),
    case("cp2-z1"),
    case("dp2-cp2-tp2-z2", rank=2),
    case("u2-cp2-z3", rank=3),
    case("pp2-zbh1-z1", "first stage of ZB-H1", model=DEEP),
    case("pp2-zbh1-z1", "last stage of ZB-H1", rank=1, behind="first stage of ZB-H1", model=DEEP),
    case("pp2-zbv-z1", "first stage of ZB-V", model=DEEP),
    case("pp2x2-z1", "first stage, interleaved", model=DEEP),
    case("dp2-z1", "LoRA", model=ADAPTERS),
    case("dp2-z0", "fp16", precision="fp16", weights="float32", reads=("deepspeed_engine.py _plain_update",)),
]
Steps = Callable[[Case], Facts]


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    if reason := why_not():
        pytest.skip(reason)
    process = StubProcess("cuda_steps", "cuda_calls")
    yield process
    process.close()


@pytest.fixture(scope="module")
def steps(stub: StubProcess, make_recipe: MakeRecipe) -> Steps:
    """The facts of a case: it is trained when the first test asks for them."""
    found: dict[str, Facts] = {}

    def of(asked: Case) -> Facts:
        if asked.name not in found:
            before = [of(other).sent for other in CASES if other.name == asked.behind]
            received = before[0] if before else ()
            recipe = asked.recipe(make_recipe)
            found[asked.name] = stub.call("cuda_steps", "take_steps", recipe, asked.layout, asked.rank, received)
        return found[asked.name]

    return of


DAILY = ("dp2-z3", "dp2-ep2-z2", "dp2-cp2-tp2-z2", "first stage of ZB-V")
"""Cases of `make test`, one for each kind of parallelism: a case takes seconds to train."""
PARAMETERS = [pytest.param(one, id=one.name, marks=() if one.name in DAILY else pytest.mark.whole) for one in CASES]
every_case = pytest.mark.parametrize("one", PARAMETERS)


@every_case
def test_weights_buffers_and_optimizer_states_are_on_the_gpu(one: Case, steps: Steps) -> None:
    held = steps(one).held
    assert held["parameters"] - {f"{GPU} float32"} == {f"{GPU} {one.weights}"} - {f"{GPU} float32"}
    assert held["buffers"] <= {GPU}
    assert held["master"] == held["exp_avg"] == held["exp_avg_sq"] == {f"{GPU} float32"}


@every_case
def test_the_update_is_one_fused_kernel_for_each_group(one: Case, steps: Steps) -> None:
    calls = steps(one).fused
    assert calls
    assert all(call == ({GPU}, {"torch.float32"}) for call in calls)


@every_case
def test_the_host_reads_the_gpu_once_in_a_step(one: Case, steps: Steps) -> None:
    reads = steps(one).reads
    assert reads["host_read.py read"] == 1
    assert set(reads) == {"host_read.py read", *one.reads}


@every_case
def test_the_update_is_launched_before_the_host_waits(one: Case, steps: Steps) -> None:
    """Except where the host changes the loss scale, and in the plain loop, which others are compared with."""
    order = steps(one).order
    reads_first = one.precision == "fp16" or one.layout == "reference"
    assert order.index("read") < order.index("update") if reads_first else order[-1] == "read"
    assert "update" in order


@every_case
def test_no_copy_waits_for_the_gpu(one: Case, steps: Steps) -> None:
    assert not steps(one).blocking_copies


@every_case
def test_gradients_are_summed_in_fp32_over_replicas(one: Case, steps: Steps) -> None:
    summed = {
        (group, dtype) for kind, group, dtype in steps(one).collectives if kind in ("all_reduce", "reduce_scatter")
    }
    is_all = one.layout.startswith("dp2-") and "ep" not in one.layout and "tp" not in one.layout
    of_replicas = "world" if is_all else "data"
    assert not {(of_replicas, "bfloat16"), (of_replicas, "float16")} & summed


@every_case
def test_a_snapshot_copies_all_to_the_host(one: Case, steps: Steps) -> None:
    assert steps(one).saved == {"cpu"}


def test_an_offloaded_optimizer_keeps_masters_and_moments_on_the_host(steps: Steps) -> None:
    held = steps(OFFLOADED).held
    assert held["parameters"] == {f"{GPU} bfloat16"}
    assert held["master"] == held["exp_avg"] == held["exp_avg_sq"] == {"cpu float32"}


def test_flash_attention_gets_causal_half_precision_tensors_of_the_gpu(steps: Steps) -> None:
    (zero2,) = (one for one in CASES if one.name == "dp2-z2")
    assert steps(zero2).flash == {("dense", *[f"{GPU} bfloat16"] * 3, "True")}


def test_flash_attention_takes_documents_by_bounds_in_int32_on_the_gpu(stub: StubProcess) -> None:
    assert stub.call("cuda_calls", "documents_in_flash_attention") == {
        "given": {("varlen", *[f"{GPU} bfloat16"] * 3, "True")},
        "shape": (1, 12, 2, 8),
        "gradient": f"{GPU} bfloat16",
    }


def test_attention_in_blocks_gives_its_kernel_dense_tensors(stub: StubProcess) -> None:
    """Without bounds of sequences, which would choose the kernel for varlen inputs; log-sum-exps without strides."""
    facts = stub.call("cuda_calls", "documents_in_blocks", 16)
    assert len(facts["forward"]) == len(facts["backward"]) == 5  # documents
    assert set(facts["forward"]) == {(f"{GPU} bfloat16",) * 3}
    assert set(facts["backward"]) == {(True, "torch.float32", None, None)}
    assert facts["gradient"] == f"{GPU} bfloat16"


def test_heads_that_flash_attention_does_not_take_are_attended_without_it(stub: StubProcess) -> None:
    facts = stub.call("cuda_calls", "documents_in_blocks", 20)
    assert facts == {"forward": [], "backward": [], "gradient": f"{GPU} bfloat16"}


def test_zero_reduces_on_a_stream_that_waits_for_the_backward_pass(steps: Steps) -> None:
    (zero2,) = (one for one in CASES if one.name == "dp2-z2")
    waits = [call[1:] for call in steps(zero2).log if call[0] == "wait_stream"]
    assert waits
    assert all(waiting != awaited for waiting, awaited in waits)


@pytest.mark.parametrize(
    ("fault", "words", "place"),
    [
        ("tokens on the host", "forward: FakeTensorDeviceMismatchError: ", "chunked_loss.py caught"),
        ("a part of the norm on the host", "update: FakeTensorDeviceMismatchError: ", "gradient_norm.py total_norm"),
        ("losses summed on the host", "update: RuntimeError: all_reduce [1] float64 ", "full_forward.py train_step"),
    ],
)
def test_a_tensor_that_is_left_on_the_host_is_found(
    stub: StubProcess, make_recipe: MakeRecipe, fault: str, words: str, place: str
) -> None:
    with pytest.raises(AssertionError) as raised:
        stub.call("cuda_steps", "take_steps", case("dp2-z0").recipe(make_recipe), "dp2-z0", 0, (), fault)
    last = str(raised.value).splitlines()[-1]
    assert f"RehearsalFailure: {words}" in last
    assert last.endswith(f"(in {place})")


def test_kernels_that_are_chosen_before_the_model_is_moved_are_found(
    stub: StubProcess, make_recipe: MakeRecipe
) -> None:
    recipe = case("dp2-ddp").recipe(make_recipe)
    facts = stub.call("cuda_steps", "take_steps", recipe, "dp2-ddp", 0, (), "an optimizer chosen too early")
    assert not facts.fused


def test_a_copy_that_waits_for_the_gpu_is_found(stub: StubProcess, make_recipe: MakeRecipe) -> None:
    recipe = case("dp2-z0").recipe(make_recipe)
    facts = stub.call("cuda_steps", "take_steps", recipe, "dp2-z0", 0, (), "tokens copied with a wait")
    assert facts.blocking_copies


def test_what_runs_around_training_asks_the_gpu(stub: StubProcess, make_recipe: MakeRecipe) -> None:
    asked = stub.call("cuda_calls", "devices", make_recipe(precision="bf16"))
    assert asked == {
        "picked": GPU,
        "set": [("set_device", "0")],
        "local": "cuda",
        "described": f"{NAME} x 1",
        "peak bytes": PEAK_BYTES,
        "peak FLOP/s": pytest.approx(989.4e12),
        "planned": (NAME, MEMORY_BYTES),
        "doctor": ([{"name": NAME, "capability": "9.0", "memory_bytes": MEMORY_BYTES}], True, "2.27.5"),
    }


def test_a_gpu_without_bf16_refuses_it(stub: StubProcess, make_recipe: MakeRecipe) -> None:
    refusal = stub.call("cuda_calls", "without_bf16", make_recipe(precision="bf16"))
    assert refusal == f"precision=bf16: a {NAME} has no bf16. Set precision to fp16 or fp32."


def test_ranks_join_over_nccl_on_their_own_gpu(stub: StubProcess) -> None:
    assert stub.call("cuda_calls", "joined") == {"backend": "nccl", "device": GPU}


def test_micro_batches_are_pinned_ahead_and_copied_to_the_gpu(stub: StubProcess) -> None:
    assert stub.call("cuda_calls", "pinned_micro_batches") == [(True, True, GPU)] * 3


def test_a_snapshot_is_pinned_and_aligned_unless_no_memory_can_be_pinned(stub: StubProcess) -> None:
    memory = stub.call("cuda_calls", "snapshot_memory")
    assert memory == {"pinned": True, "bytes": 10_000, "offset": 0, "without": (False, 10_000)}


def test_dropout_is_seeded_on_the_gpu(stub: StubProcess) -> None:
    assert stub.call("cuda_calls", "generators") == {
        "seeded": 1234,
        "host": 99,
        "restored": 1234,
        "of a region": GPU,
        "of a region without an index": GPU,
    }


def test_activations_are_offloaded_on_streams_that_wait_for_each_other(stub: StubProcess) -> None:
    """Of three layers the last one's stay. A layer comes back on another stream than it left on, one ahead."""
    log = stub.call("cuda_calls", "offloaded_activations")
    compute = log[1][2]
    leaves = [
        ("wait_stream", "out", "compute"),
        ("copy", "out", "cuda to cpu"),
        ("record", "out", "event"),
        ("wait_event", "compute", "event"),
    ]
    returns = [
        ("wait_stream", "in", "compute"),
        ("copy", "in", "cpu to cuda"),
        ("record", "in", "event"),
        ("wait_event", "compute", "event"),
    ]
    streams = [call[1] for call in log if call[0] == "stream"]
    names = {compute: "compute", streams[0]: "out", streams[1]: "in"}
    assert len(names) == 3
    calls = [call for call in log if call[0] != "stream"]
    assert [tuple(names.get(word, word.partition(" ")[0] if word.startswith("event") else word) for word in call)
            for call in calls] == [*leaves, *leaves, *returns, *returns]  # fmt: skip
    events = [call[2] for call in calls if call[0] in ("record", "wait_event")]
    assert events[::2] == events[1::2]


def test_a_checkpoint_is_sent_and_assembled_on_the_gpu(stub: StubProcess) -> None:
    """Rank 0 of two sends the bias, and writes the weight, of which it receives the other half."""
    sent = stub.call("cuda_calls", "sent_checkpoint")
    assert sent == {
        "transferred": [("isend", GPU), ("irecv", GPU)],
        "written": {"weight": (GPU, (8, 6))},
    }


def test_rates_are_measured_behind_all_that_the_gpu_was_given(stub: StubProcess) -> None:
    assert all(rate > 0 for rate in stub.call("cuda_calls", "calibrated"))
