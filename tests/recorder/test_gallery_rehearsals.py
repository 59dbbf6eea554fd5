"""Layouts of the gallery's recipes pass their rehearsal.

LAYERS=2 in the environment gives each pipeline stage two decoder layers, as the tests of every change do. At their full
size all of them take hours on one machine: .github/workflows/rehearsals.yml divides them every week. With SHARD=3/16
every sixteenth is collected, from the third on.
"""

import os

import pytest

from toolkit.config import load_recipe, recipe_layouts
from toolkit.config.gallery import gallery
from toolkit.config.job import Job
from toolkit.recorder.rehearsal.preload import preload
from toolkit.recorder.rehearsal.rehearse import rehearse


def runs() -> list[tuple[str, str, int]]:
    """Return recipe, layout and ranks of each run that the gallery lists for DeepSpeed, of this shard."""
    shard, _, shards = os.environ.get("SHARD", "1/1").partition("/")
    listed = [
        (name, layout.text, layout.ranks)
        for name, path in gallery().items()
        for layout in recipe_layouts(path)
        if layout.strategy.engine == "deepspeed"
    ]
    return list(dict.fromkeys(listed))[int(shard) - 1 :: int(shards)]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "layout", "ranks"), runs())
def test_every_layout_of_the_gallery_passes(name: str, layout: str, ranks: int) -> None:
    preload(debug=False)
    job = Job.of(load_recipe(gallery()[name], world_size=ranks, layout=layout), ranks)
    layers = os.environ.get("LAYERS")
    assert not rehearse(job, layers=int(layers) if layers else None).problem
