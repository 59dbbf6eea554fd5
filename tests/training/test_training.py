"""recipes/train.py from the first check to the last file, on forked ranks."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nonempty import nonempty
from refusals import refused
from safetensors.torch import load_file, save_file
from train_script import SCRIPT

from toolkit.config import load_recipe
from toolkit.errors import ModelError, RunError, ToolkitError
from toolkit.parallel.chunked_loss import LossInHead

Train = Callable[..., str]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_all_its_files(train: Train, tmp_path: Path) -> None:
    train("run_dir=here", world_size=2)
    found = {path.name for path in (tmp_path / "here").iterdir()}
    assert found == {"recipe.yaml", "ds_config.json", "environment.json", "metrics.jsonl", "loss.png", "model"}


def test_metrics_have_one_object_a_step(train: Train, tmp_path: Path) -> None:
    train("run_dir=here")
    steps = metrics(tmp_path / "here")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0].keys() == {"step", "loss", "lr", "grad_norm", "tokens", "seconds", "memory_bytes", "batch"}


def test_the_resolved_recipe_runs_again_to_the_same_curve(train: Train, tmp_path: Path) -> None:
    train("run_dir=one", "train.seed=5")
    train("run_dir=two", "train.seed=5")
    again = load_recipe(tmp_path / "one" / "recipe.yaml")
    assert again.train.seed == 5
    assert [s["loss"] for s in metrics(tmp_path / "one")] == [s["loss"] for s in metrics(tmp_path / "two")]


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.daily)])
def test_the_trained_model_loads_in_transformers_with_the_trained_loss(
    train: Train, tmp_path: Path, stage: int
) -> None:
    train("run_dir=here", f"parallel.zero_stage={stage}", "train.eval_every=4", "schedule.warmup_steps=0", world_size=2)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "here" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "here" / "model")
    ids = tokenizer("laba todi miko rusu neve", return_tensors="pt").input_ids
    loss = model(input_ids=ids, labels=ids).loss.item()
    fresh = type(model)(model.config)(input_ids=ids, labels=ids).loss.item()
    assert loss < fresh


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_saved_model_loads_in_the_precision_it_was_trained_in(
    train: Train, tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    train("run_dir=here", f"precision={precision}", "parallel.zero_stage=2", world_size=2)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "here" / "model")
    assert model.dtype == dtype
    assert model.config.use_cache


def test_pretrained_weights_are_where_training_starts(train: Train, tmp_path: Path) -> None:
    train("run_dir=first", "schedule.warmup_steps=0", "optimizer.lr=1e-2", train__steps=20)
    model = str(tmp_path / "first" / "model")
    start = {"model": {"name_or_path": model, "init": "pretrained"}, "data__tokenizer": model}
    train("run_dir=second", "train.steps=1", "schedule.warmup_steps=0", **start)
    sharded = {"parallel": {"zero_stage": 3}, "world_size": 2}
    train("run_dir=third", "train.steps=1", "schedule.warmup_steps=0", **start, **sharded)
    last, second, third = (metrics(tmp_path / name)[-1]["loss"] for name in ("first", "second", "third"))
    assert second < metrics(tmp_path / "first")[0]["loss"] - 0.5
    assert abs(second - last) < 0.5
    assert third == pytest.approx(second, rel=1e-6)


def test_a_weight_that_is_not_finite_is_named_by_every_rank(train: Train, tmp_path: Path) -> None:
    """Under tensor parallelism only the last rank reads the value."""
    train("run_dir=first", "schedule.warmup_steps=0", "train.engine=reference", train__steps=1)
    model, name = tmp_path / "first" / "model", "transformer.h.1.mlp.c_fc.weight"
    start = {"model": {"name_or_path": str(model), "init": "pretrained"}, "data__tokenizer": str(model)}
    tensors = load_file(model / "model.safetensors")
    tensors[name][0, -1] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    layouts = ({"tp": 2}, {"zero_stage": 3})
    for layout in layouts:
        with refused(ModelError, "model.name_or_path", remedy=("model.init", "random")) as found:
            train("run_dir=second", "schedule.warmup_steps=0", **start, parallel=layout, world_size=2)
        assert found[0].reason.startswith(name)
        assert not (tmp_path / "second").exists()


def test_large_models_are_written_in_shards_with_an_index(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.checkpoint import model_directory

    monkeypatch.setitem(model_directory.write_model.__kwdefaults__, "max_shard_bytes", 40_000)
    train("run_dir=here", "parallel.zero_stage=3", world_size=2)
    model = tmp_path / "here" / "model"
    assert len(list(model.glob("model-*-of-*.safetensors"))) > 2
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_snapshots_are_models_and_only_the_newest_are_kept(train: Train, tmp_path: Path) -> None:
    train("run_dir=here", "checkpoint.every=1", "checkpoint.keep=2", world_size=2)
    names = sorted(path.name for path in (tmp_path / "here").glob("step-*"))
    assert names == ["step-00000003", "step-00000004"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "here" / names[0])


def test_the_held_out_loss_is_reported(train: Train, tmp_path: Path) -> None:
    output = train("run_dir=here", "train.eval_every=2")
    assert [("eval_loss" in step) for step in metrics(tmp_path / "here")] == [False, True, False, True]
    assert "held-out" in output


def test_tensorboard_gets_every_step(train: Train, tmp_path: Path) -> None:
    train("run_dir=here", "log.report_to=[tensorboard]", world_size=2)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next((tmp_path / "here").rglob("events.out.tfevents*"))
    log = EventAccumulator(str(events))
    log.Reload()
    assert [event.step for event in log.Scalars("loss")] == [1, 2, 3, 4]


def test_a_second_run_without_run_dir_gets_a_directory_of_its_own(train: Train, tmp_path: Path) -> None:
    train()
    train()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["small", "small-2"]


def test_a_run_is_never_overwritten_unasked(train: Train, tmp_path: Path) -> None:
    train("run_dir=here")
    before = (tmp_path / "here" / "metrics.jsonl").read_bytes()
    with refused(ToolkitError, "run_dir", remedy="add --overwrite to replace it"):
        train("run_dir=here", "train.seed=9")
    assert (tmp_path / "here" / "metrics.jsonl").read_bytes() == before
    train("run_dir=here", "train.seed=9", "--overwrite")
    assert (tmp_path / "here" / "metrics.jsonl").read_bytes() != before


@pytest.mark.parametrize("flag", [[], ["--overwrite"]])
def test_folders_that_are_not_a_runs_are_never_touched(train: Train, tmp_path: Path, flag: list[str]) -> None:
    (tmp_path / "project" / "model").mkdir(parents=True)
    (tmp_path / "project" / "model" / "precious.py").write_text("mine")
    with refused(ToolkitError, "run_dir"):
        train("run_dir=project", *flag)
    assert (tmp_path / "project" / "model" / "precious.py").read_text() == "mine"


def test_a_run_does_not_delete_the_model_that_it_starts_from(train: Train, tmp_path: Path) -> None:
    train("run_dir=here")
    model = str(tmp_path / "here" / "model")
    changes = {"model": {"name_or_path": model, "init": "pretrained"}, "data__tokenizer": model}
    with refused(ToolkitError, "run_dir"):
        train("run_dir=here", "--overwrite", **changes)
    assert Path(model, "config.json").exists()


def test_ranks_with_other_text_are_refused(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.data.tokens.token_cache import TokenCorpus

    def contents(corpus: TokenCorpus) -> str:
        return f"text of rank {min(1, int(os.environ['RANK']))}"

    monkeypatch.setattr(TokenCorpus, "contents", property(contents))
    with pytest.raises(ToolkitError, match="text of rank 1 is not that of rank 0"):
        train("run_dir=here", world_size=2)
    assert not (tmp_path / "here").exists()


def test_overwriting_removes_what_the_old_run_left(train: Train, tmp_path: Path) -> None:
    train("run_dir=here", "checkpoint.every=1", "checkpoint.keep=4")
    train("run_dir=here", "checkpoint.every=1", "checkpoint.keep=4", "--overwrite", train__steps=2, schedule={})
    assert sorted(path.name for path in (tmp_path / "here").glob("step-*")) == ["step-00000001", "step-00000002"]


def test_log_level_warning_prints_nothing(train: Train) -> None:
    assert train("log.level=warning") == ""


def test_a_users_deepspeed_json_is_laid_over_ours(train: Train, tmp_path: Path) -> None:
    theirs = {"zero_optimization": {"reduce_bucket_size": 12345}, "train_batch_size": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    train("run_dir=here", "--deepspeed_config", "ds.json")
    config = json.loads((tmp_path / "here" / "ds_config.json").read_text())
    assert config["zero_optimization"]["reduce_bucket_size"] == 12345
    assert config["train_batch_size"] == 16


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_stops_the_run_and_keeps_the_last_good_weights(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, where: str
) -> None:
    compute, calls = LossInHead.compute, []

    def poisoned(self: Any, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        # Step 3, on the last of two ranks; two micro-batches a step.
        is_bad = len(calls) == 5 and os.environ["RANK"] == "1"
        if is_bad and where == "gradient":
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        return compute(self, head, hidden) * (float("nan") if is_bad and where == "loss" else 1)

    monkeypatch.setattr(LossInHead, "compute", poisoned)
    changes = {"parallel": {"zero_stage": stage}}
    place = "on rank 1" if where == "loss" else "gradient norm"
    with pytest.raises(ToolkitError, match=rf"step 3: .*{place}.*step-00000002") as error:
        train("run_dir=here", world_size=2, **changes)
    assert error.value.exit_code == 2
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "here" / "step-00000002")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not (tmp_path / "here" / "model").exists()


class TestBadInput:
    """One line each, before anything is written."""

    def test_fp16_is_refused_where_deepspeed_has_none(self, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        from deepspeed.accelerator import get_accelerator

        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
        with refused(RunError, "precision", remedy=("precision", "bf16 or fp32")):
            train("precision=fp16")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["batch.mirco_size=2"], "Did you mean micro_batch_size"),
            (["batch.micro_batch_size=3"], "not a multiple of 3"),
            (["parallel.dp=4"], "needs 4 ranks"),
            (["parallel.tp=2"], "must be a multiple of tp x pp = 2"),
            (["parallel.tp=3"], "Set parallel.tp to 1, 2 or 4"),
            (["parallel.pp=3"], "Set parallel.pp to 2 or less"),
            (["data.source=nowhere.txt"], "nowhere.txt"),
            (["data.seq_len=65"], "64 positions"),
            (["data.tokenizer=bpe-330"], "vocabulary of 320"),
            (["model.name_or_path=gpt3-tiny"], "Did you mean gpt2-tiny"),
            (["model.overrides.n_layers=2"], "no such field"),
            (["log.report_to=[tensorbord]"], "Did you mean tensorboard"),
            (["--deepspeed_config", "missing.json"], "cannot be read"),
            (["--nonsense"], "--nonsense"),
            (["train.engine=reference", "--deepspeed_config", "missing.json"], "takes no DeepSpeed config"),
            (["model.overrides.activation_function=nope"], "transformers cannot build it"),
            (["schedule.name=polynomial", "schedule.min_lr_ratio=1.0"], "schedule.name=polynomial"),
        ],
    )
    def test_is_rejected_in_one_line(self, train: Train, tmp_path: Path, argv: list[str], message: str) -> None:
        with pytest.raises(ToolkitError) as error:
            train("run_dir=here", *argv)
        assert message in str(error.value)
        assert len(str(error.value).splitlines()) == 1
        assert error.value.exit_code == 2
        assert not (tmp_path / "here").exists()

    def test_a_contradicting_json_is_refused_with_every_conflict(self, train: Train, tmp_path: Path) -> None:
        config = {
            "train_batch_size": 32,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 2},
            "scheduler": {"type": "WarmupLR"},
            "optimizer": {"params": {"lr": 1}},
        }
        (tmp_path / "ds.json").write_text(json.dumps(config))
        with pytest.raises(ToolkitError) as error:
            train("run_dir=here", "--deepspeed_config", "ds.json")
        keys = ["train_batch_size", "gradient_clipping", "zero_optimization.stage", "optimizer.params.lr"]
        assert [refusal.field for refusal in error.value.refusals] == ["scheduler", *keys]
        assert len(str(error.value).splitlines()) == 5
        assert not (tmp_path / "here").exists()

    def test_code_in_a_model_directory_does_not_run(self, train: Train, tmp_path: Path) -> None:
        folder = tmp_path / "custom"
        folder.mkdir()
        code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "auto_map": code}))
        (folder / "evil.py").write_text("open('ran', 'w').close()")
        with refused(ToolkitError, "model.name_or_path", remedy="pass --trust-remote-code if you trust it"):
            train("run_dir=here", model={"name_or_path": str(folder)})
        assert not (tmp_path / "ran").exists()


def test_every_recipe_opens_with_its_launch_line_and_its_schema() -> None:
    for path in nonempty(SCRIPT.parent.rglob("*.yaml")):
        first, second = path.read_text().splitlines()[:2]
        assert path.stem in first, path
        assert any(first.startswith(f"# {word} ") for word in ("deepspeed", "dstk", "torchrun", "accelerate", "python"))
        schema = second.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / schema).resolve() == SCRIPT.parent / "recipe.schema.json"


def test_a_run_says_and_keeps_the_layout_that_it_took(train: Train, tmp_path: Path) -> None:
    output = train("--layout", "2xCPU", "run_dir=run", world_size=2, train__steps=3, layouts={"2xCPU": "z3-m1"})
    assert "2xCPU: z3-m1" in output
    kept = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (kept.parallel.zero_stage, kept.batch.micro_batch_size) == (3, 1)
    assert (tmp_path / "run" / "recipe.yaml").read_text().endswith("layouts:\n  2xCPU: z3-m1\n")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_step_that_is_validated_and_saved_is_resumed_from(train: Train, tmp_path: Path, engine: str) -> None:
    """FSDP keeps some weights whole after a forward pass without a backward pass, and saved them as shards."""
    words = ("train.eval_every=2", "checkpoint.every=2", "schedule.warmup_steps=0")
    changes = {"train__engine": engine, "parallel": {"dp": 2, "zero_stage": 0}}
    train("run_dir=whole", *words, world_size=2, **changes)
    train("run_dir=rest", "--resume", "whole/step-00000002", *words, world_size=2, **changes)
    names = ("step", "loss", "grad_norm", "eval_loss")
    whole = [[line.get(name) for name in names] for line in metrics(tmp_path / "whole")]
    rest = [[line.get(name) for name in names] for line in metrics(tmp_path / "rest")]
    assert [line[0] for line in rest] == [3, 4]
    assert rest == whole[2:]
