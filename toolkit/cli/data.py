"""`dstk data`: what a recipe's data are as tokens and samples, and which of them are trained on."""

from typing import TYPE_CHECKING

import click

from toolkit.cli import Count
from toolkit.config import load_recipe
from toolkit.units import plural

if TYPE_CHECKING:
    from toolkit.data.samples.samples import Samples
    from toolkit.data.tokens.corpora import Corpora
    from toolkit.data.tokens.token_cache import TokenCorpus


@click.command
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--layout", help="As in `dstk train`; it does not change the data.")
@click.option("--show", type=Count(min=0), default=0, metavar="N", help="Also print the first N samples.")
def command(recipe: str, overrides: tuple[str, ...], layout: str | None, show: int) -> None:
    """Print what a recipe's data are as tokens and samples.

    Tokenizes them where a training run would, and leaves the token cache to it. Samples are printed in the order of
    training, what is trained on in color (or between » and « where the output is not a terminal).

    \b
    Examples:
      dstk data recipes/demo.yaml
      dstk data chat.yaml --show 2 data.train_on=last_assistant
    """
    from toolkit.data.samples.describe import describe_other_models, describe_validation
    from toolkit.data.samples.loader import training_samples
    from toolkit.data.samples.mixture import MixtureSamples
    from toolkit.data.tokens.corpora import prepare_all

    loaded = load_recipe(recipe, overrides, layout=layout)
    corpora = prepare_all(loaded.data, progress=True)
    samples = training_samples(loaded, corpora)
    facts: list[tuple[str, str]] = []
    if isinstance(samples, MixtureSamples):
        read = samples.shares(loaded.train.steps * loaded.batch.global_batch_size)
        parts = zip(corpora.sources.values(), samples.parts, read, strict=True)
        for text, part, share in parts:
            facts += [("source", share.name), ("share", f"{share} in {loaded.train.steps:,} steps")]
            facts += _facts(text.corpus, part)
    else:
        facts += _facts(corpora.first, samples)
    facts += [*describe_other_models(loaded, corpora, samples), *describe_validation(loaded, corpora)]
    for name, fact in facts:
        click.echo(f"{name:<10}  {fact}")
    for position in range(show):
        _print_sample(corpora, samples, position)


def _facts(corpus: "TokenCorpus", samples: "Samples") -> list[tuple[str, str]]:
    """The tokens and samples of one source."""
    import numpy as np

    lengths = np.diff(corpus.document_offsets("train"))
    median, high = np.percentile(lengths, (50, 95), method="inverted_cdf")
    trained = corpus.train_tokens if corpus.trained_tokens is None else corpus.trained_tokens
    share = trained / corpus.train_tokens
    return [
        ("documents", f"{corpus.train_documents:,}, {corpus.eval_documents:,} held out"),
        ("tokens", f"{corpus.train_tokens:,}, {corpus.eval_tokens:,} held out; {share:.1%} trained on"),
        ("lengths", f"p50 {median:,}, p95 {high:,}, longest {lengths.max():,}"),
        ("samples", samples.summary() or f"{len(samples):,} an epoch of {plural(samples.seq_len, 'token')}"),
        ("cache", str(corpus.path)),
    ]


def _print_sample(corpora: "Corpora", samples: "Samples", position: int) -> None:
    """Print the documents of a sample up to their last target, each token with whether it is one."""
    from itertools import groupby, pairwise

    import numpy as np
    from rich.text import Text

    from toolkit.data.samples.mixture import MixtureSamples
    from toolkit.parallel.loss import IGNORE
    from toolkit.report.terminal import table_console

    console = table_console()
    tokenizer = corpora.tokenizer()
    (index,) = samples.sample_ids(0, [position]).tolist()
    ids, labels = samples.tokens(index)
    starts = np.flatnonzero(samples.position_ids(index) == 0).tolist()
    origin = f" of {samples.source_of(index)}" if isinstance(samples, MixtureSamples) else ""
    console.rule(f"sample {position + 1}{origin}")
    for start, end in pairwise([*starts, samples.seq_len]):
        is_target = labels[start:end] != IGNORE
        used = start + int(np.flatnonzero(is_target)[-1]) + 1 if is_target.any() else start
        tokens = [*ids[start:used].tolist(), *labels[used - 1 : used].tolist()]
        line = Text()
        marks = [False, *is_target.tolist()]
        for trained, run in groupby(zip(tokens, marks, strict=False), key=lambda pair: pair[1]):
            text = str(tokenizer.decode([token for token, _ in run]))
            marked = f"»{text}«" if trained and not console.is_terminal else text
            line.append(marked, style="bold green" if trained else "dim")
        console.print(line, soft_wrap=True)
