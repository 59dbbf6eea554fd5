"""Layouts of the gallery's recipes pass their rehearsal at full size.

All of them take hours on one machine. .github/workflows/rehearsals.yml divides them: with SHARD=3/16 in the environment
every sixteenth is collected, from the third on.
"""

import os

import pytest

from toolkit.config import load_recipe, recipe_layouts
from toolkit.config.gallery import gallery
from toolkit.config.job import Job
from toolkit.recorder.rehearsal.preload import preload
from toolkit.recorder.rehearsal.rehearse import rehearse


def runs() -> list[tuple[str, str]]:
    """Return the recipe and the layout of each run that the gallery lists for DeepSpeed, of this shard."""
    shard, _, shards = os.environ.get("SHARD", "1/1").partition("/")
    listed = []
    for name, path in gallery().items():
        for layout in dict.fromkeys(recipe_layouts(path)):
            if layout.strategy.engine == "deepspeed":
                listed.append((name, layout.text))
    return listed[int(shard) - 1 :: int(shards)]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "layout"), runs())
def test_every_layout_of_the_gallery_passes(name: str, layout: str) -> None:
    preload(debug=False)
    path = gallery()[name]
    ranks = next(listed.ranks for listed in recipe_layouts(path) if listed.text == layout)
    job = Job.of(load_recipe(path, world_size=ranks, layout=layout), ranks)
    assert not rehearse(job).problem
