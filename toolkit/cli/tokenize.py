"""`dstk tokenize`: make a recipe's token cache before training, on one machine or, in shards, on many."""

from typing import TYPE_CHECKING, Any

import click

from toolkit.config import load_recipe

if TYPE_CHECKING:
    from toolkit.config.data_section import DataSection
    from toolkit.data.documents.part import SourcePart
    from toolkit.data.tokens.token_cache import TokenCorpus


class ShardNumber(click.ParamType["SourcePart"]):
    """The number of a shard, and how many there are."""

    name = "shard"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "SourcePart":
        """Parse the text of an option."""
        from toolkit.data.documents.part import SourcePart

        try:
            return value if isinstance(value, SourcePart) else SourcePart.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--layout", help="As in `dstk train`; it does not change the data.")
@click.option("--shard", type=ShardNumber(), metavar="I/N", help="Tokenize only the I-th of N parts, from 1/N to N/N.")
@click.option("--merge", is_flag=True, help="Make the token cache of all shards.")
@click.option(
    "--shards", metavar="DIR", help="Where shards are, a directory or URL; the default is beside the token cache."
)
@click.option("--format", "kind", type=click.Choice(("cache", "megatron")), default="cache", help="What to write.")
@click.option(
    "--output",
    "-o",
    metavar="PREFIX",
    help="Where a dataset of Megatron-LM goes: PREFIX.bin and .idx; of a mixture, PREFIX_NAME of each source.",
)
def command(
    recipe: str,
    overrides: tuple[str, ...],
    layout: str | None,
    shard: "SourcePart | None",
    merge: bool,
    shards: str | None,
    kind: str,
    output: str | None,
) -> None:
    """Tokenize a recipe's data, as a training run would.

    With --shard on many machines, each tokenizes its part of the text. The last one makes the token cache of all, the
    same as that of one machine; if --shards says where shards are, --merge does that. After an interruption, run the
    same command again: it goes on where it was.

    \b
    Examples:
      dstk tokenize recipes/demo.yaml
      dstk tokenize recipes/demo.yaml --shard 2/4
      dstk tokenize recipes/demo.yaml --merge --shards s3://bucket/shards
      dstk tokenize recipes/demo.yaml --format megatron -o corpus/demo
    """
    if (kind == "megatron") != (output is not None):
        raise click.UsageError("--format megatron and --output PREFIX need each other.")
    if kind == "megatron" and shard is not None:
        raise click.UsageError("--shard writes a shard in any case: --merge --format megatron writes their dataset.")
    if merge and shard is not None:
        raise click.UsageError("--shard and --merge exclude each other: merge when all shards are there.")
    if shards is not None and shard is None and not merge:
        raise click.UsageError("--shards is for --shard or --merge.")
    loaded = load_recipe(recipe, overrides, layout=layout)
    data = loaded.data
    if output is not None:
        from toolkit.data.megatron.blend import blend, write_sources

        written = write_sources(loaded, output, merge=merge, shards=shards, progress=True)
        for files in written:
            facts = f"{files.documents:,} documents, {files.tokens:,} tokens of {files.dtype}"
            click.echo(f"{facts} in {files.prefix}.bin and .idx; data.tokenizer={files.tokenizer}")
        if data.sources:
            pairs = zip(blend(loaded, written), written, strict=True)
            click.echo(" ".join(["--data-path", *(f"{weight:.12g} {files.prefix}" for weight, files in pairs)]))
        return
    if shard is None and not merge:
        from toolkit.data.tokens.corpora import prepare_all

        corpora = prepare_all(data, progress=True)
        texts = [*corpora.sources.items(), *corpora.validation.items()]
        for name, corpus in {text.corpus.path: (name, text.corpus) for name, text in texts}.values():
            _print(name, corpus)
        return
    from toolkit.data.tokens.corpora import fields_of, named_sources

    for source in named_sources(data, progress=True):
        with fields_of(source.place, source.corpus_section):
            _print_shard(source.name, source.section, shard, shards)


def _print_shard(name: str, section: "DataSection", shard: "SourcePart | None", folder: str | None) -> None:
    """Tokenize a shard of a source, or merge all of them."""
    from toolkit.data.tokens.shards import make_shard, merge_shards
    from toolkit.data.tokens.token_cache import TokenCorpus

    if shard is None:
        return _print(name, merge_shards(section, folder=folder))
    made = make_shard(section, shard, folder=folder, progress=True)
    if isinstance(made, TokenCorpus):
        return _print(name, made)
    counts = f"{made.counts.documents:,} documents, {made.counts.tokens:,} tokens"
    return click.echo(f"{_label(name)}shard {shard}: {counts} in {made.place}")


def _print(name: str, corpus: "TokenCorpus") -> None:
    tokens = corpus.train_tokens + corpus.eval_tokens
    documents = corpus.train_documents + corpus.eval_documents
    click.echo(f"{_label(name)}{documents:,} documents, {tokens:,} tokens in {corpus.path}")


def _label(name: str) -> str:
    """The name of a source before its line; empty for a corpus of one unnamed source."""
    return f"{name}: " if name else ""
