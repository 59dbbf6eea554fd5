"""Write the tables of docs/configs.md: bucket sizes by link, and every key of a generated config.

python docs/generate_configs.py

Only what is between the markers is replaced; the rest of the page is written by hand.
"""

import json
from pathlib import Path
from typing import Any

from toolkit.config.layout import Layout
from toolkit.dsconfig.buckets import derive, link_of, of_a_layer, smallest_bytes
from toolkit.dsconfig.build import shape_of
from toolkit.dsconfig.explain import KEYS, has_computed_default
from toolkit.hardware import gpu
from toolkit.units import format_bytes

PAGE = Path(__file__).parent / "configs.md"
_GPUS = ("T4", "RTX4090", "A100-SXM-80GB", "H100-SXM-80GB", "MI300X")
_BY_OTHERS = {
    "zero_optimization.overlap_comm": "true at stage 3, else false",
    "optimizer": "of the optimizer's class",
    "scheduler": "of the schedule's class",
}


def page(current: str) -> str:
    """`current` with the tables between the markers made new."""
    for name, table in (("buckets", buckets()), ("keys", keys())):
        begin, end = f"<!-- {name}: written by docs/generate_configs.py -->", f"<!-- end of {name} -->"
        before, _, rest = current.partition(begin)
        current = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return current


def buckets() -> str:
    """One row a GPU, for GPT-2 XL at dp8-z2."""
    shape, layout = shape_of("gpt2-xl"), Layout.parse("dp8-z2")
    lines = ["| `--gpu` | a collective needs | bucket |", "|---|---|---|"]
    lines.append(f"| none given | | {of_a_layer(shape.hidden).reduce:,} |")
    for name in _GPUS:
        link = link_of(gpu(name), layout, gpus_per_node=8, network_bytes_per_second=12.5e9)
        size = derive(shape, layout, link).reduce
        lines.append(f"| {name} | {format_bytes(smallest_bytes(link))} | {size:,} |")
    return "\n".join(lines)


def keys() -> str:
    """Every key, what it does, and DeepSpeed's default."""
    rows = [f"| `{path}` | {key.purpose} | {_default(path)} |" for path, key in KEYS.items()]
    return "\n".join(["| key | what it does | default |", "|---|---|---|", *rows])


def _default(path: str) -> str:
    if has_computed_default(path):
        return _BY_OTHERS.get(path) or _BY_OTHERS[path.partition(".")[0]]
    return _shown(KEYS[path].default)


def _shown(value: Any) -> str:
    return "none" if value is None else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
