"""Training a tokenizer is deterministic, saving preserves it, and errors are one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from toolkit.config.data_section import DataSection
from toolkit.data.documents.sources import open_source
from toolkit.data.tokens.tokenizer import identity, load_or_train, sample_texts
from toolkit.data.tokens.tokenizer_pool import vocab_size
from toolkit.errors import DataError

TEXT = "the quick brown fox, the lazy dog: ünïcode 漢字 \x00\x01\r\n\t  two  spaces ' .\n"


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} {TEXT}" * 20)
    return tmp_path / "text"


def made(corpus: object, tokenizer: object = "bpe-300") -> PreTrainedTokenizerFast:
    section = DataSection(source=str(corpus), tokenizer=str(tokenizer), seq_len=8)
    return load_or_train(section, open_source(section))


def test_bpe_n_has_n_entries(corpus):
    assert len(made(corpus)) == vocab_size(made(corpus)) == 300


def test_decoding_restores_every_byte(corpus):
    text = TEXT + "".join(map(chr, range(0x300))) + " \U0001f600 don 't , . !"
    tokenizer = made(corpus)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_saved_bpe_loads_as_the_same_tokenizer(corpus, tmp_path):
    tokenizer = made(corpus)
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (loaded(TEXT)["input_ids"], loaded.eos_token) == (tokenizer(TEXT)["input_ids"], "<|endoftext|>")


def test_training_in_another_process_gives_the_same_bpe(corpus):
    code = (
        "import sys; from toolkit.config.recipe import DataSection; from toolkit.data.documents import sources\n"
        "from toolkit.data.tokens import tokenizer\n"
        "section = DataSection(source=sys.argv[1], tokenizer='bpe-300', seq_len=8)\n"
        "made = tokenizer.load_or_train(section, sources.open_source(section))\n"
        "sys.stdout.write(made.backend_tokenizer.to_str())"
    )
    other = subprocess.run([sys.executable, "-c", code, str(corpus)], capture_output=True, text=True, check=True)
    assert other.stdout == made(corpus).backend_tokenizer.to_str()


def test_training_text_is_bounded_and_spread_over_the_corpus(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(str(number) * (1 << 20))
    source = open_source(DataSection(source=str(tmp_path), seq_len=8))
    assert [text[0] for text in sample_texts(source, limit_bytes=5 << 20)] == ["0", "2", "4", "6", "8"]


def test_the_identity_of_a_tokenizer_is_its_content_not_its_path(corpus, tmp_path):
    tokenizer = made(corpus)
    tokenizer.save_pretrained(tmp_path / "a")
    section = DataSection(source=str(corpus), tokenizer=str(tmp_path / "a"), seq_len=8)
    assert identity(section, made(corpus, tmp_path / "a")) == identity(section, tokenizer)


def test_the_identity_follows_the_end_of_text_token(corpus):
    section = DataSection(source=str(corpus), seq_len=8)
    tokenizer = made(corpus)
    before = identity(section, tokenizer)
    tokenizer.eos_token = "!"
    assert identity(section, tokenizer) != before


@pytest.mark.parametrize("entries", [0, 256])
def test_a_bpe_smaller_than_its_bytes_is_refused(entries, corpus):
    with refused(DataError, "data.tokenizer", remedy=("data.tokenizer", "bpe-257 or more")):
        made(corpus, f"bpe-{entries}")


def test_a_directory_without_tokenizer_files_is_named(corpus, tmp_path):
    with refused(DataError, "data.tokenizer"):
        made(corpus, tmp_path)


def test_a_tokenizer_without_end_of_text_is_named(corpus, tmp_path):
    backend = made(corpus).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "saved")
    with refused(DataError, "data.tokenizer") as found:
        made(corpus, tmp_path / "saved")
    assert "eos_token" in found[0].reason


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(corpus, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        assert kwargs["trust_remote_code"] is False
        raise OSError("no route\nto host")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with refused(DataError, "data.tokenizer") as found:
        made(corpus, "org/name")
    assert "no route to host" in found[0].reason


def test_broken_tokenizer_files_are_one_line(corpus, tmp_path):
    Path(tmp_path / "tokenizer.json").write_text("{")
    with refused(DataError, "data.tokenizer"):
        made(corpus, tmp_path)


@pytest.mark.parametrize("name", ["./gone", "/gone/tokenizer", "text.txt"])
def test_a_path_that_is_no_directory_is_not_looked_up_on_the_hub(corpus, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("{}")
    with refused(DataError, "data.tokenizer") as found:
        made(corpus, name)
    assert "directory" in found[0].reason


def test_an_id_that_no_tokenizer_needs_is_refused_before_the_tokenizer_is_saved(corpus, tmp_path):
    made(corpus).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zz"] = 999_999_999
    path.write_text(json.dumps(content))
    with refused(DataError, "data.tokenizer") as found:
        made(corpus, tmp_path / "saved")
    assert "999999999" in found[0].reason


def test_digits_of_other_scripts_are_no_number_of_entries(corpus, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: made(corpus))
    assert len(made(corpus, "bpe-٢٥٧")) == 300
