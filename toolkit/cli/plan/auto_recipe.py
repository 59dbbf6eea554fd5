"""A recipe that leaves its layout or its schedule to a plan, in a command that answers for one: planned for ranks."""

import click

from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError


def explicit(recipe: Recipe, ranks: int | None, gpu: str | None, *, option: str = "--world-size") -> Recipe:
    """The recipe with its plan in it, which is said on stderr; unchanged where it leaves nothing open.

    `gpu`: a kind, or `cpu`. Raises RecipeError without a number of ranks, which `option` gives.
    """
    if not recipe.parallel.is_planned:
        return recipe
    if ranks is None:
        field = "parallel.auto" if recipe.parallel.auto else "parallel.schedule"
        raise RecipeError.of(
            field, recipe.value_of(field), "a plan is for a number of ranks", f"say how many with {option}"
        )
    from toolkit.planner.auto.plan_recipe import planned
    from toolkit.planner.auto.ranks import cluster_named

    cluster, on = cluster_named(gpu, ranks)
    plan = planned(recipe, cluster, ranks, on=on)
    click.echo(f"note: planned {plan.note}.", err=True)
    return plan.recipe
