"""Ranks that share sequences (context parallelism) train what one plain PyTorch process trains."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import daily
from interrupted_runs import timeless
from small_chats import write_chats, write_tokenizer

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.context_slices import ContextSlices
from toolkit.errors import ModelError
from toolkit.model_init.document_masking import check_document_masking
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity import ParityRun, Tolerance, compare_curves
from toolkit.parity.parity_run import tensor_differences, tensor_table, whole_difference
from toolkit.parity.run.train_in_memory import train_in_memory

MakeRecipe = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
Caught = Callable[[], bool]

BOUND = 1e-6
ACTIVE_CLIP = 0.02
"""Below every gradient norm of these runs, so that each step is clipped; this is checked."""
SEQ_LEN = 32
STEPS, LONG_STEPS = 4, 30
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "mistral": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 6},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {},
}
"""Windows are shorter than a chunk. Gemma 2 bounds its scores, GPT-OSS has sinks and experts."""
STRATEGIES = (
    *("cp2-z0", "cp2-z1", "cp2-z2", "cp2-z3", "cp4-z1", "dp2-cp2-z3-recompute", "cp2-tp2-z1", "cp2-tp2-z3-sp"),
    *("cp2-pp2-z1", "cp2-pp2-z0-recompute", "cp2-z2-offload"),
    "cp2-ep2-z1",
)
DATA = ("packed", "documents", "padded chats")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train the same steps."""

    strategy: str
    family: str = "llama"
    data: str = "packed"
    exchange: str = "gather"
    steps: int = STEPS
    optimizer: str = "sgd"
    option: str = ""
    """`tiled`: MLPs in tiles, and activations on the host."""

    def __str__(self) -> str:
        name = f"{self.strategy}-{self.exchange}:{self.family}-{self.data}-{self.optimizer}-{self.steps}"
        return f"{name}-{self.option}" if self.option else name


DAILY = [
    Cell(strategy="cp4-z2", family="mistral", data="documents", exchange="ring"),
    Cell(strategy="cp2-tp2-z1", family="gpt_oss", exchange="ring", optimizer="adamw"),
    Cell(strategy="cp2-tp2-z3-sp", family="gemma3_text", data="documents"),
    Cell(strategy="cp2-pp2-z1", family="qwen3", data="documents", exchange="ring"),
    Cell(strategy="cp2-ep2-z1", family="qwen3_moe", data="documents"),
    Cell(strategy="cp2-z3-offload-recompute", data="documents", option="tiled"),
    Cell(strategy="u2-cp2-z1", family="gpt_oss", exchange="ring"),
    Cell(strategy="u2-cp1-pp2-z1", family="llama", data="documents"),
    Cell(strategy="dp2-tp2-z2", family="gemma3_text", data="documents"),
    Cell(strategy="pp2-z1", family="qwen3_moe", data="padded chats"),
]
"""Those without cp have the toolkit's attention all the same, in whole sequences."""
WHOLE = [
    Cell(strategy=strategy, family=family, data=data, steps=LONG_STEPS, exchange=("gather", "ring")[number % 2])
    for number, (strategy, family, data) in enumerate(product(STRATEGIES, FAMILIES, DATA))
    if not (strategy == "cp2-ep2-z1" and "moe" not in family)
]
WHOLE += [
    Cell(strategy="cp2-z0"),
    Cell(strategy="cp2-z1", family="gpt2", data="padded chats", optimizer="adamw"),
    Cell(strategy="dp2-cp2-z3-recompute", family="gemma2", data="documents"),
    Cell(strategy="cp2-pp2-z0-recompute", family="olmo2", data="padded chats"),
]
WHOLE += [
    Cell(strategy=strategy, family=family, data=data, steps=LONG_STEPS)
    for strategy, family, data in product(("z1", "tp2-z3-sp", "pp2-z1-recompute"), FAMILIES, DATA)
]
WHOLE += [
    Cell(strategy=strategy, family=family, data=data, steps=LONG_STEPS, exchange=exchange)
    for (strategy, exchange), family, data in product(
        (("u2-cp2-z1", "ring"), ("u2-cp2-z3", "gather"), ("u2-cp1-tp2-z3-sp", "gather")), FAMILIES, DATA
    )
]
WHOLE += [
    Cell(strategy=strategy, data=data, steps=LONG_STEPS, option="tiled")
    for strategy, data in product(("cp2-z1", "cp2-tp2-z3-sp-recompute", "cp2-z3-offload"), DATA)
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("chats")
    return {
        "source": str(write_chats(folder / "chats.jsonl")),
        "tokenizer": str(write_tokenizer(folder / "tokenizer")),
        "format": "chat",
        "packing": "padded",
        "seq_len": SEQ_LEN,
        "workers": 1,
        "cache_dir": str(folder / "cache"),
        "eval_fraction": 0.1,
    }


@pytest.fixture(scope="module")
def recipe_of(
    make_recipe: MakeRecipe, chats: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Recipe]:
    """The recipe of what a cell trains, in one process."""
    folders: dict[str, str] = {}

    def make(cell: Cell, **changes: Any) -> Recipe:
        if cell.family not in folders:
            config = tiny_config(cell.family, vocab_size=321, **FAMILIES[cell.family])
            folders[cell.family] = str(tmp_path_factory.mktemp(cell.family))
            config.save_pretrained(folders[cell.family])
        drop = {
            name: 0.0
            for name, value in tiny_config(cell.family).to_dict().items()
            if "drop" in name and isinstance(value, float)
        }
        data = {"data": chats} if cell.data == "padded chats" else {"data__document_masking": cell.data == "documents"}
        fields: dict[str, Any] = {
            "model": {"name_or_path": folders[cell.family], "overrides": drop},
            "optimizer": {
                "name": cell.optimizer,
                "lr": 3e-4 if cell.optimizer == "adamw" else 0.1,
                "weight_decay": 0.1,
            },
            "train": {"steps": cell.steps, "seed": 1, "grad_clip": ACTIVE_CLIP, "eval_every": cell.steps},
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        }
        return make_recipe(**{**fields, **data, **changes})

    return make


@pytest.fixture(scope="module")
def reference(recipe_of: Callable[..., Recipe], ranks: Ranks) -> Callable[[Cell], ParityRun]:
    """The oracle of a cell; each runs once. Skips what no model in one process can train."""
    known: dict[tuple[str, ...], ParityRun] = {}

    def of(cell: Cell) -> ParityRun:
        key = (cell.family, cell.data, cell.optimizer, str(cell.steps))
        if key not in known:
            recipe = recipe_of(cell, train__engine="reference")
            if cell.data == "documents":
                try:
                    check_document_masking(recipe.model, tiny_config(cell.family))
                except ModelError:
                    pytest.skip("no process keeps its documents apart")
            known[key] = ranks(train_in_memory, 1, recipe)[0]
        return known[key]

    return of


def shared(cell: Cell, recipe: Recipe) -> tuple[Recipe, int]:
    """The recipe under the cell's strategy, and its number of ranks."""
    strategy = Strategy.parse(cell.strategy)
    count = strategy.world_size(1)
    changes: dict[str, dict[str, Any]] = {"parallel": {"cp_exchange": cell.exchange if strategy.cp > 1 else "auto"}}
    if cell.option == "tiled":
        changes["parallel"] |= {"tiled_mlp": True, "offload_activations": True}
    if strategy.cp == 1:
        changes["model"] = {"attn_implementation": "blocks"}
    return strategy.apply(recipe, count).changed(changes), count


def check_equal(run: ParityRun, baseline: ParityRun) -> None:
    rows = tensor_differences(run.first_gradients, baseline.first_gradients)
    report = compare_curves(run.curve, baseline.curve, Tolerance.fp32())
    assert rows[0].difference <= BOUND, "\n" + tensor_table(rows)
    assert report.passed, str(report)
    assert report.max_loss_difference <= BOUND
    assert whole_difference(run.parameters, baseline.parameters) <= BOUND
    assert run.eval_loss == (baseline.eval_loss and pytest.approx(baseline.eval_loss, rel=BOUND))
    assert run.batches == baseline.batches
    assert min(baseline.curve.grad_norms) > ACTIVE_CLIP


@pytest.mark.parametrize("cell", daily([*DAILY, *WHOLE], lambda number, _: number < len(DAILY)), ids=str)
def test_shared_sequences_train_what_one_process_trains(
    cell: Cell, reference: Callable[[Cell], ParityRun], recipe_of: Callable[..., Recipe], ranks: Ranks
) -> None:
    baseline = reference(cell)
    recipe, count = shared(cell, recipe_of(cell))
    runs = ranks(train_in_memory, count, recipe)
    check_equal(runs[0], baseline)


COMPILED = [
    Cell(strategy="cp2-z1", family="gemma3_text", data="documents", exchange="ring"),
    Cell(strategy="cp2-z3-recompute", data="documents"),
    Cell(strategy="cp2-tp2-z1-sp", family="gemma3_text"),
    Cell(strategy="cp2-tp2-z3-sp-recompute", data="documents", exchange="ring"),
    Cell(strategy="cp2-pp2-z1", family="gemma3_text", data="documents", exchange="ring"),
    Cell(strategy="cp2-pp2-z0-recompute", data="packed"),
    Cell(strategy="cp2-z2", family="gpt_oss"),
    Cell(strategy="cp2-ep2-z1", family="qwen3_moe", data="documents"),
    Cell(strategy="u2-cp2-z1", data="documents", exchange="ring"),
    Cell(strategy="u2-cp1-z1", family="gpt_oss"),
    Cell(strategy="z1", family="gemma2", data="documents"),
    Cell(strategy="tp2-z1", data="padded chats"),
]
WATCHED = ("gpt_oss", "qwen3_moe")
"""Mixtures, whose routers are watched here, which breaks graphs; not so in tests/engines/test_compiled_layers.py."""


@pytest.mark.parametrize(
    ("backend", "cell"),
    [
        pytest.param(backend, cell, marks=[pytest.mark.whole] if backend == "inductor" or cell != COMPILED[0] else [])
        for backend in ("aot_eager", "inductor")
        for cell in COMPILED
    ],
    ids=str,
)
def test_compiled_layers_attend_in_their_graph_as_eager_ones_do(
    backend: str, cell: Cell, recipe_of: Callable[..., Recipe], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all micro-batches, wherever their documents begin, and for layers with and without a window."""
    if backend == "aot_eager":
        monkeypatch.setattr("toolkit.engines.compiled_layers._OPTIONS", {"backend": backend})
    elif shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    recipe, count = shared(cell, recipe_of(cell))
    eager = ranks(train_in_memory, count, recipe)[0]
    compiled = ranks(train_in_memory, count, recipe.changed({"train": {"compile": True}}), _compiled)[0]
    check_equal(compiled, eager)
    if cell.family not in WATCHED:
        # A pipeline's stage has layers of its own kinds, and a validation another pass.
        assert compiled.inspected["graph_breaks"] == {}
        assert compiled.inspected["graphs"] <= (3 if "pp" in cell.strategy else 2)


def _compiled(engine: Any) -> dict[str, Any]:
    facts: dict[str, Any] = engine.compiled.facts()
    return facts


@pytest.mark.parametrize(
    "strategy",
    [
        *("cp2-z0", "cp2-z1"),
        *(pytest.param(s, marks=pytest.mark.whole) for s in ("u2-cp1-z0", "cp2-z3", "cp2-tp2-z1-sp", "cp2-pp2-z1")),
    ],
)
def test_bf16_trains_as_one_rank_that_rounds_alike(
    strategy: str, recipe_of: Callable[..., Recipe], ranks: Ranks
) -> None:
    cell = Cell(strategy=strategy, exchange="ring")
    recipe, count = shared(cell, recipe_of(cell, precision="bf16"))
    run = ranks(train_in_memory, count, recipe)[0]
    stage = min(1, recipe.parallel.zero_stage)  # without ZeRO, autocast rounds weights of fp32
    alone = ranks(train_in_memory, 1, recipe_of(cell, precision="bf16", parallel={"zero_stage": stage}))[0]
    assert run.curve.losses == pytest.approx(alone.curve.losses, rel=1e-3)
    rows = tensor_differences(run.first_gradients, alone.first_gradients)
    assert rows[0].difference < 0.02, "\n" + tensor_table(rows)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["cp2-z0", "cp2-z2"])
def test_compiled_layers_round_to_bf16_as_eager_ones_do(
    strategy: str, recipe_of: Callable[..., Recipe], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast casts operands where a layer is traced, and is off where its graph runs."""
    monkeypatch.setattr("toolkit.engines.compiled_layers._OPTIONS", {"backend": "aot_eager"})
    cell = Cell(strategy=strategy, family="gemma2", exchange="ring")
    recipe, count = shared(cell, recipe_of(cell, precision="bf16"))
    eager = ranks(train_in_memory, count, recipe)[0]
    compiled = ranks(train_in_memory, count, recipe.changed({"train": {"compile": True}}), _compiled)[0]
    assert compiled.inspected["graph_breaks"] == {}
    assert compiled.curve.losses == pytest.approx(eager.curve.losses, rel=1e-3)
    rows = tensor_differences(compiled.first_gradients, eager.first_gradients)
    assert rows[0].difference < 0.02, "\n" + tensor_table(rows)


class TestFaults:
    """Mistakes that other tools have made, each planted once."""

    @pytest.fixture
    def is_caught(
        self, recipe_of: Callable[..., Recipe], reference: Callable[[Cell], ParityRun], ranks: Ranks
    ) -> Caught:
        """Returns whether the first step differs from that of one process."""

        def compare() -> bool:
            cell = Cell(strategy="cp2-z1", data="documents")
            recipe, count = shared(cell, recipe_of(cell))
            run = ranks(train_in_memory, count, recipe)[0]
            return compare_curves(run.curve, reference(cell).curve, Tolerance.fp32()).first_diverging_step == 1

        return compare

    def test_positions_that_restart_in_a_slice(
        self, is_caught: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take = ContextSlices.take

        def from_zero(slices: Any, micro_batch: Any, sequence: Any) -> Any:
            part = take(slices, micro_batch, sequence)
            return replace(part, position_ids=torch.arange(part.input_ids.shape[1]).expand_as(part.input_ids))

        monkeypatch.setattr(ContextSlices, "take", from_zero)
        assert is_caught()

    def test_documents_that_see_each_other(
        self, is_caught: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ContextSlices, "sequence", lambda slices, micro_batch: slices._plain)
        assert is_caught()

    def test_labels_that_are_shifted_in_a_slice(
        self, is_caught: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take = ContextSlices.take

        def shifted(slices: Any, micro_batch: Any, sequence: Any) -> Any:
            part = take(slices, micro_batch, sequence)
            part.labels[:, :-1] = part.input_ids[:, 1:]
            return part

        monkeypatch.setattr(ContextSlices, "take", shifted)
        assert is_caught()


def test_ranks_take_the_first_and_the_last_chunks_of_a_sequence(recipe_of: Callable[..., Recipe], ranks: Ranks) -> None:
    cell = Cell(strategy="cp2-z1")
    recipe, count = shared(cell, recipe_of(cell, train__steps=1, train__eval_every=0))
    taken = [run.inspected for run in ranks(train_in_memory, count, recipe, _positions)]
    assert taken == [[*range(8), *range(24, 32)], [*range(8, 24)]]


def _positions(engine: Any) -> list[int]:
    return list(engine.context.positions.tolist())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_repeats_recomputed_or_not(recompute: str, recipe_of: Callable[..., Recipe], ranks: Ranks) -> None:
    cell = Cell(strategy="cp2-z1", family="gpt2")
    parallel = {"cp": 2, "recompute": recompute}

    def losses(drop: float, **section: Any) -> Any:
        recipe = recipe_of(cell, parallel={**parallel, **section})
        model = recipe.model.model_copy(update={"overrides": {**recipe.model.overrides, "resid_pdrop": drop}})
        return ranks(train_in_memory, 2, recipe.model_copy(update={"model": model}))[0].curve.losses

    dropped = losses(0.1)
    assert losses(0.1, recompute="none") == dropped
    if recompute == "none":
        assert losses(0.0) != dropped


def test_a_run_resumes_in_another_layout_with_the_same_curve(train: Callable[..., str], tmp_path: Path) -> None:
    settings = ("train.steps=6", "checkpoint.every=3")
    model = {"name_or_path": "llama-tiny", "overrides": {"num_hidden_layers": 2, "vocab_size": 321}}
    fields: dict[str, Any] = {"model": model, "world_size": 2, "data__document_masking": True}
    train("run_dir=run", *settings, **fields, parallel={"cp": 2, "zero_stage": 2})
    train("run_dir=on", *settings, "--resume", "run/step-00000003", **fields, parallel={"tp": 2})
    train("run_dir=zero", *settings, "--resume", "run/step-00000003", **fields, parallel={"cp": 2, "zero_stage": 3})
    whole = timeless(tmp_path / "run")[3:]
    for folder in ("on", "zero"):
        resumed = timeless(tmp_path / folder)
        assert [step["batch"] for step in resumed] == [step["batch"] for step in whole]
        assert [step["loss"] for step in resumed] == pytest.approx([step["loss"] for step in whole], rel=BOUND)
