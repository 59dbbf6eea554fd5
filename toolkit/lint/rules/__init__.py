"""The checks of DeepSpeed configs: each file looks for one kind of mistake. toolkit/lint/rules.json has the texts."""

from toolkit.lint.rules import (
    auto_values,
    batch_and_parallelism,
    experts,
    keys,
    optimizer_and_scheduler,
    performance,
    precision,
    stated_conditions,
    value_types,
    zero_stages,
)

_MODULES = (
    keys,
    value_types,
    batch_and_parallelism,
    experts,
    precision,
    zero_stages,
    optimizer_and_scheduler,
    performance,
    auto_values,
    stated_conditions,
)
CHECKS = tuple(module.check for module in _MODULES)
