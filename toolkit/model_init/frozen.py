"""Which parameters of a model train: all, or what model.freeze and model.train_only leave (docs/fine-tuning.md)."""

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
    other_names: dict[str, list[str]] = {}
    for other, name in tied_names(model).items():
        other_names.setdefault(name, [name]).append(other)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = {name: other_names.get(name, [name]) for name in trainable}
    if freeze:
        found = _matched("model.freeze", freeze, names)
        return _some("model.freeze", freeze, names.keys() - found, names)
    found = _matched("model.train_only", train_only, names) if train_only else frozenset(names)
    return _some("model.train_only", train_only, found, names) if train_only else found


def _matched(field: str, patterns: Sequence[str], names: Mapping[str, Sequence[str]]) -> frozenset[str]:
    found: set[str] = set()
    for pattern in patterns:
        of_pattern = {name for name, every in names.items() if any(fnmatchcase(one, pattern) for one in every)}
        if not of_pattern:
            reason = f"no parameter's name matches {pattern} (the first is {next(iter(names))})"
            raise ModelError.of(field, list(patterns), reason, "write * for any text, as in *.mlp.*")
        found |= of_pattern
    return frozenset(found)


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
