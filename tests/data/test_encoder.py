"""The encoder returns the same ids as the tokenizer itself."""

import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from toolkit.data.tokens.encoder import (
    _ASCII_WORDS,
    CachedEncoder,
    PlainEncoder,
    SlowEncoder,
    load_encoder,
)

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    **{
        name: pre_tokenizers.Sequence([pre_tokenizers.Split(Pattern(pattern), "isolated"), BYTE_LEVEL])
        for name, pattern in zip(("llama3", "qwen2"), list(_ASCII_WORDS)[1:], strict=True)
    },
}
CODE = [Path(sysconfig.get_paths()["stdlib"], name).read_text("utf-8") for name in ("argparse.py", "json/decoder.py")]


def train(pre_tokenizer: object, *, normalizer: object = None, special: str = "<|endoftext|>") -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[special], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CODE, trainer)
    return bpe


def random_texts(count: int) -> list[str]:
    """Texts that meet every rule of the splits: contractions, runs of spaces, several line ends, other alphabets."""
    chance = random.Random(0)
    bits = [*"aZ9_'! \n\t\r\f\v\x1c\x1f\x00é漢ſ１", "'s", "'LL", "don't", "\r\n", "\n\n", "  ", "x = 1\n", "字\n"]
    bits += ["\u00a0", "\u2028", "e\u0301", "\U0001f600"]
    return ["".join(chance.choices(bits, k=chance.randrange(1, 60))) for _ in range(count)]


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["none", "nfc"])
def test_the_cached_encoder_returns_the_ids_of_the_tokenizer(name, normalizer, tmp_path):
    tokenizer = train(SPLITS[name], normalizer=normalizer)
    encoder = load_encoder(save(tokenizer, tmp_path), "<u2", split_special_tokens=False)
    assert isinstance(encoder, CachedEncoder)
    texts = CODE + random_texts(2000)
    ids = [np.frombuffer(raw, "<u2").tolist() for raw in encoder.encode(texts)]
    assert ids == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("split_special", [False, True])
def test_special_tokens_inside_a_text_are_encoded_as_by_the_tokenizer(split_special, tmp_path):
    tokenizer = train(SPLITS["gpt2"])
    tokenizer.encode_special_tokens = split_special
    encoder = load_encoder(save(tokenizer, tmp_path), "<u2", split_special_tokens=split_special)
    text = "before <|endoftext|> after"
    assert np.frombuffer(encoder.encode([text])[0], "<u2").tolist() == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True, "trim_offsets": True}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"normalizer": {"type": "Lowercase"}},
    ],
    ids=["prefix space", "other split", "lower case"],
)
def test_an_unknown_kind_of_tokenizer_is_not_cached(change, tmp_path):
    spec = json.loads(train(SPLITS["gpt2"]).to_str()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert isinstance(load_encoder(tmp_path, "<u2", split_special_tokens=False), PlainEncoder)


def test_a_split_that_disagrees_on_the_probe_is_not_cached(tmp_path, monkeypatch):
    monkeypatch.setitem(_ASCII_WORDS, "byte-level", r"\S+|\s+")
    encoder = load_encoder(save(train(SPLITS["gpt2"]), tmp_path), "<u2", split_special_tokens=False)
    assert isinstance(encoder, PlainEncoder)


def test_truncation_saved_with_the_tokenizer_is_ignored(tmp_path):
    tokenizer = train(SPLITS["gpt2"])
    full = len(tokenizer.encode(CODE[0]).ids)
    tokenizer.enable_truncation(5)
    encoder = load_encoder(save(tokenizer, tmp_path), "<u2", split_special_tokens=False)
    assert len(encoder.encode(CODE[:1])[0]) == 2 * full


def test_the_cache_stays_exact_when_it_overflows(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.data.tokens.encoder._CACHE_ENTRIES", 3)
    folder = save(train(SPLITS["gpt2"]), tmp_path)
    plain = PlainEncoder(Tokenizer.from_file(str(folder / "tokenizer.json")), "<u2")
    assert load_encoder(folder, "<u2", split_special_tokens=False).encode(CODE) == plain.encode(CODE)


def test_a_tokenizer_without_tokenizer_json_is_called_through_transformers(tmp_path, monkeypatch):
    import transformers

    class Slow:
        def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
            assert options["add_special_tokens"] is False
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder: Slow())
    encoder = load_encoder(tmp_path, "<u4", split_special_tokens=False)
    assert isinstance(encoder, SlowEncoder)
    assert np.frombuffer(encoder.encode(["ab"])[0], "<u4").tolist() == [97, 98]
