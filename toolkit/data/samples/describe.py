"""Description of a recipe's data, in rows of a name and a text, as the banner of a run and `dstk data` show them."""

from toolkit.config.recipe import Recipe
from toolkit.data.samples.mixture import MixtureSamples
from toolkit.data.samples.preference_samples import REFERENCE_BYTES, PreferenceSamples
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.corpora import Corpora, OpenText
from toolkit.units import format_bytes, format_count


def describe_data(recipe: Recipe, corpora: Corpora, samples: Samples) -> list[tuple[str, str]]:
    """Describe the sources, what of the run is from each, and the validation text."""
    data = recipe.data
    own_sets = data.validation is not None or corpora.finds_validation
    held_out = "" if own_sets else f", {format_count(corpora.eval_tokens)} held out"
    tokens = f"{format_count(corpora.train_tokens)} tokens{held_out}"
    if isinstance(samples, MixtureSamples):
        facts = [("data", f"{len(samples.names)} sources, {tokens}")]
        run_samples = recipe.train.steps * recipe.batch.global_batch_size
        facts += [("source", f"{share.name}: {share}") for share in samples.shares(run_samples)]
    else:
        facts = [("data", f"{data.source}, {tokens}")]
    ends = dict.fromkeys(text.corpus.ends for text in corpora.sources.values() if text.corpus.ends)
    facts += [("documents", "; ".join(ends)), ("samples", samples.summary())]
    return [*facts, *describe_other_models(recipe, corpora, samples), *describe_validation(recipe, corpora)]


def describe_other_models(recipe: Recipe, corpora: Corpora, samples: Samples) -> list[tuple[str, str]]:
    """Describe the reference of an objective, or the teacher with the disk that its tokens take."""
    facts = []
    objective = recipe.train.objective
    if isinstance(samples, PreferenceSamples) and objective.needs_reference:
        when = "in each step, from a copy in memory"
        if objective.reference != "online":
            rows = len(samples.in_order())
            size = format_bytes(samples.piece_count * REFERENCE_BYTES)
            when = f"before the first step, of {rows:,} samples: {size} beside the token cache"
        facts.append(("reference", f"{objective.reference}, log-probabilities {when}"))
    section = recipe.train.distill
    if section is not None:
        tokens = sum(text.corpus.token_count(text.split) for text in corpora.sources.values())
        size = format_bytes(tokens * section.token_bytes)
        facts.append(("teacher", f"{section.teacher}, top {section.top_k} tokens: {size} beside the token cache"))
    return facts


def describe_validation(recipe: Recipe, corpora: Corpora) -> list[tuple[str, str]]:
    """Describe the validation sets that are texts of their own."""
    if recipe.data.validation is None and not corpora.finds_validation:
        return []
    origin = " of split validation" if recipe.data.validation is None else ""
    return [("validation", _set(name, text, origin)) for name, text in corpora.validation.items()]


def _set(name: str, text: OpenText, origin: str) -> str:
    """A validation set: its name, and where it is from."""
    tokens = f"{format_count(text.corpus.token_count(text.split))} tokens"
    if text.split == "eval":
        return f"{name}: {tokens} held out"
    return f"{name}{': ' * bool(name)}{text.section.source}, {tokens}{origin}"
