"""data.bos and data.separator: what is before and after each text, and nothing there twice."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
from refusals import refused
from small_chats import CHATML, turns, write_tokenizer
from tokenizers.processors import Sequence, TemplateProcessing
from transformers import AutoTokenizer

from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources
from toolkit.data.documents.sources import open_source
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.token_cache import TokenCorpus, prepare
from toolkit.errors import DataError

TEXTS = [f"hello there {'one two three ' * (number % 5)}" for number in range(40)]
ADDED = {"nothing": "$A", "BOS": "<s> $A", "BOS and EOS": "<s> $A </s>", "EOS": "$A </s>"}
OWN = {"nothing": 0, "BOS": 1, "BOS and EOS": 1, "EOS": 0}


def write_adding_tokenizer(folder: Path, added: str, template: str | None = None) -> Path:
    """A tokenizer that itself adds the tokens of `added` around a text."""
    write_tokenizer(folder, template)
    loaded = AutoTokenizer.from_pretrained(folder)
    special = [(token, loaded.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    backend = loaded.backend_tokenizer
    around = TemplateProcessing(single=added, pair=f"{added} $B", special_tokens=special)
    backend.post_processor = Sequence([backend.post_processor, around])
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(params=ADDED)
def added(request):
    return request.param


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def built(folder: Path, tokenizer: Path, **fields: object) -> TokenCorpus:
    names = {"source": folder / "text.jsonl", "tokenizer": tokenizer, "cache_dir": folder / "cache"}
    defaults = {"workers": 1, "eval_fraction": 0.0, "seq_len": 8}
    return prepare(DataSection(**{**{k: str(v) for k, v in names.items()}, **defaults, **fields}), progress=False)


def documents(corpus: TokenCorpus) -> list[list[str]]:
    tokens, stream = corpus.tokenizer(), corpus.tokens("train")
    offsets = pairwise(corpus.document_offsets("train"))
    return [tokens.convert_ids_to_tokens(stream[start:end].tolist()) for start, end in offsets]


def test_auto_is_what_the_tokenizer_does_and_one_end_of_text(added, folder):
    tokenizer = write_adding_tokenizer(folder / "tokenizer", ADDED[added])
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    own = [loaded.convert_ids_to_tokens(loaded(text)["input_ids"]) for text in TEXTS]
    expected = [[*text, *(["</s>"] if text[-1] != "</s>" else [])] for text in own]
    corpus = built(folder, tokenizer)
    assert documents(corpus) == expected
    assert documents(corpus)[0].count("<s>") == OWN[added]
    assert corpus.ends == f"begin with {'<s>' if OWN[added] else 'the text'}, end with </s>"


@pytest.mark.parametrize(("bos", "count"), [("always", 1), ("never", 0)])
def test_always_and_never_overrule_the_tokenizer(bos, count, added, folder):
    tokenizer = write_adding_tokenizer(folder / "tokenizer", ADDED[added])
    found = documents(built(folder, tokenizer, bos=bos))
    assert [document.count("<s>") for document in found] == [count] * len(TEXTS)
    assert all(document[:count] == ["<s>"][:count] for document in found)


@pytest.mark.parametrize(("separator", "last"), [("eos", ["</s>"]), ("<|im_end|>", ["<|im_end|>"]), ("none", [])])
def test_the_separator_follows_each_text(separator, last, folder):
    tokenizer = write_adding_tokenizer(folder / "tokenizer", ADDED["BOS and EOS"])
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    expected = [["<s>", *loaded.tokenize(text), *last] for text in TEXTS]
    assert documents(built(folder, tokenizer, separator=separator)) == expected


def test_a_text_that_begins_with_the_bos_gets_no_second_one(folder):
    (folder / "text.jsonl").write_text(json.dumps({"text": "<s>hello"}) + "\n")
    found = documents(built(folder, write_adding_tokenizer(folder / "tokenizer", ADDED["BOS"])))
    assert found[0].count("<s>") == 1


def test_a_text_that_is_read_in_parts_has_one_beginning_and_one_end(folder, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 100)
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 1000)
    (folder / "text.txt").write_text("hello there one two three\n" * 50)
    tokenizer = write_adding_tokenizer(folder / "tokenizer", ADDED["BOS"])
    (found,) = documents(built(folder, tokenizer, source=str(folder / "text.txt")))
    assert [place for place, token in enumerate(found) if token in ("<s>", "</s>")] == [0, len(found) - 1]


def test_a_prompt_has_a_beginning_and_its_completion_an_end_that_is_trained_on(folder):
    (folder / "text.jsonl").write_text(json.dumps({"prompt": "one", "completion": " two"}) + "\n")
    tokenizer = write_adding_tokenizer(folder / "tokenizer", ADDED["BOS"])
    corpus = built(folder, tokenizer, format="prompt_completion", separator="<|end|>")
    (found,) = documents(corpus)
    trained = [token for token, is_trained in zip(found, corpus.trained("train"), strict=True) if is_trained]
    assert (found[0], found[-1], found.count("<s>")) == ("<s>", "<|end|>", 1)
    assert ("<s>" in trained, trained[-1]) == (False, "<|end|>")


def test_a_chat_has_the_bos_of_its_template_and_no_second_one(folder):
    (folder / "text.jsonl").write_text(json.dumps({"messages": turns("one", "two")}) + "\n")
    tokenizer = write_adding_tokenizer(folder / "tokenizer", ADDED["BOS and EOS"], "{{ bos_token }}" + CHATML)
    (found,) = documents(built(folder, tokenizer, format="chat"))
    assert (found[0], found.count("<s>"), found.count("</s>")) == ("<s>", 1, 0)


@pytest.mark.parametrize("fields", [{}, {"bos": "never"}, {"format": "prompt_completion", "separator": "eos"}])
def test_where_documents_only_end_in_the_eos_the_cache_keeps_its_name(fields, folder):
    """Of the corpora that were tokenized before there were these fields."""
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": text, "prompt": "a", "completion": "b"}) + "\n" for text in TEXTS)
    )
    tokenizer = write_tokenizer(folder / "tokenizer", template=None)
    corpus = built(folder, tokenizer, **fields)
    section = DataSection(source=str(folder / "text.jsonl"), tokenizer=str(tokenizer), seq_len=8, eval_fraction=0.0)
    identity = tokenizers.identity(section, tokenizers.load(section))
    parts = [2, open_source(section).fingerprint, identity, 0.0, "text"]
    parts += [1, "prompt_completion", "assistant"] if "format" in fields else []
    assert corpus.path.name.endswith(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16])


def test_what_is_around_texts_makes_another_cache(folder):
    tokenizer = write_adding_tokenizer(folder / "tokenizer", ADDED["BOS"])
    fields: list[dict[str, object]] = [{}, {"bos": "never"}, {"separator": "none"}, {"separator": "<|end|>"}]
    assert len({built(folder, tokenizer, **one).path for one in fields}) == 4
    bpe: list[dict[str, object]] = [{}, {"bos": "always"}, {"separator": "none"}]
    assert len({built(folder, Path("bpe-300"), **one).path for one in bpe}) == 3


def test_tokens_that_the_tokenizer_does_not_have_are_refused(folder):
    tokenizer = write_tokenizer(folder / "tokenizer", template=None)
    with refused(DataError, "data.separator", remedy=("data.separator", "eos, none or a token of the tokenizer")):
        built(folder, tokenizer, separator="<|im_ende|>")
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.bos_token = None
    loaded.save_pretrained(tokenizer)
    with refused(DataError, "data.bos", remedy=("data.bos", "never")):
        built(folder, tokenizer, bos="always")
