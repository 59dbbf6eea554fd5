"""The rules: in each file a table of them, and the functions that look for them."""

from toolkit.dsconfig.lint.finding import Rule
from toolkit.dsconfig.lint.rules import (
    accelerate,
    auto,
    batch,
    keys,
    known_bugs,
    offload,
    optimizer,
    parallel,
    performance,
    precision,
    recipe,
    scheduler,
    text,
    types,
    zero,
)

_ON_A_CONFIG = (
    *(
        keys,
        types,
        batch,
        precision,
        zero,
        offload,
        parallel,
        optimizer,
        scheduler,
        performance,
        known_bugs,
        auto,
        recipe,
    ),
)

CHECKS = tuple(module.check for module in _ON_A_CONFIG)
"""What looks at a DeepSpeed config."""

GROUPS: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    ("The text of the file", text.RULES),
    ("Keys", keys.RULES),
    ("Types and ranges", types.RULES),
    ("Batch sizes", batch.RULES),
    ("Precision", precision.RULES),
    ("ZeRO", zero.RULES),
    ("Offload", offload.RULES),
    ("Pipelines, tensor and sequence parallelism", parallel.RULES),
    ("Optimizer and clipping", optimizer.RULES),
    ("Scheduler", scheduler.RULES),
    ("Speed and memory", performance.RULES),
    ("Known bugs", known_bugs.RULES),
    ("auto and the Hugging Face Trainer", auto.RULES),
    ("accelerate's config file", accelerate.RULES),
    ("A recipe of this toolkit", recipe.RULES),
)

RULES: dict[str, Rule] = {rule.id: rule for _, rules in GROUPS for rule in rules}
"""Id -> rule."""
