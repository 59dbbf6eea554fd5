"""A mixture as datasets of Megatron-LM: one for each source, and the weights that its --data-path takes."""

import re
from fractions import Fraction

from toolkit.config.recipe import Recipe
from toolkit.data.megatron.write import MegatronFiles, check, write_megatron
from toolkit.data.tokens.corpora import fields_of, named_sources
from toolkit.errors import DataError


def write_sources(
    recipe: Recipe, prefix: str, *, merge: bool = False, shards: str | None = None, progress: bool
) -> list[MegatronFiles]:
    """Write each source of a mixture to PREFIX_NAME.bin and .idx, or the only source to PREFIX. Raises DataError."""
    sources = named_sources(recipe.data, progress=progress)
    names = [re.sub(r"[^\w.-]+", "_", f"_{source.name}" if source.name else "") for source in sources]
    prefix = prefix.removesuffix(".idx").removesuffix(".bin")
    for index, (source, name) in enumerate(zip(sources, names, strict=True)):
        with fields_of(source.place, source.corpus_section):
            check(source.section, f"{prefix}{name}")
        if name in names[:index]:
            raise DataError.of(f"{source.place}.name", source.name, "another source has this prefix", "give it a name")
    written = []
    for source, name in zip(sources, names, strict=True):
        with fields_of(source.place, source.corpus_section):
            files = write_megatron(source.section, f"{prefix}{name}", merge=merge, shards=shards, progress=progress)
        written.append(files)
    return written


def blend(recipe: Recipe, written: list[MegatronFiles]) -> list[float]:
    """The weight of each source: as they are given, or in tokens where some are epochs or tokens. Raises DataError."""
    sources = recipe.data.sources or ()
    weights = [Fraction(str(source.weight or 0)) for source in sources]
    if all(source.weight is not None for source in sources):
        return [float(weight) for weight in weights]
    budgets = [
        Fraction(str(source.tokens or (source.epochs or 0) * files.tokens))
        for source, files in zip(sources, written, strict=True)
    ]
    rest = recipe.train.steps * recipe.batch.global_batch_size * recipe.data.seq_len - sum(budgets)
    if any(weights) and rest <= 0:
        reason = "epochs and tokens of data.sources take all of the run, and no token is left for the others"
        raise DataError.of("train.steps", recipe.train.steps, reason, ("train.steps", "more"), "lower these")
    each = rest / (sum(weights) or 1)
    return [round(float(budget + weight * each)) for budget, weight in zip(budgets, weights, strict=True)]
