"""Recipes from set-ups of the Trainer, axolotl and LLaMA-Factory, and what they say is not the same."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.convert.setups.recipe_of_setup import WrittenRecipe, recipe_of_setup
from toolkit.errors import ToolkitError

DATA = ("data.source=a.txt", "data.seq_len=64")


def recipe_of(tmp_path: Path, arguments: dict[str, Any], *overrides: str, **options: Any) -> WrittenRecipe:
    file = tmp_path / "args.json"
    file.write_text(json.dumps(arguments))
    return recipe_of_setup(file, overrides=overrides, **({"model": "org/name", "gpus": 2} | options))


def refusal(tmp_path: Path, arguments: dict[str, Any], *overrides: str, **options: Any) -> str:
    with pytest.raises(ToolkitError) as caught:
        recipe_of(tmp_path, arguments, *overrides, **options)
    return str(caught.value)


def test_the_deepspeed_json_decides_where_it_does_not_say_auto(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.7,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        "aio": {},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    settings = {"per_device_train_batch_size": 3, "max_steps": 9, "deepspeed": "ds.json"}
    done = recipe_of(tmp_path, settings, *DATA)
    recipe = done.recipe
    assert (recipe.parallel.zero_stage, recipe.parallel.offload_optimizer, recipe.precision) == (3, "cpu", "bf16")
    assert (recipe.batch.global_batch_size, recipe.train.grad_clip) == (6, 0.7)
    assert (recipe.schedule.name, recipe.schedule.warmup_steps) == ("constant_with_warmup", 4)
    assert any("aio" in note for note in done.notes)
    assert "contradict" in refusal(tmp_path, settings | {"max_grad_norm": 1.0}, *DATA)


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ({"train_batch_size": 64}, {}, "train_batch_size=64 of the DeepSpeed JSON with per_device_train_batch_size x"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
            {"adam_beta2": 0.999},
            "betas=0.95 of the DeepSpeed JSON with adam_beta2=0.999",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
            {"warmup_steps": 3},
            "warmup_num_steps=7 of the DeepSpeed JSON with warmup_steps=3",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}},
            {},
            "total_num_steps=9 of the DeepSpeed JSON with max_steps=20",
        ),
        ({"fp16": {"enabled": True}}, {"bf16": True}, "fp16.enabled=True of the DeepSpeed JSON with bf16=True"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16.enabled=False of the DeepSpeed JSON with bf16=True"),
    ],
)
def test_a_deepspeed_json_that_contradicts_an_argument_is_refused(
    config: dict[str, Any], arguments: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    settings = {"per_device_train_batch_size": 1, "max_steps": 20, "deepspeed": config}
    problem = refusal(tmp_path, settings | arguments, *DATA)
    assert expected in problem
    assert "\n" not in problem


def test_a_deepspeed_json_that_agrees_with_the_arguments_is_translated(tmp_path: Path) -> None:
    scheduler = {"warmup_num_steps": 3, "total_num_steps": 20, "warmup_min_lr": 1e-5}
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupDecayLR", "params": scheduler},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    settings = {"per_device_train_batch_size": 1, "max_steps": 20, "adam_beta2": 0.95, "bf16": True, "fp16": False}
    done = recipe_of(tmp_path, settings | {"warmup_steps": 0.15, "deepspeed": config}, *DATA)
    recipe = done.recipe
    assert (recipe.batch.global_batch_size, recipe.optimizer.betas, recipe.precision) == (2, (0.9, 0.95), "bf16")
    assert (recipe.schedule.name, recipe.schedule.warmup_steps) == ("linear", 3)
    assert any("warmup_min_lr=1e-05" in note for note in done.notes)


def test_fsdp_becomes_the_engine_or_the_stage_that_shards_the_same(tmp_path: Path) -> None:
    settings = {"max_steps": 9, "fsdp": True, "fsdp_config": {"activation_checkpointing": True}}
    recipe = recipe_of(tmp_path, settings, *DATA).recipe
    assert (recipe.train.engine, recipe.parallel.recompute) == ("fsdp", "full")
    keeps = recipe_of(tmp_path, settings | {"fsdp_config": {"reshard_after_forward": False}}, *DATA).recipe
    assert (keeps.train.engine, keeps.parallel.zero_stage) == ("deepspeed", 2)


def test_axolotls_yaml_becomes_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    text = """
        base_model: org/name
        datasets: [{path: chats.jsonl, type: chat_template}]
        val_set_size: 0.05
        sequence_len: 2048
        sample_packing: true
        adapter: lora
        lora_r: 16
        lora_alpha: 32
        lora_target_linear: true
        micro_batch_size: 2
        gradient_accumulation_steps: 4
        max_steps: 100
        optimizer: adamw_bnb_8bit
        learning_rate: 2e-4
        bf16: auto
        flash_attention: true
        special_tokens: {pad_token: <pad>}
        wandb_project: x
    """
    file.write_text(text)
    done = recipe_of_setup(file, gpus=2)
    recipe = done.recipe
    assert (recipe.data.source, recipe.data.format, recipe.data.seq_len) == ("chats.jsonl", "chat", 2048)
    assert recipe.model.lora is not None
    assert (recipe.model.lora.r, recipe.model.lora.alpha, recipe.model.lora.targets) == (16, 32, ("all-linear",))
    assert (recipe.batch.global_batch_size, recipe.optimizer.lr, recipe.precision) == (16, 2e-4, "bf16")
    assert (recipe.schedule.name, recipe.optimizer.name, recipe.data.eval_fraction) == ("cosine", "adamw8bit", 0.05)
    assert [note.partition("=")[0] for note in done.notes[1:]] == ["save_strategy", "special_tokens"]


def axolotl(tmp_path: Path, settings: dict[str, Any], *overrides: str, gpus: int = 2) -> WrittenRecipe:
    """The recipe of a small YAML of axolotl, with other settings."""
    whole = {
        "base_model": "org/name",
        "datasets": [{"path": "c.jsonl", "type": "chat_template"}],
        "sequence_len": 64,
        "learning_rate": 1e-4,
        "max_steps": 10,
        "save_strategy": "no",
    }
    (tmp_path / "axolotl.yaml").write_text(yaml.safe_dump(whole | settings))
    return recipe_of_setup(tmp_path / "axolotl.yaml", gpus=gpus, overrides=overrides)


@pytest.mark.parametrize(("kind", "expected"), [("chat_template", "chat"), ("alpaca", "prompt_completion")])
def test_the_format_of_axolotls_dataset_stays_with_a_source_of_the_user(
    kind: str, expected: str, tmp_path: Path
) -> None:
    done = axolotl(tmp_path, {"datasets": [{"path": "c.jsonl", "type": kind}]}, "data.source=x.jsonl")
    assert (done.recipe.data.source, done.recipe.data.format) == ("x.jsonl", expected)
    assert any("type=alpaca" in note for note in done.notes) == (kind == "alpaca")


def test_keys_of_axolotls_dataset_are_read_or_noted(tmp_path: Path) -> None:
    dataset = {"path": "c.jsonl", "type": "chat_template", "ds_type": "json"}
    mappings = {"role": "from", "content": "value"}
    read = {"field_messages": "conversations", "message_property_mappings": mappings, "train_on_eos": "turn"}
    assert axolotl(tmp_path, {"datasets": [dataset | read]}).notes[1:] == ()
    other = {"field_messages": "talk", "message_property_mappings": {"role": "who"}, "train_on_eos": "last"}
    notes = axolotl(tmp_path, {"datasets": [dataset | other]}).notes[1:]
    assert [note.partition("=")[0] for note in notes] == [f"datasets: {name}" for name in other]
    with pytest.raises(ToolkitError, match="roles_to_train=user: a recipe trains on the assistant's turns"):
        axolotl(tmp_path, {"datasets": [dataset | {"roles_to_train": ["user"]}]})


def test_what_axolotls_yaml_does_not_say_is_axolotls_default(tmp_path: Path) -> None:
    recipe = axolotl(tmp_path, {"max_steps": 2000}).recipe
    assert (recipe.batch.micro_batch_size, recipe.batch.global_batch_size, recipe.precision) == (1, 2, "bf16")
    assert (recipe.schedule.name, recipe.schedule.warmup_steps, recipe.log.every) == ("cosine", 60, 10)
    assert axolotl(tmp_path, {"max_steps": 5000}).recipe.schedule.warmup_steps == 100
    assert axolotl(tmp_path, {"max_steps": 50, "warmup_ratio": 0}).recipe.schedule.warmup_steps == 0
    assert axolotl(tmp_path, {"max_steps": 50}).recipe.schedule.warmup_steps == 2
    assert axolotl(tmp_path, {"bf16": False}).recipe.precision == "fp32"
    assert axolotl(tmp_path, {"fp16": True}).recipe.precision == "fp16"
    sharded = {"deepspeed": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}}
    assert axolotl(tmp_path, sharded).recipe.precision == "bf16"
    with pytest.raises(ToolkitError, match=r"train\.steps=N, 1 x the samples"):
        axolotl(tmp_path, {"max_steps": None})


def test_axolotl_saves_each_epoch_unless_its_yaml_says_otherwise(tmp_path: Path) -> None:
    said = "save_strategy=epoch has no counterpart: give checkpoint.every=STEPS"
    silent: dict[str, Any] = {"save_strategy": None}
    done = axolotl(tmp_path, silent)
    assert done.recipe.checkpoint.every == 0
    assert said in done.notes
    done = axolotl(tmp_path, silent, "checkpoint.every=5")
    assert (done.recipe.checkpoint.every, done.recipe.checkpoint.keep) == (5, 4)
    assert said not in done.notes
    done = axolotl(tmp_path, silent | {"save_steps": 5, "save_total_limit": 2})
    assert (done.recipe.checkpoint.every, done.recipe.checkpoint.keep) == (5, 2)
    assert said not in done.notes
    done = axolotl(tmp_path, silent | {"saves_per_epoch": 2})
    assert done.recipe.checkpoint.every == 0
    assert [note for note in done.notes if "save" in note] == [
        "saves_per_epoch=2 has no counterpart: there are no epochs: give checkpoint.every=STEPS"
    ]


@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_a_limit_of_checkpoints_that_are_not_saved_by_steps_is_left_out(tmp_path: Path, strategy: str) -> None:
    arguments = {"max_steps": 10, "save_strategy": strategy, "save_total_limit": 2}
    assert recipe_of(tmp_path, arguments, *DATA).recipe.checkpoint.every == 0
    assert recipe_of(tmp_path, arguments, *DATA, "checkpoint.every=5").recipe.checkpoint.keep == 2


def test_axolotls_pure_bf16_keeps_weights_in_fp32_too_and_says_so(tmp_path: Path) -> None:
    done = axolotl(tmp_path, {"bf16": "full"})
    assert done.recipe.precision == "bf16"
    (note,) = [note for note in done.notes if "bf16" in note]
    assert note == "pure_bf16=True has no counterpart: the optimizer keeps fp32 weights beside those of bf16"
    assert not any("bf16" in note for note in axolotl(tmp_path, {"bf16": True}).notes)


def test_axolotls_parallelism_becomes_axes_and_replicas(tmp_path: Path) -> None:
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 2, "dp_shard_size": 2}
    for sharding in ({}, {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}):
        recipe = axolotl(tmp_path, sizes | sharding, gpus=8).recipe
        parallel = recipe.parallel
        assert (parallel.tp, parallel.cp, parallel.zero_stage, recipe.train.engine) == (2, 2, 3, "deepspeed")
        assert recipe.batch.global_batch_size == 2


def test_axolotls_fsdp_needs_no_more_than_its_config(tmp_path: Path) -> None:
    config = {"reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    done = axolotl(tmp_path, {"fsdp_version": 2, "fsdp_config": config, "dp_shard_size": 2})
    assert (done.recipe.train.engine, done.notes[1:]) == ("fsdp", ())
    keeps = axolotl(tmp_path, {"fsdp_config": config | {"reshard_after_forward": False}, "dp_shard_size": 2})
    assert (keeps.recipe.train.engine, keeps.recipe.parallel.zero_stage) == ("deepspeed", 2)


def test_axolotls_offloaded_checkpointing_and_minimum_of_a_cosine_become_fields(tmp_path: Path) -> None:
    recipe = axolotl(tmp_path, {"gradient_checkpointing": "offload", "cosine_min_lr_ratio": 0.1}).recipe
    assert (recipe.parallel.recompute, recipe.parallel.offload_activations) == ("full", True)
    assert (recipe.schedule.name, recipe.schedule.min_lr_ratio) == ("cosine_with_min_lr", 0.1)
    assert not axolotl(tmp_path, {"gradient_checkpointing": True}).recipe.parallel.offload_activations
    with pytest.raises(ToolkitError, match=r"cosine_constant_lr_ratio=0\.8: no schedule of a recipe is the same"):
        axolotl(tmp_path, {"cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0.8})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rl": "dpo", "rl_beta": 0.3, "dpo_label_smoothing": 0.1}, {"beta": 0.3, "label_smoothing": 0.1}),
        ({"rl": "ipo", "trl": {"beta": 0.2}}, {"beta": 0.2}),
        ({"rl": "orpo", "orpo_alpha": 0.4}, {"beta": 0.4}),
        ({"rl": "simpo", "simpo_gamma": 0.7}, {"beta": 0.1, "gamma": 0.7, "nll_weight": 1.0}),
        ({"rl": "kto", "kto_desirable_weight": 2.0}, {"desirable_weight": 2.0, "undesirable_weight": 1.0}),
    ],
)
def test_axolotls_rl_becomes_an_objective(settings: dict[str, Any], expected: dict[str, float], tmp_path: Path) -> None:
    recipe = axolotl(tmp_path, settings).recipe
    assert recipe.train.objective.name == settings["rl"]
    assert {name: getattr(recipe.train.objective, name) for name in expected} == expected
    assert recipe.data.format == ("unpaired" if settings["rl"] == "kto" else "preference")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rl": "grpo"}, "rl=grpo: a recipe has dpo, ipo, kto, orpo, simpo"),
        ({"rl": "dpo", "datasets": [{"path": "c", "type": "alpaca"}]}, "datasets type=alpaca: rl=dpo compares"),
        ({"rl": "dpo", "rpo_alpha": 1.0}, "rpo_alpha=1.0: the dpo of a recipe has no such term"),
    ],
)
def test_axolotls_rl_that_no_recipe_trains_is_refused(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError) as caught:
        axolotl(tmp_path, settings)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_llama_factorys_yaml_becomes_a_recipe(tmp_path: Path) -> None:
    settings = {
        "model_name_or_path": "org/name",
        "stage": "dpo",
        "finetuning_type": "lora",
        "lora_target": "all",
        "pref_beta": 0.2,
        "pref_loss": "sigmoid",
        "dataset": "pairs",
        "template": "llama3",
        "cutoff_len": 1024,
        "max_steps": 10,
        "per_device_train_batch_size": 1,
        "learning_rate": "5.0e-6",
    }
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ToolkitError, match=r"dataset_info\.json has for dataset=pairs"):
        recipe_of_setup(tmp_path / "dpo.yaml", gpus=4)
    done = recipe_of_setup(tmp_path / "dpo.yaml", gpus=4, overrides=["data.source=pairs.jsonl"])
    recipe = done.recipe
    assert (recipe.train.objective.name, recipe.train.objective.beta, recipe.data.format) == ("dpo", 0.2, "preference")
    assert recipe.model.lora is not None
    assert (recipe.model.lora.r, recipe.model.lora.alpha, recipe.optimizer.lr) == (8, 16, 5e-6)
    assert any(note.startswith("template=llama3") for note in done.notes)


def llama_factory(tmp_path: Path, settings: dict[str, Any]) -> WrittenRecipe:
    """The recipe of a small YAML of LLaMA-Factory, with other settings."""
    whole = {
        "model_name_or_path": "org/name",
        "finetuning_type": "full",
        "cutoff_len": 64,
        "learning_rate": 1e-4,
        "max_steps": 10,
    }
    (tmp_path / "factory.yaml").write_text(yaml.safe_dump(whole | settings))
    return recipe_of_setup(tmp_path / "factory.yaml", gpus=2, overrides=["data.source=x.jsonl"])


def test_llama_factorys_precision_and_count_of_validation_rows_are_kept_or_noted(tmp_path: Path) -> None:
    done = llama_factory(tmp_path, {"pure_bf16": True, "val_size": 100})
    assert done.recipe.precision == "bf16"
    assert any(note.startswith("val_size=100 has no counterpart") for note in done.notes)
    assert any(note.startswith("pure_bf16=True has no counterpart") for note in done.notes)


def test_options_of_llama_factorys_objectives_become_fields(tmp_path: Path) -> None:
    smoothed = llama_factory(tmp_path, {"stage": "dpo", "dpo_label_smoothing": 0.1}).recipe.train.objective
    assert (smoothed.name, smoothed.label_smoothing) == ("dpo", 0.1)
    settings = {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.7, "pref_ftx": 0.2}
    simpo = llama_factory(tmp_path, settings).recipe.train.objective
    assert (simpo.name, simpo.gamma, simpo.nll_weight) == ("simpo", 0.7, 0.2)
    weighted = llama_factory(tmp_path, {"stage": "kto", "kto_chosen_weight": 2.0}).recipe.train.objective
    assert (weighted.name, weighted.desirable_weight, weighted.undesirable_weight) == ("kto", 2.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_galore": True}, "use_galore=True: this optimizer is not one of a recipe"),
        ({"use_badam": True}, "use_badam=True: this optimizer is not one of a recipe"),
        ({"use_apollo": True}, "use_apollo=True: this optimizer is not one of a recipe"),
        ({"finetuning_type": "lora", "quantization_bit": 8}, "quantization_bit=8: the frozen weights"),
        ({"stage": "dpo", "pref_ftx": 0.1}, "pref_ftx=0.1: a recipe has no token loss beside dpo"),
        ({"stage": "dpo", "pref_loss": "ipo", "dpo_label_smoothing": 0.1}, "for stage dpo with pref_loss sigmoid"),
    ],
)
def test_what_no_recipe_has_of_llama_factory_is_refused(
    settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError) as caught:
        llama_factory(tmp_path, settings)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"seed": 1}, "train.steps=N"),
        ({"max_steps": 5, "learning_rate": "x"}, "learning_rate=x: a number of at least 0 is needed"),
        ({"max_steps": 5, "bf16": True, "fp16": True}, "fp16 is true as well"),
        ({"max_steps": 5, "optim": "galore_adamw"}, "optim=galore_adamw: no optimizer"),
        ({"max_steps": 5, "lr_scheduler_type": "greedy"}, "lr_scheduler_type=greedy: no schedule"),
        (
            {"max_steps": 5, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}},
            "lr_scheduler_kwargs.num_cycles=1: the cosine of a recipe has 0.5",
        ),
        (
            {"max_steps": 5, "lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 100}},
            "lr_scheduler_kwargs.timescale=100: inverse_sqrt has none in a recipe",
        ),
        ({"max_steps": 5, "deepspeed": "gone.json"}, "deepspeed=gone.json: there is no such file here"),
        ({"max_steps": 5, "per_device_train_batch_size": 1.5}, "a whole number is needed"),
        ({"max_steps": 5, "weight_decay": -1}, "weight_decay=-1: a number of at least 0 is needed"),
    ],
)
def test_a_set_up_that_cannot_be_translated_is_refused_in_one_line(
    arguments: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    problem = refusal(tmp_path, arguments, *DATA)
    assert expected in problem
    assert "\n" not in problem


def test_a_pickle_of_arguments_runs_nothing(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"per_device_train_batch_size": 1, "max_steps": Harmful()}))
    with pytest.raises(ToolkitError, match=r"train\.steps=N"):
        recipe_of_setup(tmp_path / "training_args.bin", model="org/name", gpus=1, overrides=DATA)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "training_args.bin").write_bytes(b"damaged")
    with pytest.raises(ToolkitError, match="not the arguments that a Trainer saved"):
        recipe_of_setup(tmp_path / "training_args.bin")
