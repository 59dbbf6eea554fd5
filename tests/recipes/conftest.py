"""recipes/train.py on forked ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_script import train_here

from toolkit import recipe_file
from toolkit.recipe import Recipe

Train = Callable[..., str]


@pytest.fixture
def train(make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], tmp_path: Path) -> Train:
    """Train a varied small recipe in tmp_path; what rank 0 printed."""

    def run(*argv: str, world_size: int = 1, **changes: Any) -> str:
        recipe = make_recipe(**({"train__steps": 4} | changes))
        (tmp_path / "small.yaml").write_text(recipe_file.dump(recipe))
        arguments = ["--config", "small.yaml", *argv]
        return ranks(train_here, world_size, str(tmp_path), arguments, joined=False)[0]

    return run
