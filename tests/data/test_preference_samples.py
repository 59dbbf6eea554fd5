"""Preference data: what rows are read as, which tokens are trained on, and that no pair is ever split."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_chats import marked, write_tokenizer
from small_preferences import make_completions, make_pairs, write_rows
from transformers import AutoTokenizer

from toolkit.config.data_section import DataSection
from toolkit.data.documents.rows import RowReader
from toolkit.data.samples.loader import open_samples
from toolkit.data.samples.preference_samples import PreferenceSamples
from toolkit.data.tokens.token_cache import prepare
from toolkit.errors import DataError
from toolkit.parallel.loss import IGNORE

ASKED = [{"role": "user", "content": "hello"}]
GOOD = [{"role": "assistant", "content": "one"}]
BAD = [{"role": "assistant", "content": "two"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "saved")


Open = Callable[..., PreferenceSamples]


@pytest.fixture
def opened(tmp_path: Path, tokenizer: Path) -> Open:
    """Write rows, tokenize them and open their samples."""

    def make(rows: list[dict[str, Any]], *, has_mismatched: bool = False, **fields: Any) -> PreferenceSamples:
        section = DataSection(
            source=str(write_rows(tmp_path / "rows.jsonl", rows)),
            cache_dir=str(tmp_path / "cache"),
            workers=1,
            eval_fraction=0.0,
            **({"format": "preference", "seq_len": 96, "tokenizer": str(tokenizer)} | fields),
        )
        corpus = prepare(section, progress=False)
        samples = open_samples(
            corpus, section, split="train", seed=3, global_batch_size=4, has_mismatched=has_mismatched
        )
        assert isinstance(samples, PreferenceSamples)
        return samples

    return make


def read(row: dict[str, Any], row_format: str = "preference") -> dict[str, Any]:
    document = RowReader(format=row_format).read(row, lambda: "rows.jsonl:1")  # type: ignore[arg-type]
    assert isinstance(document, str)
    result: dict[str, Any] = json.loads(document)
    return result


def sequences_of(samples: PreferenceSamples, index: int, tokenizer: Path) -> list[str]:
    """The sequences of a row, with what is trained on between « and »."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    ids, labels = samples.tokens(index)
    positions = samples.position_ids(index)
    starts = [*np.flatnonzero(positions == 0).tolist(), len(ids)]
    texts = []
    for start, end in pairwise(starts):
        used = np.flatnonzero(labels[start:end] != IGNORE)
        if not len(used):
            continue
        stop = start + int(used[-1]) + 1
        tokens = [*ids[start:stop].tolist(), int(labels[stop - 1])]
        texts.append(marked(loaded, tokens, [0, *(labels[start:stop] != IGNORE).astype(int).tolist()]))
    return texts


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": "hello", "chosen": ASKED + GOOD, "rejected": ASKED + BAD, "score_chosen": 3.0},
    ],
    ids=["explicit", "implicit", "ultrafeedback"],
)
def test_conversations_are_split_into_prompt_and_completions(row: dict[str, Any]) -> None:
    assert read(row) == {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}


@pytest.mark.parametrize("column", ["prompt", "input", "question", "instruction"])
@pytest.mark.parametrize("ends", ["", "_response"])
def test_prompts_and_completions_are_read_under_the_names_of_published_datasets(column: str, ends: str) -> None:
    row = {column: "hello", f"chosen{ends}": "six", f"rejected{ends}": "seven", "source": "web", "rating": [9, 8]}
    assert read(row) == {"prompt": "hello", "chosen": "six", "rejected": "seven"}
    labelled = {column: ASKED, "completion": GOOD, "label": True}
    assert read(labelled, "unpaired") == {"prompt": ASKED, "completion": GOOD, "label": True}


@pytest.mark.parametrize("column", ["chosen", "chosen_response"])
def test_a_table_of_pairs_has_completions_under_one_of_their_names(column: str) -> None:
    there = ["prompt", column, column.replace("chosen", "rejected"), "rating"]
    assert set(RowReader(format="preference").columns(there, "a.parquet")) == set(there[:3])


def test_a_system_message_comes_first_in_the_prompt() -> None:
    system = {"role": "system", "content": "be short"}
    texts = {"system": "be short", "input": "hello", "chosen": "six", "rejected": "seven"}
    assert read(texts)["prompt"] == "be short\n\nhello"
    assert read(texts | {"system": ""})["prompt"] == read(texts | {"system": None})["prompt"] == "hello"
    messages = {"system": "be short", "prompt": ASKED, "chosen": GOOD, "rejected": BAD}
    assert read(messages) == {"prompt": [system, *ASKED], "chosen": GOOD, "rejected": BAD}
    assert read(messages | {"prompt": [system, *ASKED], "system": "be long"})["prompt"] == [system, *ASKED]
    implicit = {"system": "be short", "chosen": ASKED + GOOD, "rejected": ASKED + BAD}
    assert read(implicit) == {"prompt": [system, *ASKED], "chosen": GOOD, "rejected": BAD}
    labelled = {"system": "be short", "prompt": "hello", "completion": "six", "label": False}
    assert read(labelled, "unpaired")["prompt"] == "be short\n\nhello"


def test_an_empty_input_beside_an_instruction_is_none() -> None:
    row = {"instruction": "hello", "input": "", "chosen": "six", "rejected": "seven"}
    assert read(row)["prompt"] == "hello"
    assert read(row | {"input": "hello"})["prompt"] == "hello"
    conversation = {"instruction": "hello", "input": "other", "chosen": ASKED + GOOD, "rejected": ASKED + BAD}
    with pytest.raises(DataError, match="the prompt may be"):
        read(row | {"input": "other"})
    assert read(conversation)["prompt"] == ASKED


def test_texts_begin_to_differ_before_the_space_of_a_word() -> None:
    row = {"chosen": "Human: hi Assistant: yes", "rejected": "Human: hi Assistant: no"}
    assert read(row) == {"prompt": "Human: hi Assistant:", "chosen": " yes", "rejected": " no"}


def test_implicit_prompts_are_those_of_trl() -> None:
    from trl.data_utils import extract_prompt

    for row in make_pairs():
        if "prompt" not in row or (isinstance(row["prompt"], str) and not isinstance(row["chosen"], str)):
            expected = extract_prompt({"chosen": row["chosen"], "rejected": row["rejected"]})
            assert read(row) == expected


@pytest.mark.parametrize(
    ("row_format", "row", "message"),
    [
        ("preference", {"prompt": "a", "chosen": "b"}, "there is no rejected"),
        ("preference", {"prompt": "a", "rejected": "b"}, "there is no chosen"),
        ("preference", {"prompt": "a", "chosen": " ", "rejected": "b"}, "chosen is empty"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
        ("preference", {"prompt": ASKED, "chosen": GOOD, "rejected": []}, "rejected is empty"),
        ("preference", {"prompt": ASKED, "chosen": GOOD, "rejected": ASKED}, "rejected is empty"),
        ("preference", {"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen is an int"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": BAD}, "not both texts or both lists"),
        ("preference", {"prompt": ASKED, "chosen": "b", "rejected": "c"}, "prompt and completion are not both"),
        ("preference", {"chosen": [{"role": "bot", "content": "a"}], "rejected": BAD}, "has the role 'bot'"),
        ("preference", {"query": "a", "chosen": "b", "rejected": "c"}, "there is no prompt"),
        ("preference", {"chosen": GOOD, "rejected": BAD}, "there is no prompt"),
        ("preference", {"prompt": "a", "chosen": GOOD, "rejected": BAD}, "there is no prompt"),
        ("preference", {"input": "a", "question": "b", "chosen": "c", "rejected": "d"}, "may be input or question"),
        ("preference", {"input": 3, "chosen": "b", "rejected": "c"}, "input is an int"),
        ("preference", {"system": 3, "input": "a", "chosen": "b", "rejected": "c"}, "content of system is an int"),
        ("preference", {"input": "a", "chosen": "b"}, "there is no rejected"),
        ("unpaired", {"prompt": "a", "completion": "b"}, "there is no label"),
        ("unpaired", {"completion": "b", "label": True}, "there is no prompt"),
        ("unpaired", {"prompt": "a", "label": True}, "there is no completion"),
        ("unpaired", {"prompt": "a", "completion": "b", "label": "good"}, "label is 'good'"),
        ("unpaired", {"prompt": "a", "completion": "", "label": False}, "completion is empty"),
    ],
)
def test_other_rows_are_refused_with_their_place(row_format: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        read(row, row_format)
    assert str(raised.value).startswith("rows.jsonl:1: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_the_answers_of_a_pair_are_trained_on(opened: Open, tokenizer: Path) -> None:
    history = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "six"}]
    samples = opened([{"prompt": history + ASKED, "chosen": GOOD, "rejected": BAD}])
    assert sequences_of(samples, 0, tokenizer) == [
        "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\nsix<|im_end|>\n"
        f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«{answer}<|im_end|>»"
        for answer in ("one", "two")
    ]


def test_texts_end_with_the_end_of_text_token(opened: Open, tokenizer: Path) -> None:
    samples = opened([{"prompt": "hello", "chosen": " one", "rejected": " two two"}])
    assert sequences_of(samples, 0, tokenizer) == ["hello« one</s>»", "hello« two two</s>»"]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_every_pair_is_whole_in_one_sample_once_an_epoch(opened: Open, packing: str) -> None:
    samples = opened(make_pairs(), packing=packing, overlong="drop")
    seen: list[int] = []
    for step in range(-(-len(samples) // 4)):
        for place in range(4):
            if int(samples.sample_ids(step, [place])[0]) >= len(samples):
                continue
            batch = samples.batch(step, [place])
            assert batch.sequences is not None
            counts = [
                int(((batch.sequences.numbers == number) & (batch.labels != IGNORE)).sum())
                for number in range(2 * len(batch.sequences.pieces))
            ]
            assert counts == batch.sequences.tokens.flatten().tolist()
            assert min(counts) > 0
            seen += batch.sequences.pieces.tolist()
    assert sorted(seen) == list(range(samples.piece_count))
    assert samples.piece_count + samples.overlong_documents == len(make_pairs())


def test_long_pairs_are_cut_at_their_ends_or_dropped_and_counted(opened: Open) -> None:
    rows = make_pairs()
    cut = opened(rows)
    dropped = opened(rows, overlong="drop")
    assert 0 < cut.overlong_documents < len(rows)
    assert cut.piece_count + cut.pieces_without_targets == len(rows)
    assert cut.piece_count > dropped.piece_count
    assert cut.length(0) <= 96
    assert "longer than 96 tokens truncated" in cut.summary()
    assert "longer than 96 tokens left out" in dropped.summary()
    assert "pairs" in cut.summary()


def test_a_mismatched_completion_is_that_of_the_row_before(opened: Open, tokenizer: Path) -> None:
    rows = [
        {"prompt": f"{prompt}:", "completion": f" {completion}", "label": label}
        for prompt, completion, label in (("one", "two", True), ("three", "four", False), ("five", "six", True))
    ]
    samples = opened(rows, has_mismatched=True, format="unpaired", packing="padded")
    texts = {tuple(sequences_of(samples, index, tokenizer)) for index in range(3)}
    assert texts == {
        ("one:« two</s>»", "one:« six</s>»"),
        ("three:« four</s>»", "three:« two</s>»"),
        ("five:« six</s>»", "five:« four</s>»"),
    }


def test_labels_of_completions_are_kept(opened: Open) -> None:
    rows = make_completions()
    samples = opened(rows, format="unpaired", seq_len=128)
    desirable = {}
    for step in range(len(samples) // 4 + 1):
        sequences = samples.batch(step, range(4)).sequences
        assert sequences is not None
        desirable.update(zip(sequences.pieces.tolist(), sequences.is_desirable.tolist(), strict=True))
    assert [desirable[number] for number in range(len(rows))] == [row["label"] for row in rows]


def test_pairs_and_completions_are_counted_as_what_they_are(opened: Open) -> None:
    row = {"prompt": "one:", "completion": " two", "label": False}
    fields = {"format": "unpaired", "has_mismatched": True}
    assert "; 1 completion: 0 longer" in opened([row], **fields).summary()
    assert "; 2 completions: 0 longer" in opened([row, row | {"prompt": "two:"}], **fields).summary()
    assert "; 1 pair: 0 longer" in opened([{"prompt": "one:", "chosen": " two", "rejected": " six"}]).summary()


def test_the_loss_is_a_mean_over_pairs_and_tokens_are_counted_beside_it(opened: Open) -> None:
    samples = opened(make_pairs())
    batch = samples.batch(0, range(4))
    assert batch.sequences is not None
    assert samples.loss_terms(0, range(4)) == len(batch.sequences.pieces)
    assert samples.target_count(0, range(4)) == int((batch.labels != IGNORE).sum())
    chosen = int(batch.sequences.tokens[:, 0].sum())
    assert batch.sequences.chosen_token_share == len(batch.sequences.pieces) / chosen


def test_a_tokenizer_of_these_texts_is_trained_on_them_and_not_on_the_fields_of_their_rows(
    opened: Open, tmp_path: Path
) -> None:
    rows = [{"prompt": f'ask {i}"\n:', "chosen": f" yes {i}", "rejected": f" nein {i}"} for i in range(50)]
    samples = opened(rows, tokenizer="bpe-300")
    loaded = AutoTokenizer.from_pretrained(next(tmp_path.glob("cache/*/tokenizer")))
    assert not any("rejected" in token or "chosen" in token for token in loaded.get_vocab())
    _, labels = samples.tokens(0)
    trained = labels[labels != IGNORE]
    answers = loaded.decode(trained).split("<|endoftext|>")
    assert all(answer.split()[0] in ("yes", "nein") for answer in answers if answer)
    assert len(answers) > 2


def test_messages_need_a_tokenizer_with_a_template(opened: Open) -> None:
    with pytest.raises(DataError, match="is a list of messages, and the tokenizer has no chat template"):
        opened([{"prompt": ASKED, "chosen": GOOD, "rejected": BAD}], tokenizer="bpe-300")
