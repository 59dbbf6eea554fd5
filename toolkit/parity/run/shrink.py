"""A recipe with a tiny model of the same family and little text: to compare strategies where the real one is slow."""

from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError
from toolkit.model_init.build_model import load_config
from toolkit.models.shape import DERIVED_FIELDS
from toolkit.parallel.tiny_model import tiny_config

VOCABULARY = 321  # odd, so that every tp pads it; and room for a byte-level tokenizer
SEQ_LEN = 32
GLOBAL_SIZE = 16
_NO_SIZES = ("architectures", "dtype", "transformers_version", "_name_or_path")


def shrink(recipe: Recipe) -> Recipe:
    """4 layers, 4 heads, samples of 32 tokens of a synthetic text; the rest as it is.

    The tiny config is written as overrides of the recipe's, so that a command can repeat it. What is tied stays tied.
    Raises ModelError where no tiny config of the family is known, and RecipeError for pretrained weights, which a tiny
    model cannot take.
    """
    if recipe.model.init == "pretrained":
        given = (("--shrink", True), ("model.init", "pretrained"))
        reason, advice = "a tiny model has no pretrained weights", "leave --shrink out"
        raise RecipeError.between(given, reason, ("model.init", "random"), advice)
    config = load_config(recipe.model)
    tied = {key: value for key in ("tie_word_embeddings",) if (value := getattr(config, key, None)) is not None}
    tiny = tiny_config(config.model_type, vocab_size=VOCABULARY, **tied).to_dict()
    plain = load_config(recipe.model.model_copy(update={"overrides": {}})).to_dict()
    wanted = {name for name in plain.keys() & tiny.keys() if plain[name] != tiny[name]} - {*_NO_SIZES}
    wanted |= (recipe.model.overrides.keys() | DERIVED_FIELDS.keys()) & tiny.keys()
    overrides = {name: value for name, value in tiny.items() if name in wanted}
    text = {"source": "markov", "subset": None, "split": "train", "text_field": "text"}
    data = {**text, "tokenizer": "bpe-257", "seq_len": SEQ_LEN}
    batch = {"global_batch_size": GLOBAL_SIZE, "micro_batch_size": min(4, recipe.batch.micro_batch_size or 4)}
    return recipe.changed({"model": {"overrides": overrides}, "data": data, "batch": batch})
