"""`dstk sample`: the text of transformers' own generation, with the prompt rendered as the tokenizer asks."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, pipeline

from tests.support.small_chats import write_tokenizer
from toolkit.cli.answer_checks import read_checks
from toolkit.cli.sample import GenerativeModel, demo
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
        initializer_range=0.5,  # logits far apart: no rounding decides a token
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_an_answer_is_what_the_pipeline_of_transformers_answers(folder):
    theirs = pipeline("text-generation", model=str(folder), tokenizer=str(folder))
    turns = [{"role": "user", "content": "What is a pipeline bubble?"}]
    wanted = theirs(turns, max_new_tokens=12, do_sample=False)[0]["generated_text"][-1]["content"]
    assert wanted
    answer = GenerativeModel(str(folder)).answer("What is a pipeline bubble?", tokens=12, temperature=0)
    assert answer == wanted.strip()


def test_questions_of_other_lengths_in_a_batch_do_not_change_an_answer(folder):
    model = GenerativeModel(str(folder))
    questions = ["Why?", "What is a pipeline bubble?", "How do I resume my run on twice as many GPUs as before?"]
    answers = [model.answer(question, tokens=12, temperature=0) for question in questions]
    assert len(set(answers)) == len(questions)
    assert model.answers(questions, tokens=12, temperature=0) == answers


def test_a_text_is_continued(folder):
    text = GenerativeModel(str(folder)).continue_text("The pipeline", tokens=4, temperature=0)
    assert text.startswith("The pipeline")
    assert len(text) > len("The pipeline")


@pytest.mark.parametrize(
    ("option", "taught"),
    [
        ("--chat", "taught: 0 of 17 are right after training (0 before); 14 needed: FAILED"),
        pytest.param(
            "--dpo",
            "taught: 0 of 12 are right after training (0 before); 10 needed: FAILED",
            marks=pytest.mark.whole,
        ),
    ],
)
def test_a_demo_with_questions_asks_before_and_after(option, taught, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("toolkit.cli.sample._ANSWER_TOKENS", 4)
    changes = ("train.steps=2", "schedule.warmup_steps=1", "data.workers=1", "train.engine=reference")
    assert demo.main([*changes, "--nproc", "1", option, str(folder)], standalone_mode=False) == 1
    printed = capfd.readouterr().out
    name = f"demo-{option.removeprefix('--')}"
    checks = read_checks(find_recipes() / f"{name}-checks.jsonl")
    assert printed.count("wrong → wrong") == len(checks)
    assert taught in printed
    assert "kept: none of 12 answers was right before training" in printed
    assert printed.count("rewards: margins of pairs") == (option == "--dpo")
    run_dir = tmp_path / "runs" / name
    assert (run_dir / "model" / "adapter_model.safetensors").is_file()
    answers = [json.loads(line) for line in (run_dir / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["question"] for answer in answers] == [check.question for check in checks]
    for when, model in (("before", folder), ("after", run_dir)):
        assert answers[0][when] == GenerativeModel(str(model)).answer(checks[0].question, tokens=4, temperature=0)


def test_the_demo_samples_the_run_directory_of_an_override(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    changes = ("run_dir=elsewhere", "train.steps=1", "schedule.warmup_steps=0", "train.engine=reference")
    assert demo.main([*changes, "--nproc", "1"], standalone_mode=False) == 0
    assert (tmp_path / "elsewhere" / "model" / "config.json").is_file()
    assert "dstk sample elsewhere " in capfd.readouterr().out
    assert not (tmp_path / "runs").exists()
