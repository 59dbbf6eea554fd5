"""`dstk families`, and the file it reads."""

import json
import subprocess
import sys

import pytest

from toolkit.cli.main import main
from toolkit.config.parallel_rules import ULYSSES_FAMILIES
from toolkit.models.support import EXPERT_KINDS, KINDS, PATH, all_families, checked_version, encoded, find

PROMISED = [
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "codegen",
    "opt",
    "bloom",
    "falcon",
    "gpt_bigcode",
    "mpt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "stablelm",
    "starcoder2",
    "olmo",
    "olmo2",
    "cohere",
    "cohere2",
    "granite",
    "smollm3",
    "persimmon",
    "biogpt",
    "xglm",
    "gpt_neox_japanese",
    "openai-gpt",
]


@pytest.fixture(autouse=True)
def _wide_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print tables with a line for each family: in a pipe they wrap at 100 columns unless COLUMNS says more."""
    monkeypatch.setenv("COLUMNS", "400")


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["families", *arguments])
    out, err = capfd.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out, err


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_family_supports_pipeline_tensor_and_sequence_parallelism(name: str) -> None:
    family = find(name)
    assert family is not None
    assert all(family.supports(kind) for kind in KINDS)


def test_more_than_a_hundred_families_support_pipeline_parallelism() -> None:
    assert sum(family.supports("pipeline") for family in all_families().values()) > 100


def test_every_refusal_is_one_short_line() -> None:
    assert len(all_families()) > 150
    for family in all_families().values():
        for reason in map(family.refusal, (*KINDS, *EXPERT_KINDS, "context")):
            assert reason is None or (0 < len(reason) <= 120 and "\n" not in reason), family


def test_tensor_parallelism_needs_a_structure_that_pipelines_support() -> None:
    # To lift this, the layers must be found in another way than by following the forward pass.
    assert not [
        family for family in all_families().values() if family.supports("tensor") and not family.supports("pipeline")
    ]


def test_the_table_says_where_attention_is_not_sharded(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capfd, "inkling_text", "mixtral")
    assert ["attention is not sharded" in line for line in out.splitlines()[1:3]] == [True, False]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("bart", "encoder-decoder"), ("rwkv", "recurrent"), ("gemma3n_text", "more than the hidden state")],
)
def test_a_refusal_names_its_cause(name: str, reason: str) -> None:
    family = find(name)
    assert family is not None
    assert reason in str(family.pipeline_refusal)


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    assert not [
        family for family in all_families().values() if family.supports("sequence") and not family.supports("tensor")
    ]


def test_no_refusal_mentions_the_styles_of_a_plan() -> None:
    assert not [family for family in all_families().values() if " style " in str(family.tensor_refusal)]


def test_an_unknown_family_is_none() -> None:
    assert find("no-such-family") is None


def test_support_json_is_as_the_generator_writes_it() -> None:
    assert PATH.read_text(encoding="utf-8") == encoded(all_families(), checked_version())


def test_the_table_has_a_line_per_family_and_a_total(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd)
    lines = [line.rstrip() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0] == "family                    pipeline  tensor  sequence  ep   inner  ulysses  cp   why not"
    assert [line.split()[0] for line in lines[1:-2]] == list(all_families())
    assert lines[-1].startswith(f"{len(all_families())} families: ")


def test_named_families_come_in_the_order_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capfd, "mixtral", "gpt2", "mixtral")
    assert [line.split()[:6] for line in out.splitlines()[1:3]] == [
        ["mixtral", *5 * ["yes"]],
        ["gpt2", *3 * ["yes"], "-", "-"],
    ]
    assert out.splitlines()[-1].startswith("2 families: 2 ")


def test_a_refusal_of_all_kinds_of_parallelism_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capfd, "bart")
    assert out.splitlines()[1].split() == ["bart", "no", "no", "no", "-", "-", "no", "no", "encoder-decoder"]


def test_the_column_ulysses_has_the_families_that_recipes_accept(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capfd)
    assert {line.split()[0] for line in out.splitlines()[1:-2] if line.split()[6] == "yes"} == {*ULYSSES_FAMILIES}


def test_json_has_the_same_facts_as_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capfd, "bart", "--json")
    refusal = "encoder-decoder"
    assert json.loads(out) == {
        "bart": {
            **dict.fromkeys(("pipeline", "tensor", "sequence", "ulysses", "cp"), False),
            **dict.fromkeys(("pipeline_refusal", "tensor_refusal", "sequence_refusal", "cp_refusal"), refusal),
        }
    }


@pytest.mark.parametrize(
    ("name", "advice"), [("gpt-neo", "Did you mean gpt_neo?"), ("qqq", "See dstk families for all.")]
)
def test_an_unknown_name_is_one_line(capfd: pytest.CaptureFixture[str], name: str, advice: str) -> None:
    line = f"error: {name} is not a causal-LM family of transformers {checked_version()}. {advice}\n"
    assert run(capfd, "llama", name) == (2, "", line)


@pytest.mark.parametrize("arguments", [[], ["gpt2", "--json"]])
def test_the_command_imports_nothing_of_the_training_stack(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\n"
        f"try: main(['families', *{arguments!r}])\n"
        "finally: sys.stderr.write(str({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()"
