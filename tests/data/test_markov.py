"""The Markov corpus has its stated entropy rate, and is the same text on every machine."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

from toolkit.config import recipe_problems
from toolkit.config.data_section import DataSection
from toolkit.config.recipe import Recipe
from toolkit.data.documents.markov import DOCUMENTS, END, LETTERS, EntropyRate, MarkovSource, stationary
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.token_cache import TokenCorpus, prepare
from toolkit.errors import DataError
from toolkit.parallel.loss import IGNORE

TEXT_HASH = "ba0c35c17a4f5fad38706c99f1ee102d413baec3d127b19c10445809809aec29"
SOURCE = MarkovSource()
DEVIATION = 1.32
"""Of -ln P of one token, in nats."""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    (chunk,) = SOURCE.chunks()
    return list(chunk.documents())


@pytest.fixture(scope="module")
def states(texts: list[str]) -> np.ndarray:
    """The whole stream, with an END before the first document too."""
    number = {letter: state for state, letter in enumerate(LETTERS)}
    return np.array([END, *(state for text in texts for state in (*map(number.__getitem__, text), END))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def built(folder: Path) -> TokenCorpus:
    return prepare(section(folder), progress=False)


def section(folder: Path, tokenizer: str = "bpe-257") -> DataSection:
    return DataSection(
        source="markov", tokenizer=tokenizer, seq_len=64, eval_fraction=0.1, workers=1, cache_dir=str(folder)
    )


def conditional_entropy(pairs: np.ndarray) -> float:
    """H(next | this) of counted pairs [this, next]."""
    joint = pairs[pairs > 0] / pairs.sum()
    this = pairs.sum(axis=1)
    single = this[this > 0] / pairs.sum()
    return float(-(joint * np.log(joint)).sum() + (single * np.log(single)).sum())


def counted_pairs(states: np.ndarray) -> np.ndarray:
    pairs = np.zeros((END + 1, END + 1))
    np.add.at(pairs, (states[:-1], states[1:]), 1)
    return pairs


def test_the_text_is_the_same_on_every_machine(texts: list[str]) -> None:
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest() == TEXT_HASH


def test_a_source_opened_again_has_the_same_fingerprint() -> None:
    assert MarkovSource().fingerprint == SOURCE.fingerprint


def test_every_row_of_the_chain_is_a_distribution_and_no_document_is_empty(texts: list[str]) -> None:
    chain = SOURCE.transitions()
    assert (chain.sum(axis=1) == 1).all()
    assert chain[END, END] == 0
    assert (np.delete(chain, END, axis=0) > 0).all()
    assert len(texts) == DOCUMENTS
    assert all(texts)


def test_documents_end_by_chance_after_64_letters_on_average(texts: list[str]) -> None:
    lengths = np.array([len(text) for text in texts])
    assert lengths.mean() == pytest.approx(64, abs=4 * 64 / math.sqrt(DOCUMENTS))
    # A geometric distribution: the standard deviation is nearly the mean.
    assert lengths.std() == pytest.approx(64, rel=0.05)


def test_the_stationary_distribution_is_the_limit_of_any_start() -> None:
    assert stationary(SOURCE.transitions()) == pytest.approx(np.linalg.matrix_power(SOURCE.transitions(), 1000)[3])


def test_two_states_have_the_entropy_rate_of_the_textbook() -> None:
    """Cover and Thomas, section 4.2: H = b / (a + b) H(a) + a / (a + b) H(b)."""
    a, b = 0.1, 0.35
    binary = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (a, b)]
    rate = EntropyRate.of(np.array([[1 - a, a], [b, 1 - b]]), end=1)
    assert rate.stream == pytest.approx((b * binary[0] + a * binary[1]) / (a + b))
    assert rate.in_documents == pytest.approx(binary[0])


def test_the_stream_has_that_entropy_rate(states: np.ndarray) -> None:
    pairs = counted_pairs(states)
    # Counting n tokens in k cells finds about k / 2n too little.
    bias = np.count_nonzero(pairs) / 2 / pairs.sum()
    error = 4 * DEVIATION / math.sqrt(pairs.sum())
    assert conditional_entropy(pairs) + bias == pytest.approx(SOURCE.entropy_rate.stream, abs=error)
    within = np.delete(pairs, END, axis=0)
    assert conditional_entropy(within) + bias == pytest.approx(SOURCE.entropy_rate.in_documents, abs=error)


def test_earlier_tokens_carry_no_information(states: np.ndarray) -> None:
    """The mutual information of a token and the one two before it, given the one between: 0 but for counting."""
    cells = (END + 1) ** 2
    longer = np.zeros((cells, END + 1))
    np.add.at(longer, (states[:-2] * (END + 1) + states[1:-1], states[2:]), 1)
    gained = conditional_entropy(counted_pairs(states[1:])) - conditional_entropy(longer)
    # 2n times the information of unrelated variables is chi-square with this many degrees of freedom, or fewer.
    assert 0 <= 2 * len(states) * gained < (END + 1) * END**2


def test_the_entropy_rate_is_far_below_the_unigram_entropy() -> None:
    share = stationary(SOURCE.transitions())
    assert -(share * np.log(share)).sum() > 3
    assert 1.4 < SOURCE.entropy_rate.stream < 1.6


def test_a_token_is_a_letter(built: TokenCorpus, texts: list[str]) -> None:
    tokens, first = built.tokens("train"), built.document_offsets("train")[1]
    assert built.tokenizer().convert_ids_to_tokens(tokens[: first - 1].tolist()) in [list(text) for text in texts[:50]]
    assert built.train_tokens + built.eval_tokens == sum(map(len, texts)) + DOCUMENTS
    assert (built.tokenizer_vocab_size, len(np.unique(tokens))) == (257, END + 1)


@pytest.mark.parametrize("data", [{}, {"document_masking": True}, {"packing": "padded"}])
def test_the_floor_is_the_loss_of_the_chain_itself_on_validation_text(built: TokenCorpus, data: dict[str, Any]) -> None:
    section = DataSection(seq_len=64, **data)
    masking = section.document_masking
    samples = Samples(
        built, seq_len=64, packing=section.packing, document_masking=masking, split="eval", seed=0, global_batch_size=1
    )
    rows = [samples.tokens(index) for index in range(len(samples))]
    inputs, labels = (np.concatenate(part) for part in zip(*rows, strict=True))
    known = labels != IGNORE
    state = np.full(built.tokenizer_vocab_size, -1)
    state[built.tokenizer().convert_tokens_to_ids([*LETTERS])] = range(END)
    state[built.eos_id] = END
    losses = -np.log(SOURCE.transitions()[state[inputs[known]], state[labels[known]]])
    assert losses.std() == pytest.approx(DEVIATION, rel=0.02)
    assert losses.mean() == pytest.approx(built.loss_floor(section), abs=4 * DEVIATION / math.sqrt(len(losses)))


def test_the_cache_holds_the_entropy_rate(built: TokenCorpus) -> None:
    meta = json.loads((built.path / "meta.json").read_text())
    assert meta["entropy_rate"] == SOURCE.entropy_rate.stream
    assert meta["entropy_rate_in_documents"] == SOURCE.entropy_rate.in_documents


def test_other_text_has_no_known_floor(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 1000)
    other = section(tmp_path).model_copy(update={"source": str(tmp_path / "a.txt")})
    assert prepare(other, progress=False).loss_floor(other) is None


def test_a_tokenizer_that_joins_letters_is_refused(folder: Path) -> None:
    with refused(DataError, "data.tokenizer", "data.source", remedy=("data.tokenizer", "bpe-257")):
        prepare(section(folder, "bpe-260"), progress=False)


def test_a_tokenizer_that_confuses_letters_is_refused(built: TokenCorpus, tmp_path: Path) -> None:
    spec = json.loads((built.tokenizer_dir / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
    (tmp_path / "lossy").mkdir()
    (tmp_path / "lossy" / "tokenizer.json").write_text(json.dumps(spec))
    config = (built.tokenizer_dir / "tokenizer_config.json").read_bytes()
    (tmp_path / "lossy" / "tokenizer_config.json").write_bytes(config)
    with refused(DataError, "data.tokenizer", "data.source"):
        prepare(section(tmp_path, str(tmp_path / "lossy")), progress=False)


def test_a_recipe_with_such_a_tokenizer_or_a_dataset_field_is_refused(make_recipe: Callable[..., Recipe]) -> None:
    (found,) = recipe_problems(make_recipe(data__source="markov", data__tokenizer="bpe-300"))
    assert found.startswith("data.tokenizer=bpe-300 with source=markov: ")
    (found,) = recipe_problems(make_recipe(data__source="markov", data__tokenizer="bpe-257", data__split="test"))
    assert found.startswith("data.split=test with source=markov: split has no effect")
    assert recipe_problems(make_recipe(data__source="markov", data__tokenizer="bpe-257")) == []
