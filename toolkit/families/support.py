"""Support: which families of Hugging Face's causal LMs can be cut, and why the others cannot.

`support.json` holds what docs/generate_families.py found when it cut a tiny model of every family and compared loss and
gradients with the whole one (toolkit/parallel/family_check.py). It is read without torch.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "support.json"
NOT_CHECKED = "not checked yet"


@dataclass(frozen=True, kw_only=True)
class Support:
    """What was found about one family. A refusal says why not; None means that the cut is exact."""

    model_type: str
    pipeline_refusal: str | None
    tensor_refusal: str | None
    sequence_refusal: str | None

    @property
    def pipeline(self) -> bool:
        """Whether it can be cut into pipeline stages."""
        return self.pipeline_refusal is None

    @property
    def tensor(self) -> bool:
        """Whether its layers can be split by tensor parallelism."""
        return self.tensor_refusal is None

    @property
    def sequence(self) -> bool:
        """Whether the activations between those split layers can be split over the sequence."""
        return self.sequence_refusal is None


def find(model_type: str) -> Support | None:
    """What was found about `model_type`; None for one that is no causal LM of the transformers that was checked."""
    return all_families().get(model_type)


def all_families() -> Mapping[str, Support]:
    """Every family by its model type, in the order of the alphabet."""
    return _stored()[1]


def checked_version() -> str:
    """The version of transformers whose families were checked."""
    return _stored()[0]


def encoded(families: Mapping[str, Support], version: str) -> str:
    """The text of support.json."""
    rows = {
        name: {
            "pipeline": support.pipeline_refusal or True,
            "tensor": support.tensor_refusal or True,
            "sequence": support.sequence_refusal or True,
        }
        for name, support in sorted(families.items())
    }
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f'{{\n  "transformers": {json.dumps(version)},\n  "families": {{\n{lines}\n  }}\n}}\n'


@functools.cache
def _stored() -> tuple[str, Mapping[str, Support]]:
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return content["transformers"], {
        name: Support(
            model_type=name,
            pipeline_refusal=_refusal(row["pipeline"]),
            tensor_refusal=_refusal(row["tensor"]),
            sequence_refusal=_refusal(row["sequence"]),
        )
        for name, row in content["families"].items()
    }


def _refusal(stored: Any) -> str | None:
    return None if stored is True else str(stored)
