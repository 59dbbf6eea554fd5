"""RC: what a recipe of this toolkit decides otherwise."""

from collections.abc import Iterator

from toolkit.dsconfig.lint.finding import ERROR, Edit, Found, Rule
from toolkit.dsconfig.lint.view import View

RULES = (
    Rule(
        id="RC101",
        severity=ERROR,
        title="A value that contradicts the recipe",
        effect="dstk train stops: the recipe decides what is computed, a DeepSpeed config only how.",
        mend='Write "auto", remove the key, or change the recipe.',
        example={"gradient_clipping": 0.5},
        given={
            "runner": "toolkit",
            "conflicts": ((("gradient_clipping",), "gradient_clipping=0.5, but the recipe makes it 1.0"),),
        },
        fixable=True,
    ),
    Rule(
        id="RC102",
        severity=ERROR,
        title="A scheduler beside a recipe",
        effect="dstk train stops: the recipe's schedule sets the learning rate.",
        mend="Remove the section, and write schedule in the recipe.",
        example={"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}},
        given={"runner": "toolkit", "conflicts": ((("scheduler",), "scheduler is given beside a recipe"),)},
        fixable=True,
    ),
)


def check(view: View) -> Iterator[Found]:
    """What the recipe said against the config when the two were laid over each other."""
    for path, message in view.facts.conflicts:
        if path == ("scheduler",):
            yield Found("RC102", path, message, edits=(Edit("remove", path),))
        else:
            yield Found("RC101", path, message, edits=(Edit("remove", path),))
