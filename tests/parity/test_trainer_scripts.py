"""A user's own script with a Trainer, on two ranks and on one: right, with known mistakes, and with none to train."""

from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.errors import RunError
from toolkit.parity import Cause
from toolkit.parity.comparison import StrategyResult
from toolkit.parity.run.compare_script import compare_script

SCRIPT = """
import sys

import torch
from accelerate import ParallelismConfig
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

mistake = sys.argv[1]
parallelism = None
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96, attention_dropout=0.1)
if mistake == "tensor parallel":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], distributed_config=DistributedConfig(tp_size=2))
elif mistake == "parallelism config":
    parallelism = ParallelismConfig(tp_size=2)
    mesh = parallelism.build_device_mesh("cpu")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], tp_plan="auto", tp_size=2, device_mesh=mesh["tp"])
else:
    model = AutoModelForCausalLM.from_config(config)
if mistake == "half precision":
    model = model.half()
if mistake == "shared sequences":
    parallelism = ParallelismConfig(cp_size=2)

random = torch.Generator().manual_seed(1)
samples = []
for length in torch.randint(4, 24, (48,), generator=random).tolist():
    ids = torch.randint(0, 96, (24,), generator=random)
    is_text = torch.arange(24) < length
    samples.append({"input_ids": ids, "labels": ids.where(is_text, -100), "attention_mask": is_text.long()})


class Mine(Trainer):
    def compute_loss(self, *arguments, **options):
        loss = super().compute_loss(*arguments, **options)
        return loss / self.args.world_size if mistake == "divided twice" else loss

    def get_train_dataloader(self):
        if mistake == "all data on each rank":
            return DataLoader(samples, batch_size=2, collate_fn=self.data_collator)
        return super().get_train_dataloader()


arguments = TrainingArguments(
    "output",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=-1 if mistake == "no step" else 3,
    num_train_epochs=0 if mistake == "no step" else 3,
    learning_rate=1e-3,
    warmup_steps=1,
    average_tokens_across_devices=mistake != "means of ranks",
    parallelism_config=parallelism,
    deepspeed={"zero_optimization": {"stage": 1}} if mistake == "deepspeed" else None,
    eval_strategy="steps",
    eval_steps=1,
)
try:
    Mine(model=model, args=arguments, train_dataset=samples, eval_dataset=samples).train()
except Exception:
    print("a script may catch whatever it likes")
    raise
raise ValueError("nothing after the training runs")
"""
Compare = Callable[..., StrategyResult]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """compare("divided twice") runs the script with that mistake on two ranks and on one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> StrategyResult:
        comparison = compare_script(script, arguments, ranks=2, steps=30, rounding_seeds=1, timeout_seconds=300)
        (strategy,) = comparison.results
        print(strategy.result)
        return strategy

    return run


def test_a_right_script_trains_on_two_ranks_what_one_process_trains(compare: Compare, tmp_path: Path) -> None:
    strategy = compare("")
    assert strategy.result is not None
    assert strategy.outcome == "same"
    assert strategy.result.run.update_step == 2  # the warm-up begins with a rate of 0
    assert len(strategy.result.run.curve) == 3
    assert strategy.result.baseline.micro_batch_size == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_loss_that_is_divided_by_the_ranks_twice_is_named(compare: Compare) -> None:
    strategy = compare("divided twice")
    assert strategy.outcome == "differs"
    assert strategy.diagnosis is not None
    assert strategy.diagnosis.cause == Cause.SCALING


@pytest.mark.whole
def test_a_mean_of_the_ranks_means_is_named(compare: Compare) -> None:
    diagnosis = compare("means of ranks").diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == Cause.TOKEN_WEIGHTING
    assert "data-parallel ranks" in diagnosis.sentence


@pytest.mark.whole
def test_ranks_that_all_read_the_same_samples_are_named(compare: Compare) -> None:
    diagnosis = compare("all data on each rank").diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == Cause.DATA_ORDER


@pytest.mark.whole
@pytest.mark.parametrize("way", ["tensor parallel", "parallelism config"])
def test_a_model_that_is_sharded_at_load_is_whole_in_the_baseline(compare: Compare, tmp_path: Path, way: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96)).save_pretrained(tmp_path / "model")
    strategy = compare(way, str(tmp_path / "model"))
    assert strategy.result is not None
    assert strategy.outcome == "same"
    assert strategy.result.run.replicas == 1


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("half precision", "fp16 scales its loss by what overflowed before. Compare in fp32 or bf16."),
        ("shared sequences", "ranks that share a sequence are not compared. Set cp_size=1 and sp_size=1."),
        ("no step", "its train() took no step. Set num_train_epochs or max_steps to at least 1."),
        (
            "deepspeed",
            "gradients under DeepSpeed are not those of its parameters. Make a recipe of it with dstk recipe",
        ),
    ],
)
def test_what_is_not_recorded_is_refused(compare: Compare, way: str, message: str) -> None:
    with pytest.raises(RunError) as refused:
        compare(way)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("print('nothing')", "ended without training: it has to make a transformers.Trainer and call its train()"),
        ("import sys\nsys.exit(3)", "on 2 ranks ended with 3 before it trained"),
        ("weights = {}\nweights['a']", "on 2 ranks raised KeyError in line 2: 'a'"),
        ("def train(:", "on 2 ranks raised SyntaxError in line 1"),
    ],
)
def test_a_script_that_trains_nothing_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(content, encoding="utf-8")
    with pytest.raises(RunError) as refused:
        compare_script(script, (), ranks=2, steps=2)
    (line,) = str(refused.value).splitlines()
    assert message in line
    assert "train.py" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", "none.py"], "--script none.py: there is no such file."),
        (["--script", "none.py", "--against", "z1"], "--against with --script: a script says itself what it trains"),
        (["--script", "none.py", "--recipe", "a.yaml"], "--recipe with --script: a script says itself"),
    ],
)
def test_bad_input_for_a_script_exits_with_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
