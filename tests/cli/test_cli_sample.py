"""`dstk sample`: the text of transformers' own generation, with the prompt rendered as the tokenizer asks."""

import json

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, pipeline

from tests.support.small_chats import write_tokenizer
from toolkit.cli.sample import QUESTIONS, GenerativeModel, demo
from toolkit.config.gallery import find_recipes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_an_answer_is_what_the_pipeline_of_transformers_answers(folder):
    theirs = pipeline("text-generation", model=str(folder), tokenizer=str(folder))
    turns = [{"role": "user", "content": "What is a pipeline bubble?"}]
    wanted = theirs(turns, max_new_tokens=12, do_sample=False)[0]["generated_text"][-1]["content"]
    assert wanted
    answer = GenerativeModel(str(folder)).answer("What is a pipeline bubble?", tokens=12, temperature=0)
    assert answer == wanted.strip()


def test_a_text_is_continued(folder):
    text = GenerativeModel(str(folder)).continue_text("The pipeline", tokens=4, temperature=0)
    assert text.startswith("The pipeline")
    assert len(text) > len("The pipeline")


def test_the_chat_demo_asks_before_and_after(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    changes = ("train.steps=2", "schedule.warmup_steps=1", "data.workers=1", "train.engine=reference")
    assert demo.main([*changes, "--nproc", "1", "--chat", str(folder)], standalone_mode=False) == 0
    printed = capfd.readouterr().out
    assert all(question in printed for question in QUESTIONS)
    assert printed.count("before") == printed.count("after") == len(QUESTIONS)
    assert (tmp_path / "runs" / "demo-chat" / "model" / "adapter_model.safetensors").is_file()


def test_no_question_of_the_chat_demo_is_in_its_data():
    rows = (find_recipes() / "demo-chat.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [turn["content"] for row in rows for turn in json.loads(row)["messages"]]
    assert len(rows) == 168
    assert not set(QUESTIONS) & {*turns}
