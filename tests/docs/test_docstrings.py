"""docs/check_docstrings.py: it finds docstrings that need the line before them, and passes those that stand alone."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from check_docstrings import docstrings, fragment, main  # noqa: E402

SOURCE = '''"""A module."""

SIZE = 4
"""Of one step."""


class Plan:
    """A plan."""

    seconds: float
    """Seconds of one step."""

    def __init__(self) -> None:
        """Begin."""
        self.tokens = 0
        """Both."""
        if SIZE:
            self.text = "Of no docstring."
            """By name."""
'''


@pytest.mark.parametrize(
    ("text", "opening"),
    [
        ("Of the cluster.", "Of"),
        ("Of matrices Muon keeps the first, of all else the others.", "Of"),
        ("Of the plans that fit, those that no other beats.", "Of"),
        ("Both.", "Both"),
        ("Both in words.", "Both"),
        ("Those that fit.", "Those"),
        ("That the optimizer has counted before.", "That"),
        ("The same without norms.", "The same"),
        ("The same.", "The same"),
        ("The same of each layer, in bytes.", "The same"),
        ("Also what takes several processes.", "Also"),
        ("Their first dimension is the expert.", "Their"),
        ("As JSON.", "As"),
        ("As JSON, without what is the default.", "As"),
        ("As `--layout` takes it.", "As"),
        ("By name; the text alone has the empty name, as everywhere.", "By"),
        ("From the columns of a run to options.", "From"),
        ("In the place of a GPU's name: a rank on a core, for instance.", "In"),
        ("Where shards are made.", "Where"),
        ("Where it is on: the loss, without its coefficient.", "Where"),
        ("On one line, without colors.", "On"),
        ("With the head (its bias, its norm).", "With"),
        ("Without the reference.", "Without"),
    ],
)
def test_a_fragment_is_found(text: str, opening: str) -> None:
    assert fragment(text) == opening


@pytest.mark.parametrize(
    "text",
    [
        "GPU of the cluster.",
        "Return both.",
        "What DeepSpeed keeps of each parameter, in bytes.",
        "Both ranks send.",
        "The same weights on a CPU.",
        "This rank's shard.",
        "Offsets of all documents.",
        "At most one rank waits.",
        "As many passes as fill the ranks behind this one.",
        "Where a layer is frozen, it has no gradient.",
        "Where a document begins, and another ends, positions restart.",
        "In each round, ranks exchange their fragments.",
        "For each communicator of a rank, count its ranks.",
        "By default, all parameters train. Of those that do not, none has a gradient.",
        "With `pp=2`, two stages: the first has the embedding.",
        "",
    ],
)
def test_a_sentence_or_a_noun_phrase_passes(text: str) -> None:
    assert fragment(text) == ""


def test_strings_below_assignments_are_docstrings() -> None:
    texts = ["A module.", "Of one step.", "A plan.", "Seconds of one step.", "Begin.", "Both.", "By name."]
    assert [text for _, text in sorted(docstrings(SOURCE))] == texts


def test_each_finding_is_one_line_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inside" / "plan.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f'{path}:4: a docstring that opens with "Of": Of one step.',
        f'{path}:16: a docstring that opens with "Both": Both.',
        f'{path}:19: a docstring that opens with "By": By name.',
    ]


def test_nothing_is_printed_where_all_docstrings_stand_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.py").write_text('"""Plans of layouts."""\n')
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_a_folder_without_python_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no Python file"):
        main([str(tmp_path)])
