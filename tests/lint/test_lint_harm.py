"""--fix against the programs that read the file: what they accepted before they accept after, and lint adds nothing."""

import contextlib
import copy
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lint_cases import Config, document, ids, lint
from lint_composed import composed
from rank_parent import become_rank_parent

from toolkit.config.layout import Layout
from toolkit.lint import Finding, Linter
from toolkit.lint.linter import guess_runner
from toolkit.lint.view import LintContext

Z = "zero_optimization"


def fixed(folder: Path, text: str, name: str = "ds.json", **options: Any) -> tuple[str, list[Finding]]:
    """Return the text after --fix, and what lint then finds."""
    path = folder / name
    path.write_text(text)
    result = Linter(fixes=True, **options).run([str(path)])
    return path.read_text(), result.findings


def new_findings(before: list[Finding], after: list[Finding]) -> Counter[str]:
    """Errors and warnings; an info may follow from a value that can now be read."""
    return Counter(ids(after, "error", "warning")) - Counter(ids(before, "error", "warning"))


@pytest.mark.parametrize(
    ("sizes", "runner"),
    [
        ({"train_batch_size": 8}, "deepspeed"),
        ({"train_micro_batch_size_per_gpu": 8}, "deepspeed"),
        ({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "deepspeed"),
        ({"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "trainer"),
        ({"train_batch_size": "auto"}, "trainer"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": "auto"}, "trainer"),
    ],
)
def test_a_batch_size_tells_whose_file_it_is_and_an_auto_that_deepspeed_drops_does_not(
    sizes: Config, runner: str
) -> None:
    config = sizes | {Z: {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"}}
    assert guess_runner(config, LintContext()) == runner


def test_the_added_clipping_is_auto_only_where_something_replaces_it(tmp_path: Path) -> None:
    zero = {Z: {"stage": 2, "reduce_bucket_size": "auto"}}
    text, _ = fixed(tmp_path, json.dumps({"train_batch_size": 8} | zero))
    assert json.loads(text)["gradient_clipping"] == 1.0
    text, _ = fixed(tmp_path, json.dumps({"train_batch_size": "auto"} | zero))
    assert json.loads(text)["gradient_clipping"] == "auto"


def test_what_accelerate_saves_by_under_autotp_stays(tmp_path: Path) -> None:
    zero = {"stage": 2, "gather_16bit_weights_on_model_save": True, "stage3_prefetch_bucket_size": 7}
    config = {"train_batch_size": 8, "gradient_clipping": 1.0, Z: zero, "tensor_parallel": {"autotp_size": 2}}
    text, _ = fixed(tmp_path, json.dumps(config))
    assert json.loads(text)[Z] == {"stage": 2, "gather_16bit_weights_on_model_save": True}
    text, _ = fixed(tmp_path, json.dumps(config | {"tensor_parallel": {}}))
    assert json.loads(text)[Z] == {"stage": 2}


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_lr": 1e-6, "total_num_steps": 9}}}, "DS753"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "beta1": 0.9}}}, "DS705"),
    ],
)
def test_a_parameter_is_not_renamed_to_another_quantity(tmp_path: Path, section: Config, kept: str) -> None:
    text = json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0} | section)
    after, findings = fixed(tmp_path, text)
    assert json.loads(after).keys() == json.loads(text).keys()
    assert kept in ids(findings, "error")


def test_a_total_batch_is_not_chosen_for_the_user() -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    (found,) = [one for one in lint(config, gpus=4, layout=Layout(tp=4)) if one.rule.id == "DS307"]
    assert found.edits == ()


OTHERS = {
    "LLaMA-Factory": "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ntemplate: qwen\nbf16: true\n",
    "axolotl": "base_model: m\nmicro_batch_size: 1\nsequence_len: 2048\nsample_packing: true\nbf16: auto\n",
    "ms-swift": "model: m\ntrain_type: full\nsplit_dataset_ratio: 0.1\nbf16: true\n",
    "GPT-NeoX": '{"pipe-parallel-size": 1, "num-layers": 2, "hidden-size": 8, "num-attention-heads": 2,\n'
    '"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}, "train_micro_batch_size_per_gpu": 4}\n',
    "the Trainer": "output_dir: out\nper_device_train_batch_size: 4\nbf16: true\nlearning_rate: 1e-5\n",
    "another program": "trainer:\n  devices: 8\nmodel: m\nfp16: true\n",
}


@pytest.mark.parametrize("program", OTHERS)
def test_the_file_of_another_program_is_one_line_and_is_not_changed(tmp_path: Path, program: str) -> None:
    text, findings = fixed(tmp_path, OTHERS[program], "run.yaml")
    assert text == OTHERS[program]
    assert ids(findings) == ["DS007"]
    assert f"a file of {program}" in findings[0].message


def test_the_deepspeed_config_that_another_program_names_is_checked_for_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "z3.json").write_text('{"train_batch_size": "auto", "gradient_clipping": 2.0}')
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.yaml").write_text(
        OTHERS["LLaMA-Factory"] + "deepspeed: configs/z3.json\nmax_grad_norm: 1.0\n"
    )
    result = Linter().run([str(tmp_path / "runs" / "run.yaml")])
    assert sorted(ids(result.findings)) == ["AC109", "DS007", "HF104"]


def refusal(config: Config, runner: str) -> str | None:
    """Return why DeepSpeed, or before it the Trainer with arguments of its own, refuses a config."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = copy.deepcopy(config)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if runner == "trainer":
                if Z not in config:
                    return "accelerate: no zero_optimization"
                read = HfTrainerDeepSpeedConfig(config)
                arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to=[])
                read.trainer_config_process(arguments)
                read.fill_only("scheduler.params.total_num_steps", 9)
                read.fill_only("scheduler.params.warmup_num_steps", 1)
                read.mismatches = []  # other arguments may agree
                config = {key: value for key, value in read.config.items() if key != "train_batch_size"}
            DeepSpeedConfig(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def check_fixes(folder: Path, count: int, seed: int) -> int:
    """Return how many configs --fix changed that were accepted before."""
    become_rank_parent()
    changed = 0
    for config in composed(count, seed):
        before = json.dumps(config, indent=2)
        findings = lint(before)
        runner = guess_runner(document(before).value, LintContext())
        after, found = fixed(folder, before)
        assert new_findings(findings, found) == Counter(), (config, after)
        again, _ = fixed(folder, after)
        assert again == after, config
        if after != before and refusal(config, runner) is None:
            changed += 1
            # A file that its reader accepts stays one of that reader's.
            assert guess_runner(json.loads(after), LintContext()) == runner, config
            assert (config, refusal(json.loads(after), runner)) == (config, None)
    return changed


def test_what_a_reader_accepts_it_accepts_after_the_fix(tmp_path: Path) -> None:
    assert check_fixes(tmp_path, 150, seed=1) > 30


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(2, 4))
def test_what_a_reader_accepts_it_accepts_after_the_fix_in_thousands_of_configs(tmp_path: Path, seed: int) -> None:
    assert check_fixes(tmp_path, 1500, seed) > 300
