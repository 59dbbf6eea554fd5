"""Tokenize a corpus on many machines: each makes a shard, and the last one, or `merge_shards`, makes the token cache.

    <cache_dir>/<source>-<tokenizer>-<digest>.shards/
        00001-of-00004/             a shard (`shard.py`)
        .00002-of-00004.partial/    one that is not complete
        <digest>/tokenizer/         a bpe-N that was trained for all shards

The digest is of the settings, not of the text: machines whose source or tokenizer differ meet there, and are told so.
The cache is the same, byte for byte, as that of one process.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.config.data_section import DataSection
from toolkit.data.documents import remote
from toolkit.data.documents.part import SourcePart
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.data.tokens.shard import MANIFEST, TOKENIZER, TokenShard, is_complete
from toolkit.data.tokens.token_cache import Corpus, TokenCorpus, open_cache
from toolkit.errors import DataError, RunError
from toolkit.files import expanded, published, sync
from toolkit.remote_files import is_url

_OF_SAMPLES = {"seq_len", "packing", "document_masking", "overlong", "eval_fraction", "workers", "cache_dir"}
"""Fields that do not change a shard."""
_NAME = re.compile(r"[0-9]{5}-of-[0-9]{5}")


def make_shard(
    section: DataSection, part: SourcePart, *, folder: str | None, progress: bool
) -> TokenShard | TokenCorpus:
    """Tokenize a part. Return the cache, if there is one or this was the last shard that was missing beside it.

    `folder`: where shards go, a directory or a URL, if not beside the cache. Raises DataError or RunError.
    """
    corpus = Corpus.of(section)
    shards, places = _folders(corpus, folder)
    partial = shards / f".{part.name}.partial"
    place = f"{places}/{part.name}"
    with corpus.locked(shards.with_name(f"{shards.name}.{part.name}"), progress=progress):
        if corpus.cache.is_dir():
            return open_cache(corpus.cache)
        with corpus.removed_on_failure(partial):
            _train_tokenizer(corpus, shards, partial)
            if not is_complete(place, part, corpus.job(corpus.save_tokenizer(partial))[1]):
                corpus.tokenize(partial, part, progress=progress)
                _move(partial, place)
        shutil.rmtree(partial, ignore_errors=True)
    is_last = all((shards / other.name / MANIFEST).is_file() for other in _all(part.count))
    return merge_shards(section, folder=None) if folder is None and is_last else TokenShard(place, part)


def _move(partial: Path, place: str) -> None:
    """Put a complete shard in its place, in the place of one of another state of the source."""
    if is_url(place):
        with _about_shards(place):
            remote.upload(partial, place, last=MANIFEST)
        return
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)
    sync(Path(place).parent)


@contextmanager
def _about_shards(place: str) -> Iterator[None]:
    """Report refusals of a server inside as errors about `--shards`.

    They are not about the source, and no reason to remove what was made.
    """
    try:
        yield
    except DataError as error:
        refusal = error.as_refusal()
        raise RunError.of("--shards", place, refusal.reason, *refusal.remedy) from None


def merge_shards(section: DataSection, *, folder: str | None) -> TokenCorpus:
    """Make the token cache from all shards, and delete them if they are beside it. Raises DataError."""
    corpus = Corpus.of(section)
    shards, _ = _folders(corpus, folder)
    with corpus.locked(corpus.cache, progress=False):
        if not corpus.cache.is_dir():
            corpus.publish(open_shards(corpus, folder))
    if folder is None:
        shutil.rmtree(shards, ignore_errors=True)
    return open_cache(corpus.cache)


def _folders(corpus: Corpus, folder: str | None) -> tuple[Path, str]:
    """Return the folder in which shards are made, and the folder or URL where they are when they are complete."""
    settings = json.dumps(corpus.section.model_dump(mode="json", exclude=_OF_SAMPLES), sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
    name = f"{corpus.cache.name.rpartition('-')[0]}-{digest}.shards"
    if folder is not None and is_url(folder):
        return corpus.cache.parent / name, f"{folder.rstrip('/')}/{name}"
    shards = (corpus.cache.parent if folder is None else expanded(folder)) / name
    return shards, str(shards)


def _all(count: int) -> list[SourcePart]:
    return [SourcePart(number=number, count=count) for number in range(1, count + 1)]


def _train_tokenizer(corpus: Corpus, shards: Path, partial: Path) -> None:
    """Give a shard the bpe-N that one of the machines trains for all of them."""
    if corpus.loaded is not None or (partial / TOKENIZER).is_dir():
        return
    facts = (corpus.source.fingerprint, tokenizers.identity(corpus.section, None))
    trained = shards / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    with corpus.locked(shards.with_name(f"{shards.name}.{TOKENIZER}"), progress=False):
        saved = corpus.save_tokenizer(trained)
    with published(partial / TOKENIZER) as temporary:
        shutil.copytree(saved, temporary, dirs_exist_ok=True)


def open_shards(corpus: Corpus, place: str | None) -> list[TokenShard]:
    """Open the shards, after checking that none is missing and that they belong together. Raises DataError."""
    folder = _folders(corpus, place)[1]
    if is_url(folder):
        with _about_shards(folder):
            names = remote.names(folder)
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    parts = [SourcePart(number=int(name[:5]), count=int(name[9:])) for name in sorted(names) if _NAME.fullmatch(name)]
    if not parts:
        raise DataError(f"{folder}: there are no shards. Make them: --shard 1/n, on as many machines as you like.")
    counts = sorted({part.count for part in parts})
    if len(counts) > 1:
        spelled = " and ".join(map(str, counts))
        raise DataError(f"{folder}: there are shards of {spelled} parts. Delete those of one of them.")
    missing = [part for part in _all(counts[0]) if part not in parts]
    if missing:
        some = ", ".join(map(str, missing[:8])) + ", …" * (len(missing) > 8)
        raise DataError(f"{folder}: missing: {some}. Make {'it' if len(missing) == 1 else 'each'} with --shard.")
    shards = [TokenShard(f"{folder}/{part.name}", part) for part in parts]
    _check_alike(corpus, shards)
    return shards


def _check_alike(corpus: Corpus, shards: Sequence[TokenShard]) -> None:
    first = shards[0]
    for shard in shards[1:]:
        for key, value in first.of.items():
            if shard.of.get(key) != value:
                raise DataError(
                    f"{shard.place}: shard {shard.part} has another {key} than shard {first.part}. "
                    "Make both again from the same text with the same tokenizer and version."
                )
    now = {"source": corpus.source.fingerprint}
    if corpus.loaded is not None:
        now["tokenizer"] = tokenizers.identity(corpus.section, corpus.loaded)
    for key, value in now.items():
        if first.of[key] != value:
            field = f"data.{key}"
            reason = f"it is not what the shards in {os.path.dirname(first.place)} were made of"
            raise DataError.of(field, getattr(corpus.section, key), reason, "make them again")
