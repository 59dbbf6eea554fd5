"""Import once, in the process that starts ranks, what each of them would import. Imports torch when it is called."""

import os

from toolkit.config.recipe import Recipe
from toolkit.imports import no_garbage_collection
from toolkit.launch.output import quiet
from toolkit.models.shape import find_config


def preload_training(recipe: Recipe) -> None:
    """Import what training the recipe needs, without initializing CUDA."""
    quiet(debug=recipe.log.level == "debug")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with no_garbage_collection():
        import toolkit.training.train
        from toolkit.launch.local_ranks import preload

        if recipe.train.engine == "deepspeed":
            import toolkit.engines.pipeline_engine
            import toolkit.engines.ulysses_engine  # noqa: F401
    config = find_config(recipe.model.name_or_path)
    if config:
        preload(str(config["model_type"]))
    else:
        preload()
