"""A recipe with a tiny model of the same family and little text: to compare strategies where the real one is slow."""

from pathlib import Path

from toolkit.errors import RecipeError
from toolkit.families.tiny import tiny_config
from toolkit.recipe import Recipe
from toolkit.train.model import load_config

VOCABULARY = 321  # odd, so that every tp pads it; and room for a byte-level tokenizer
SEQ_LEN = 32
GLOBAL_SIZE = 16


def shrink(recipe: Recipe, folder: Path) -> Recipe:
    """4 layers, 4 heads, samples of 32 tokens of a synthetic text; the rest as it is. The config is put into `folder`.

    What the recipe's config ties stays tied. Raises ModelError where no tiny config of the family is known, and
    RecipeError for pretrained weights, which a tiny model cannot take.
    """
    if recipe.model.init == "pretrained":
        raise RecipeError(
            "--shrink with model.init=pretrained: a tiny model has no pretrained weights. Add the override "
            "model.init=random, or leave --shrink out."
        )
    config = load_config(recipe.model)
    tied = getattr(config, "tie_word_embeddings", None)
    tiny = tiny_config(
        config.model_type,
        vocab_size=VOCABULARY,
        **({} if tied is None else {"tie_word_embeddings": tied}),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tiny.save_pretrained(folder)
    model = recipe.model.model_copy(update={"name_or_path": str(folder), "overrides": {}})
    data = recipe.data.model_copy(
        update={
            "source": "markov",
            "subset": None,
            "split": "train",
            "text_field": "text",
            "tokenizer": "bpe-257",
            "seq_len": SEQ_LEN,
        }
    )
    batch = recipe.batch.model_copy(update={"global_size": GLOBAL_SIZE, "micro_size": min(4, recipe.batch.micro_size)})
    return recipe.model_copy(update={"model": model, "data": data, "batch": batch})
