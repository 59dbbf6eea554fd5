"""The token cache of chats: ids and mask beside each other, whole chats held out, and what makes it another cache."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from refusals import refused
from small_chats import CHATML, turns, write_chats, write_tokenizer

from toolkit.config.data_section import DataSection
from toolkit.data.documents import sources
from toolkit.data.tokens.token_cache import TokenCorpus, prepare
from toolkit.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.text_chunks, "CHUNK_BYTES", 2000)
    write_chats(tmp_path / "chats.jsonl")
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def built(folder: Path, **fields: object) -> TokenCorpus:
    names = {"source": folder / "chats.jsonl", "tokenizer": folder / "tokenizer", "cache_dir": folder / "cache"}
    defaults = {"format": "chat", "seq_len": 64, "workers": 1, "eval_fraction": 0.2}
    return prepare(DataSection(**{**{k: str(v) for k, v in names.items()}, **defaults, **fields}), progress=False)


def documents(corpus: TokenCorpus) -> list[tuple[list[int], list[int]]]:
    return [
        (corpus.tokens(split)[start:end].tolist(), corpus.trained(split)[start:end].tolist())
        for split in ("train", "eval")
        for start, end in pairwise(corpus.document_offsets(split))
    ]


def test_each_document_is_a_chat_with_its_mask_and_nothing_after_it(folder):
    corpus = built(folder)
    tokenizer = corpus.tokenizer()
    found = {
        tokenizer.decode(ids): tokenizer.decode([i for i, trained in zip(ids, mask, strict=True) if trained])
        for ids, mask in documents(corpus)
    }
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    assert found == {
        "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat): "".join(
            turn["content"] + "<|im_end|>" for turn in chat if turn["role"] == "assistant"
        )
        for chat in chats
    }


def test_the_number_of_workers_changes_no_byte(folder):
    one, two = (built(folder, workers=n, cache_dir=str(folder / str(n))) for n in (1, 2))
    names = sorted(path.name for path in one.path.iterdir() if path.is_file())
    assert "train.trained" in names
    assert [(one.path / name).read_bytes() for name in names] == [(two.path / name).read_bytes() for name in names]


def test_whole_chats_are_held_out_however_few(folder):
    write_chats(folder / "chats.jsonl", count=60)
    corpus = built(folder, eval_fraction=0.01)
    assert corpus.eval_documents + corpus.train_documents == 60
    assert corpus.eval_tokens > 0


def test_what_is_trained_on_is_counted_and_is_what_the_entropy_is_of(folder):
    corpus = built(folder)
    trained = corpus.tokens("train")[corpus.trained("train") > 0]
    counts = np.bincount(trained)
    shares = counts[counts > 0] / len(trained)
    assert corpus.trained_tokens == len(trained)
    assert corpus.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())


def test_the_template_and_what_is_trained_on_make_another_cache(folder):
    paths = [built(folder).path, built(folder, train_on="last_assistant").path, built(folder, train_on="all").path]
    paths.append(built(folder, dropped_text="allow").path)
    write_tokenizer(folder / "tokenizer", stops=("<|im_end|>",))
    paths.append(built(folder).path)
    write_tokenizer(folder / "tokenizer", CHATML.replace("<|im_end|>\n", "<|im_end|>"), stops=("<|im_end|>",))
    paths.append(built(folder).path)
    assert len({*paths}) == 6


def test_the_length_of_samples_and_the_packing_do_not(folder):
    same = [built(folder), built(folder, seq_len=8), built(folder, packing="padded", overlong="split")]
    assert len({corpus.path for corpus in same}) == 1


def test_a_damaged_mask_is_refused(folder):
    path = built(folder).path / "train.trained"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train.trained: not as long as train.bin"):
        built(folder)


@pytest.mark.parametrize("packed", [False, True])
def test_a_chat_that_the_template_refuses_is_named(folder, packed):
    bad = "{% if message.content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    write_tokenizer(
        folder / "tokenizer", CHATML.replace("{{ '<|im_start|>' + message", bad + "{{ '<|im_start|>' + message")
    )
    lines = (folder / "chats.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(150, b'{"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]}\n')
    path = folder / ("bad.jsonl.gz" if packed else "bad.jsonl")
    path.write_bytes(gzip.compress(b"".join(lines)) if packed else b"".join(lines))
    with pytest.raises(DataError, match=r"bad.jsonl(.gz)?:151: the chat template, .* begins 'no': .*not this") as error:
        built(folder, source=str(path), workers=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_chat_of_which_the_template_leaves_out_a_part_is_named_unless_that_is_allowed(folder, kind):
    template = "{% for message in messages if message.role != 'developer' %}" + CHATML.partition("%}")[2]
    write_tokenizer(folder / "tokenizer", template)
    lines = (folder / "chats.jsonl").read_text().splitlines()
    messages = [{"role": "developer", "content": "be brief"}, *json.loads(lines[150])["messages"]]
    lines[150] = json.dumps({"messages": messages})
    path, text = folder / f"bad.{kind}", "\n".join(lines)
    if kind == "parquet":
        chats = pyarrow.table({"messages": [json.loads(line)["messages"] for line in lines]})
        pyarrow.parquet.write_table(chats, path)
    else:
        path.write_bytes(gzip.compress(text.encode()) if kind == "jsonl.gz" else text.encode())
    place = ", row 150" if kind == "parquet" else ":151"
    lost = "it leaves out the content of the developer message that begins 'be brief'"
    with pytest.raises(
        DataError, match=rf"bad.{kind}{place}: the chat template, .* begins 'be brief': {lost}"
    ) as error:
        built(folder, source=str(path), workers=2)
    assert "\n" not in str(error.value)
    corpus = built(folder, source=str(path), dropped_text="allow")
    assert corpus.trained_tokens == built(folder).trained_tokens


def test_tokens_at_which_generation_stops_are_those_of_the_models_directory(folder):
    """Not of the cache, where the tokenizer is without the model."""
    template = CHATML.replace("'<|im_end|>\n'", "('<|end|>' if message.tool_calls else '<|im_end|>') + '\n'")
    chat = [*turns("hi"), {"role": "assistant", "content": "ho", "tool_calls": [{"name": "clock"}]}]
    template = template.replace(
        "message.content", "(message.tool_calls[0].name if message.tool_calls else '') + message.content"
    )
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    write_tokenizer(folder / "tokenizer", template)
    with pytest.raises(DataError, match=r"chats.jsonl:1: .*'<\|end\|>' is neither the EOS token nor in its generation"):
        built(folder, eval_fraction=0)
    write_tokenizer(folder / "tokenizer", template, stops=("<|end|>", "</s>"))
    corpus = built(folder, eval_fraction=0)
    trained = corpus.tokens("train")[corpus.trained("train") > 0]
    assert corpus.tokenizer().decode(trained.tolist()) == "clockho<|end|>"


def test_a_bad_row_leaves_nothing_but_the_reason(folder):
    with (folder / "chats.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "robot", "content": "hi"}]}\n')
    with pytest.raises(DataError, match=r"chats.jsonl:201: messages\[0\] has the role 'robot'"):
        built(folder)
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".failed"]


def test_each_turn_makes_a_document_whose_trained_tokens_are_those_of_the_whole_chat(folder):
    whole = built(folder, eval_fraction=0)
    each = built(folder, eval_fraction=0, train_on="each_assistant")
    assert each.trained_tokens == whole.trained_tokens  # this template rewrites nothing
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    assert each.train_documents == sum(turn["role"] == "assistant" for chat in chats for turn in chat)


def test_turns_of_a_chat_are_not_held_out_from_each_other(folder):
    with refused(DataError, "data.train_on", "data.eval_fraction"):
        built(folder, train_on="each_assistant")
