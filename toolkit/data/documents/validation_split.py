"""The `validation` split of a dataset, which is the validation text where there is one."""

import glob
import json
from pathlib import Path

from toolkit.config.data_section import DataSection
from toolkit.config.megatron_prefix import megatron_prefix
from toolkit.data.documents.sources import DatasetSource, StreamedSource, open_source
from toolkit.files import expanded
from toolkit.remote_files import is_url

VALIDATION = "validation"


def validation_split(section: DataSection) -> DataSection | None:
    """Return the section of the source's `validation` split; None where it has none, or is that split itself."""
    if section.split == VALIDATION or VALIDATION not in _splits(section):
        return None
    return section.model_copy(update={"split": VALIDATION, "eval_fraction": 0.0})


def _splits(section: DataSection) -> list[str]:
    name = section.source
    path = expanded(name)
    listed = path / "dataset_dict.json"
    if listed.is_file():
        return _listed(listed)
    is_text = name in ("stdlib", "markov") or megatron_prefix(name) is not None
    if is_text or is_url(name) or path.exists() or glob.has_magic(name):
        return []
    source = open_source(section)
    return list(source.splits) if isinstance(source, DatasetSource | StreamedSource) else []


def _listed(path: Path) -> list[str]:
    try:
        return [str(split) for split in json.loads(path.read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # datasets.load_from_disk says what is wrong
