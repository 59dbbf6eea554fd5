"""What is exported, as the programs that load models read it: transformers' pipelines and server, and vLLM.

vLLM itself needs a GPU. It reads the class from `architectures`, builds it by `config.json`, gives it the tensors by
their names, takes the head of a tied model from its embedding, and stops where generation_config.json says. lm_eval
itself is run, where it is installed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.config.recipe import Recipe
from toolkit.convert.export_model import export_checkpoint
from toolkit.convert.import_run import import_run
from toolkit.data.tokens.corpora import prepare_all
from toolkit.model_init.build_model import load_config

MODELS = {
    "gpt2": {
        "name_or_path": "gpt2-tiny",
        "overrides": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320},
    },
    "llama": {
        "name_or_path": "llama-tiny",
        "overrides": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 12, "intermediate_size": 64, "vocab_size": 320, "tie_word_embeddings": True},
    },
}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def exported(make_recipe: Callable[..., Recipe], folder: Path, name: str) -> Path:
    """A run that came from FSDP, exported to bf16; its tokenizer has a chat template."""
    recipe = make_recipe(model=MODELS[name], train__steps=9)
    model = AutoModelForCausalLM.from_config(load_config(recipe.model), dtype=torch.float32)
    source = folder / "checkpoint-5"
    source.mkdir()
    values = dict(model.named_parameters())
    states = {
        key: {"step": torch.tensor(5.0), "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value)}
        for key, value in values.items()
    }
    torch.save({key: value.detach() for key, value in values.items()}, source / "pytorch_model_fsdp.bin")
    torch.save({"state": states, "param_groups": [{"lr": 1e-3}]}, source / "optimizer.bin")
    tokenizer = prepare_all(recipe.data, progress=False).tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    recipe = recipe.changed({"data": {"tokenizer": str(folder / "tokenizer")}})
    import_run(source, folder / "run", recipe)
    export_checkpoint(folder / "run", folder / "exported", dtype=torch.bfloat16)
    return folder / "exported"


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_has_what_servers_read(make_recipe: Callable[..., Recipe], tmp_path: Path, name: str) -> None:
    place = exported(make_recipe, tmp_path, name)
    config = json.loads((place / "config.json").read_text())
    (architecture,) = config["architectures"]
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]] == architecture
    assert config["dtype"] == "bfloat16"
    with safe_open(place / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    model = AutoModelForCausalLM.from_pretrained(place)
    assert model.dtype == torch.bfloat16
    assert names <= set(model.state_dict())
    assert {key for key, _ in model.named_parameters()} == names  # of a tied model without the head
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(place)
    assert len(tokenizer) <= config["vocab_size"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "user: a\n"
    GenerationConfig.from_pretrained(place)
    generate = pipeline("text-generation", model=str(place), device="cpu")
    (answer,) = generate("def ", max_new_tokens=3, do_sample=False)
    assert answer["generated_text"].startswith("def ")


@pytest.mark.whole
def test_lm_eval_scores_an_exported_model(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    place = exported(make_recipe, tmp_path, "llama")
    questions = [
        {"question": "def", "choices": [" main()", " 0 0 0 0"], "answer": 0},
        {"question": "import", "choices": [" ...", " os"], "answer": 1},
        {"question": "for x in", "choices": [" range(3)", " break"], "answer": 0},
    ]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "three_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "questions.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tasks / "three_questions.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={place},dtype=float32"]
    command += ["--tasks", "three_questions", "--include_path", str(tasks), "--device", "cpu"]
    command += ["--log_samples", "--output_path", str(tmp_path / "scores")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-2000:]
    (samples,) = (tmp_path / "scores").rglob("samples_three_questions_*.jsonl")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place)
    scored = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(scored) == len(questions)
    for sample in scored:
        question = sample["doc"]
        for choice, ((score, _),) in zip(question["choices"], sample["resps"], strict=True):
            expected = log_probability(model, tokenizer, question["question"], choice)
            assert float(score) == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def log_probability(model: Any, tokenizer: Any, question: str, answer: str) -> float:
    """Sum of the log-probabilities of the tokens that `answer` adds to `question`."""
    start = len(tokenizer(question)["input_ids"])
    ids = torch.tensor(tokenizer(question + answer)["input_ids"])
    logits = model(ids[None]).logits[0]
    every = torch.log_softmax(logits, dim=-1)[:-1].gather(1, ids[1:, None])
    return float(every[start - 1 :].sum())
