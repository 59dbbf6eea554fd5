"""Ranks that share sequences read their parts of them alone, and get the same tokens as from whole samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_chats import write_chats, write_tokenizer

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.fingerprint import hash_samples
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.corpora import Corpora
from toolkit.data.tokens.token_cache import prepare

MakeRecipe = Callable[..., Recipe]
SEQ_LEN = 64
DATA: dict[str, dict[str, Any]] = {
    "packed": {},
    "documents": {"document_masking": True},
    "padded": {"packing": "padded"},
    "chats": {"format": "chat"},
    "padded chats": {"format": "chat", "packing": "padded"},
}
LAYOUTS = ("cp2", "cp4", "u2-cp2", "u4-cp1", "dp2-cp2-tp2-pp2-z1")


class CountedTokens:
    """Tokens of a split, which count how many of them are read."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        self._tokens = tokens
        self.read = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, places: slice) -> NDArray[Any]:
        part = self._tokens[places]
        self.read += len(part)
        return part


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rows")
    tokenizer = str(write_tokenizer(folder / "tokenizer"))
    return {"source": str(write_chats(folder / "chats.jsonl")), "tokenizer": tokenizer}


@pytest.fixture
def loaders(make_recipe: MakeRecipe, rows: dict[str, Any]) -> Callable[[str, str], list[MicroBatchLoader]]:
    """Make the loader of every rank of a layout."""

    def make(layout: str, data: str) -> list[MicroBatchLoader]:
        strategy = Strategy.parse(layout)
        chats = rows if "chats" in data else {}
        fields = {f"data__{name}": value for name, value in {**DATA[data], **chats, "seq_len": SEQ_LEN}.items()}
        ranks = strategy.world_size(1)
        recipe = strategy.apply(make_recipe(**fields, train__steps=2, train__eval_every=2), ranks)
        job = Job.of(recipe, ranks)
        corpora = Corpora.of(recipe.data, prepare(recipe.data, progress=False))
        return [MicroBatchLoader.open(job, corpora, rank=rank) for rank in range(ranks)]

    return make


def part_of(whole: MicroBatch, held: tuple[range, ...]) -> list[torch.Tensor | None]:
    """What a rank would take of whole samples."""
    positions = torch.cat([torch.arange(run.start, run.stop) for run in held])
    ids = torch.arange(SEQ_LEN).expand_as(whole.input_ids) if whole.position_ids is None else whole.position_ids
    return [whole.input_ids[:, positions], whole.labels[:, positions], ids[:, positions]]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_the_part_that_it_would_take_of_whole_samples(
    loaders: Callable[..., list[MicroBatchLoader]], layout: str, data: str
) -> None:
    for loader in loaders(layout, data):
        if not loader.reads:
            continue
        assert loader.share is not None
        own = loader._micro_batch(1, loader._positions(0))
        whole = loader.train.batch(1, loader._positions(0))
        assert own.held is not None
        assert sum(map(len, own.held)) == SEQ_LEN // loader.share.ranks
        for part, wanted in zip((own.input_ids, own.labels, own.position_ids), part_of(whole, own.held), strict=True):
            assert torch.equal(cast(torch.Tensor, part), cast(torch.Tensor, wanted))
        assert own.is_packed == whole.is_packed
        assert own.lengths is whole.lengths or torch.equal(own.lengths, whole.lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", ["cp4", "u2-cp2"])
def test_the_ranks_of_a_sequence_hold_each_position_once(
    loaders: Callable[..., list[MicroBatchLoader]], layout: str, data: str
) -> None:
    batches = [loader._micro_batch(0, range(2)) for loader in loaders(layout, data)]
    held = [position for batch in batches for run in batch.held or () for position in run]
    assert sorted(held) == list(range(SEQ_LEN))
    if data == "documents":
        assert any(len(starts) > 1 for starts in batches[0].starts or ())


@pytest.mark.parametrize("data", DATA)
def test_parts_of_samples_add_up_to_the_fingerprint_of_whole_ones(
    loaders: Callable[..., list[MicroBatchLoader]], data: str
) -> None:
    own = loaders("cp4", data)
    parts = [loader._micro_batch(0, range(2)) for loader in own]
    sums = [hash_samples(part.input_ids, part.labels, range(2), part.held) for part in parts]
    whole = own[0].train.batch(0, range(2))
    assert sum(sums) % 2**64 == hash_samples(whole.input_ids, whole.labels, range(2))


@pytest.mark.parametrize("data", DATA)
def test_a_rank_reads_its_part_of_the_tokens_and_one_more_for_each_run(
    loaders: Callable[..., list[MicroBatchLoader]], data: str
) -> None:
    for loader in loaders("cp4", data):
        assert type(loader.train) is not Samples or loader.train.reads_parts
        counted = CountedTokens(np.asarray(loader.train._tokens))
        loader.train._tokens = counted  # type: ignore[assignment]
        batch = loader._micro_batch(0, range(4))
        assert batch.held is not None
        documents = sum(map(len, batch.starts or ()))
        assert 0 < counted.read <= 4 * (SEQ_LEN // 4 + len(batch.held)) + documents


def test_validations_are_read_in_parts_too(loaders: Callable[..., list[MicroBatchLoader]]) -> None:
    loader = loaders("cp2", "documents")[1]
    batches = list(loader.validation_batches())
    assert batches
    assert {batch.input_ids.shape[1] for batch in batches} == {SEQ_LEN // 2}


def test_pairs_are_read_whole(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    from small_preferences import write_rows

    pairs = [{"prompt": "one two", "chosen": "three four", "rejected": "five"}] * 40
    data = {
        "source": str(write_rows(tmp_path / "pairs.jsonl", pairs)),
        "tokenizer": str(write_tokenizer(tmp_path / "tokenizer")),
        "format": "preference",
        "seq_len": SEQ_LEN,
        "cache_dir": str(tmp_path / "cache"),
        "eval_fraction": 0.0,
    }
    recipe = make_recipe(data=data, train__objective={"name": "dpo"}, parallel={"cp": 2})
    loader = MicroBatchLoader.open(Job.of(recipe, 2), prepare(recipe.data, progress=False), rank=1)
    assert loader.share is None
    assert loader._micro_batch(0, range(2)).input_ids.shape == (2, SEQ_LEN)
