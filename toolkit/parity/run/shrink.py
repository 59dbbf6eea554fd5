"""A recipe with a tiny model of the same family and little text: to compare strategies where the real one is slow."""

from toolkit.config.data_section import PREFERENCE_FORMATS, DataSection
from toolkit.config.objective_section import ObjectiveSection
from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError
from toolkit.model_init.build_model import load_config
from toolkit.models.shape import DERIVED_FIELDS
from toolkit.parallel.tiny_model import tiny_config

VOCABULARY = 321  # odd, so that every tp pads it; and room for a byte-level tokenizer
SEQ_LEN = 32
GLOBAL_SIZE = 16
_OF_ROWS = (
    "sources",
    "validation",
    "subset",
    "split",
    "format",
    "text_field",
    "train_on",
    "overlong",
    "bos",
    "separator",
)
"""Fields of `data` that say how a row of the recipe's own text becomes tokens."""
_NO_SIZES = ("architectures", "dtype", "transformers_version", "_name_or_path")


def shrink(recipe: Recipe) -> Recipe:
    """Return the recipe with a model of 4 layers and 4 heads, and samples of up to 32 tokens of a synthetic text.

    Everything else stays as it is.

    Samples have unequal numbers of targets, so that a loss that is averaged over micro-batches or ranks instead of
    tokens is another loss: a sample holds one document and padding, or where documents are masked, several, whose first
    tokens are not targets.

    The tiny config is written as overrides of the recipe's, so that a command can repeat it. What is tied stays tied.
    Raises ModelError where no tiny config of the family is known, and RecipeError for pretrained weights, which a tiny
    model cannot take.
    """
    if recipe.model.init == "pretrained":
        settings = (("--shrink", True), ("model.init", "pretrained"))
        reason = "a tiny model has no pretrained weights"
        advice = "leave --shrink out"
        raise RecipeError.between(settings, reason, ("model.init", "random"), advice)
    config = load_config(recipe.model)
    tied = {key: value for key in ("tie_word_embeddings",) if (value := getattr(config, key, None)) is not None}
    tiny = tiny_config(config.model_type, vocab_size=VOCABULARY, **tied).to_dict()
    plain = load_config(recipe.model.model_copy(update={"overrides": {}})).to_dict()
    wanted = {name for name in plain.keys() & tiny.keys() if plain[name] != tiny[name]} - {*_NO_SIZES}
    wanted |= (recipe.model.overrides.keys() | DERIVED_FIELDS.keys()) & tiny.keys()
    overrides = {name: value for name, value in tiny.items() if name in wanted}
    # Rows of the recipe's own format have no place in it; what is masked stays masked, which needs whole samples.
    data = {name: DataSection.model_fields[name].default for name in _OF_ROWS}
    data |= {
        "source": "markov",
        "tokenizer": "bpe-257",
        "seq_len": SEQ_LEN,
        "packing": "packed" if recipe.data.masks_documents else "padded",
        "document_masking": recipe.data.masks_documents,
    }
    batch = {"global_batch_size": GLOBAL_SIZE, "micro_batch_size": min(4, recipe.batch.micro_batch_size or 4)}
    changes = {"model": {"overrides": overrides}, "data": data, "batch": batch}
    changes["train"] = {"distill": None}  # a teacher has another vocabulary
    if recipe.data.format in PREFERENCE_FORMATS:
        changes["train"] |= {"objective": ObjectiveSection()}  # a text has nothing that an objective compares
    return recipe.changed(changes)
