"""Job: one training job, with everything that follows from its recipe and its number of ranks."""

from dataclasses import dataclass
from typing import Self

from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe on a number of ranks. `shape` is None where the model's config defines no GPT that is known here."""

    recipe: Recipe
    layout: Layout
    batch: Batch
    shape: ModelShape | None = None
    plan: str = ""
    """The layout that `parallel: auto` chose, on one line; empty without a plan."""

    @classmethod
    def of(cls, recipe: Recipe, world_size: int, shape: ModelShape | None = None) -> Self:
        """The job on `world_size` ranks. Raises LayoutError and BatchError where the recipe does not fit them."""
        layout = recipe.layout(world_size)
        return cls(recipe=recipe, layout=layout, batch=recipe.resolve_batch(layout), shape=shape)

    @property
    def strategy(self) -> str:
        """The job's way to spread over ranks, in a few words: the layout, or for engines without ZeRO their name."""
        return self.recipe.strategy(self.layout)
