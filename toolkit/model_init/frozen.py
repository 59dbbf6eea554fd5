"""Trained and frozen parameters of a model, by model.freeze and model.train_only (docs/fine-tuning.md)."""

from collections.abc import Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from toolkit.errors import ModelError
from toolkit.parallel.model_structure import tied_names


def trained_names(model: nn.Module, *, freeze: Sequence[str] = (), train_only: Sequence[str] = ()) -> frozenset[str]:
    """Return the names of the parameters that train, tied ones once; what the family itself freezes stays frozen.

    A pattern matches a tied parameter under any of its names. Raises ModelError for a pattern that matches nothing, and
    for those that leave nothing, or everything, to train.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in tied_names(model).items():
        aliases.setdefault(name, [name]).append(alias)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = {name: aliases.get(name, [name]) for name in trainable}
    if freeze:
        frozen = _matched("model.freeze", freeze, names)
        return _some("model.freeze", freeze, names.keys() - frozen, names)
    if train_only:
        trained = _matched("model.train_only", train_only, names)
        return _some("model.train_only", train_only, trained, names)
    return frozenset(names)


def _matched(field: str, patterns: Sequence[str], names: Mapping[str, Sequence[str]]) -> frozenset[str]:
    matched: set[str] = set()
    for pattern in patterns:
        of_pattern = {
            name
            for name, aliases in names.items()
            if any(fnmatchcase(name_or_alias, pattern) for name_or_alias in aliases)
        }
        if not of_pattern:
            reason = f"no parameter's name matches {pattern} (the first is {next(iter(names))})"
            raise ModelError.of(field, list(patterns), reason, "write * for any text, as in *.mlp.*")
        matched |= of_pattern
    return frozenset(matched)


def _some(
    field: str, patterns: Sequence[str], trained: Iterable[str], names: Mapping[str, Sequence[str]]
) -> frozenset[str]:
    trained = frozenset(trained)
    if not trained:
        raise ModelError.of(field, list(patterns), "nothing is left to train", "freeze less")
    if len(trained) == len(names):
        raise ModelError.of(field, list(patterns), "every parameter trains, as without it", "remove it")
    return trained


def freeze_others(model: nn.Module, trained: Container[str]) -> None:
    """Freeze the parameters of a model, or of a pipeline stage of it, that are not in `trained`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
