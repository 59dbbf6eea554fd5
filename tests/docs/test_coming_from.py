"""Every command of docs/coming-from.md is run, on checkpoints of the programs and in the places that the page names."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_documents import ROOT, commands
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from toolkit.cli.main import main
from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe
from toolkit.convert.export_state import export_state
from toolkit.convert.import_run import import_run
from toolkit.data.tokens.corpora import prepare_all
from toolkit.model_init.build_model import load_config

COMMANDS = [shlex.join(words) for words in commands(ROOT / "docs" / "coming-from.md")]
STEP = 3


@pytest.fixture(scope="module")
def places(make_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page names: a small recipe, model and text, and checkpoints of five programs."""
    folder = tmp_path_factory.mktemp("coming")
    recipe = make_recipe(train__steps=2 * STEP, overrides__vocab_size=321)
    (folder / "recipes").mkdir()
    (folder / "recipes" / "demo.yaml").write_text(dump_recipe(recipe))
    (folder / "text.jsonl").write_text(json.dumps({"text": "a b c " * 200}) + "\n")
    config = load_config(recipe.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    arguments = TrainingArguments(
        str(folder / "output"),
        per_device_train_batch_size=2,
        max_steps=STEP,
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    ids = torch.arange(32 * STEP).remainder(300).view(-1, 16)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    saved = folder / "output" / "checkpoint-500"
    trainer.save_model(str(saved))
    trainer._save_optimizer_and_scheduler(str(saved))
    trainer.state.save_to_json(str(saved / "trainer_state.json"))
    torch.save(arguments, folder / "output" / "training_args.bin")
    model_folder = folder / "models" / "SmolLM2-135M"
    model.save_pretrained(model_folder)
    prepare_all(recipe.data, progress=False).tokenizer().save_pretrained(model_folder)
    import_run(saved, folder / "imported", recipe)
    checkpoint = folder / "imported" / f"step-{STEP:08d}"
    for form, place in (
        ("megatron", "checkpoints/iter_0001000"),
        ("universal", "global_step500"),
        ("dcp", "outputs/checkpoint/step-1000"),
    ):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        export_state(checkpoint, folder / place, form=form)
    (folder / "args.json").write_text(json.dumps({"max_steps": 10, "learning_rate": 1e-4}))
    axolotl = {
        "base_model": str(model_folder),
        "datasets": [{"path": "text.jsonl", "type": "completion"}],
        "sequence_len": 32,
        "micro_batch_size": 1,
        "optimizer": "adamw_torch",
        "learning_rate": 1e-4,
    }
    (folder / "axolotl.yml").write_text(json.dumps(axolotl))
    (folder / "ds_configs").symlink_to(ROOT / "ds_configs")
    return folder


def test_the_commands_of_the_page_run_one_after_the_other(
    places: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(places))
    monkeypatch.chdir(places)
    assert len(COMMANDS) > 10
    for command in COMMANDS:
        _, *words = shlex.split(command.replace("~", str(places)))
        for name in ("runs", "mine.yml"):
            if (places / name).exists() and ("import" in words or "recipe" in words[:1]):
                (places / name).rename(tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}")
        with pytest.raises(SystemExit) as stopped:
            main(words)
        problems = capfd.readouterr().err
        # What lint finds is for the reader; it exits with 1 then.
        assert stopped.value.code == 0 or (words[0] == "lint" and stopped.value.code == 1), f"{command}\n{problems}"
