import json
import re
from pathlib import Path

import pytest
from lint_cases import ids, kinds, lint, lint_example, planted, valid

from toolkit.config.layout import Layout
from toolkit.lint import Rule, Severity
from toolkit.lint.finding import GROUPS, RULES
from toolkit.lint.key_schema import lookup
from toolkit.lint.rules.stated_conditions import CONDITIONS

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def test_every_group_has_rules_and_ids_are_unique() -> None:
    assert len(RULES) == sum(len(rules) for _, rules in GROUPS) >= 100


@every_rule
def test_a_rule_finds_its_example_with_its_severity(rule: Rule) -> None:
    found = [finding for finding in lint_example(rule) if finding.rule is rule]
    assert [finding.severity for finding in found[:1]] == [rule.severity]


@every_rule
def test_a_rule_has_an_id_a_title_an_effect_a_fix_and_sources(rule: Rule) -> None:
    assert re.fullmatch(r"(DS|HF|AC|RC)\d{3}", rule.id)
    assert rule.effect.endswith(".")
    assert rule.fix.endswith((".", "'."))
    assert not rule.title.endswith(".")
    assert all(
        re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", source) for source in rule.sources
    )


def test_every_condition_in_the_table_is_about_a_key_of_deepspeed() -> None:
    keys = [key for _, condition in CONDITIONS for key in condition.keys]
    assert len(keys) > 20
    known = [key for key in keys if lookup(tuple(key.split("."))) is not None or key.startswith("optimizer.params.")]
    assert known == keys


@pytest.mark.parametrize("name", valid())
def test_a_valid_config_has_no_error_and_no_warning(name: str) -> None:
    assert ids(lint(valid()[name], gpus=8), "error", "warning") == []


@pytest.mark.parametrize("name", valid())
def test_each_value_of_a_valid_config_is_accepted_without_the_number_of_gpus(name: str) -> None:
    assert ids(lint(valid()[name]), "error", "warning") == []


def test_a_string_that_spells_no_whole_number_is_refused_as_deepspeed_refuses_it() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    zero = {"stage": 2, "reduce_bucket_size": "5e8"}
    with pytest.raises(ValidationError, match="unable to parse string as an integer"):
        DeepSpeedZeroConfig(**zero)
    found = lint({"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": zero}, gpus=8)
    (finding,) = (finding for finding in found if finding.rule.id == "DS202")
    assert "ValidationError" in finding.effect


def test_300_planted_mistakes_are_all_found_by_the_right_rule() -> None:
    missed = [
        (case.rule, case.base, case.config)
        for case in planted(300, seed=20)
        if case.rule not in ids(lint(case.config, **{"gpus": 8} | case.context))
    ]
    assert missed == []


def test_the_planted_mistakes_cover_every_kind() -> None:
    assert {case.rule for case in planted(300, seed=20)} == set(kinds())
    assert len(set(kinds())) >= 45


def test_a_planted_mistake_causes_no_errors_of_other_rules() -> None:
    """One mistake is one error, unless the value breaks two rules by itself."""
    follows = {
        "DS204": {"DS301"},  # 2.5 micro-batches do not multiply to the total
        "DS205": {"DS403"},  # a stage that does not exist counts as 0
        "DS208": {"DS403"},
        "DS206": {"DS513"},  # "false" counts as true, and true is rejected
        "HF107": {"DS201"},
    }
    cases = planted(120, seed=21)
    assert len(cases) == 120
    for case in cases:
        others = set(ids(lint(case.config, **{"gpus": 8} | case.context), "error")) - {case.rule}
        assert others <= follows.get(case.rule, set()), (case, others)


def test_data_parallel_ranks_exclude_tensor_pipeline_and_sequence_parallel_ones() -> None:
    config = valid()["zero1"]
    for layout, gpus in ((Layout(tp=2), 16), (Layout(pp=2), 16), (Layout(tp=2, pp=2), 32), (Layout(ulysses=4), 32)):
        assert "DS301" not in ids(lint(config, gpus=gpus, layout=layout))
        assert "DS301" in ids(lint(config, gpus=2 * gpus, layout=layout))


def test_a_total_for_all_ranks_is_distinguished_from_a_wrong_total() -> None:
    config = valid()["zero1"]
    assert "DS307" in ids(lint(config, gpus=8, layout=Layout(tp=2)))
    assert "DS307" not in ids(lint(config, gpus=16, layout=Layout(tp=4)))


SHIPPED = Path(__file__).parents[2] / "ds_configs"


@pytest.mark.parametrize(
    ("name", "severity", "words"),
    [
        ("3d", "info", "right for 2 data-parallel ranks: 8 GPUs with tp x pp x ulysses = 4"),
        ("pipeline_zero1", "info", "right for 4 data-parallel ranks: 8 GPUs with tp x pp x ulysses = 2"),
        ("zeropp", "error", "right for 16 data-parallel ranks"),
    ],
)
def test_without_a_layout_a_right_file_is_not_called_contradictory(name: str, severity: str, words: str) -> None:
    config = json.loads((SHIPPED / f"{name}.json").read_text())
    (found,) = [one for one in lint(config, gpus=8) if one.path == ("train_batch_size",)]
    assert (found.rule.id, found.severity, found.edits) == ("DS310", severity, ())
    assert words in found.message
    layout = {"3d": Layout(tp=2, pp=2), "pipeline_zero1": Layout(pp=2), "zeropp": Layout()}[name]
    gpus = 16 if name == "zeropp" else 8
    assert not {"DS301", "DS310"} & set(ids(lint(config, gpus=gpus, layout=layout)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 48])
@pytest.mark.parametrize("gpus", [1, 4, 6, 8, 16])
def test_sizes_of_other_ranks_are_told_from_sizes_of_none(ranks: int, gpus: int) -> None:
    config = {"train_batch_size": 8 * ranks, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    said = [one for one in lint(config, gpus=gpus) if one.rule.id in ("DS301", "DS310")]
    assert [one.rule.id for one in said] == ["DS310"] * (ranks != gpus)
    assert all(not one.edits for one in said)
    if ranks != gpus and gpus % ranks == 0:  # the layout that the message asks for makes it right
        layout = Layout(tp=gpus // ranks)
        assert said[0].message.endswith(f"{gpus} GPUs with tp x pp x ulysses = {gpus // ranks}")
        assert not {"DS301", "DS310", "DS307"} & set(ids(lint(config, gpus=gpus, layout=layout)))
    half = config | {"train_batch_size": 8 * ranks + 4}  # of no whole number of ranks
    assert [one.rule.id for one in lint(half, gpus=gpus) if one.rule.id in ("DS301", "DS310")] == ["DS301"]
    # Where the layout is known, it is a mistake.
    assert ("DS301" in ids(lint(config, gpus=gpus, layout=Layout(dp=gpus)))) == (ranks != gpus)


def test_a_total_that_fewer_replicas_divide_says_so() -> None:
    config = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
    (found,) = [one for one in lint(config, gpus=8) if one.rule.id == "DS304"]
    assert found.message.endswith("it is where 4 GPUs share each sample (--layout)")
    assert "DS304" not in ids(lint(config, gpus=8, layout=Layout(tp=4)))
    (found,) = [one for one in lint(config | {"train_batch_size": 30}, gpus=8) if one.rule.id == "DS304"]
    assert "share" not in found.message


def test_the_nearest_key_is_suggested() -> None:
    (finding,) = [one for one in lint({"gradient_acumulation_steps": 2, **valid()["zero1"]}) if one.rule.id == "DS101"]
    assert "gradient_accumulation_steps?" in finding.message


def test_auto_depends_on_the_runner_that_replaces_it() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"},
    }
    assert "HF102" in ids(lint(config, runner="deepspeed"), "error")
    assert ids(lint(config, runner="trainer"), "error") == ["HF101"]
    assert not {"HF101", "HF102", "HF103"} & set(ids(lint(config, runner="toolkit")))


def test_auto_betas_are_replaced_by_the_trainer_and_not_by_accelerator() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
    assert "HF101" not in ids(lint(config, runner="trainer"))
    assert "HF101" in ids(lint(config, runner="accelerate"))


def test_a_bug_is_reported_for_the_versions_that_have_it() -> None:
    config = valid()["zero0"]
    assert "DS902" in ids(lint(config, deepspeed=(0, 18, 5)))
    assert "DS902" not in ids(lint(config, deepspeed=(0, 18, 6)))


def test_infos_never_stop_a_build() -> None:
    assert {rule.severity for rule in RULES.values()} == set(Severity)
