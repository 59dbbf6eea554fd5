"""The catalogue: counts against what was published about each model, and the names that people write."""

import pytest
from refusals import refused

from toolkit.errors import ModelError
from toolkit.estimate.model_facts import ModelFacts
from toolkit.models import shape
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.shape import ModelShape, find_config, find_name, local_config, nearest_names
from toolkit.models.support import find
from toolkit.models.weights import matmul_parameters

KERAS = "github.com/keras-team/keras-hub keras_hub/src/models/*/*_presets.py, params"
HUB = "huggingface.co/api/models/{} safetensors.total, as quoted by "
KVFIT = HUB + "github.com/debaditc/kvfit src/kvfit/data/models.json"

PUBLISHED = {
    "llama-3.1-8b": (8030261248, KERAS),
    "llama-3.1-70b": (70553706496, HUB + "a study of training runs, with the revision 349b2ddb53ce"),
    "llama-3.1-405b": (405853388800, HUB + "a study of training runs, with the revision b906e4dc842a"),
    "llama-3.3-70b": (70553706496, KVFIT),
    "smollm3-3b": (3075098624, HUB + "a study of training runs, with the revision d78a42f79198 of -Base"),
    "mistral-7b": (7241732096, KERAS),
    "mistral-7b-v0.3": (7248023552, KERAS),
    "mistral-nemo": (12247782400, KVFIT),
    "mixtral-8x7b": (46702792704, KERAS),
    "mixtral-8x22b": (140630071296, HUB + "a list of models, total_parameters_source: safetensors"),
    "qwen2.5-0.5b": (494032768, KERAS),
    "qwen2.5-3b": (3085938688, KERAS),
    "qwen2.5-7b": (7615616512, KVFIT),
    "qwen2.5-14b": (14770033664, "general.parameter_count of its GGUF file"),
    "qwen2.5-32b": (32763876352, KERAS),
    "qwen2.5-72b": (72706203648, KERAS),
    "qwen3-0.6b": (596049920, KERAS),
    "qwen3-1.7b": (1720574976, KERAS),
    "qwen3-4b": (4022468096, KERAS),
    "qwen3-8b": (8190735360, KERAS),
    "qwen3-14b": (14768307200, KERAS),
    "qwen3-32b": (32762123264, KERAS),
    "qwen3-30b-a3b": (30532122624, KERAS),
    "qwen3-235b-a22b": (235093634560, KERAS),
    "gemma-2-2b": (2614341888, KERAS),
    "gemma-2-9b": (9241705984, KERAS),
    "gemma-2-27b": (27227128320, KERAS),
    "gemma-3-270m": (268098176, KERAS),
    "gemma-3-1b": (999885952, KERAS),
    # Keras counts the text model without the 64 rows of the vocabulary that no token has.
    "gemma-3-4b": (3880099328 + 64 * 2560, KERAS),
    "gemma-3-12b": (11765788416 + 64 * 3840, KERAS),
    "gemma-3-27b": (27009002240 + 64 * 5376, KERAS),
    "phi-4": (14659507200, KVFIT),
    "phi-4-mini": (3836021760, KVFIT),
    "olmo-2-1b": (1484916736, HUB + "audits of OLMo-2-0425-1B-Instruct"),
    "olmo-2-7b": (7298617344, HUB + "a study of training runs, with the revision 7df9a82518af"),
    "olmo-2-13b": (13716198400, HUB + "a study of training runs, with the revision 3fefddc1bf18"),
    "olmo-2-32b": (32234279936, HUB + "a table of training FLOPs beside the OLMo 2 paper's"),
    # The files hold the tied head a second time.
    "falcon-7b": (7217189760 - 65024 * 4544, HUB + "a table of training settings"),
    "falcon-40b": (83671941120 // 2 - 65024 * 8192, "total_size of model.safetensors.index.json, in bf16"),
    "mpt-7b": (13298573312 // 2, "total_size of pytorch_model.bin.index.json, in bf16"),
    "olmoe-1b-7b": (6919161856, HUB + "the OLMoE repository's list of checkpoints"),
    "gpt-oss-20b": (20914757184, KERAS),
    "gpt-oss-120b": (116829156672, KERAS),
    "deepseek-v2-lite": (15706484224, "what github.com/foldl/chatllm.cpp prints for it"),
    # The files hold the biases of 58 routers over 256 experts, which transformers keeps as buffers.
    "deepseek-v3": (671026419200 - 58 * 256, "an audit of the headers of its 163 files: elements of the main model"),
}
"""Entry -> parameters, tied weights once, and where they were published ({}: the model's name there)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_entry_counts_what_was_published(name):
    # that the entry's config has these parameters: test_shape.py
    assert shape._catalogue()[name]["_parameters"] == PUBLISHED[name][0]


ACTIVE = {
    "mixtral-8x7b": (12.9, True, "Jiang et al. 2024 (arXiv 2401.04088): 13B, its model card 12.9B"),
    "mixtral-8x22b": (39.1, True, "mistral.ai, Cheaper, Better, Faster, Stronger: 39B"),
    "qwen3-30b-a3b": (3.3, True, "its model card: 3.3B activated"),
    "qwen3-235b-a22b": (22.2, True, "its model card: 22B activated"),
    "olmoe-1b-7b": (1.28, True, "Muennighoff et al. 2024 (arXiv 2409.02060), table 1: 1.3B active"),
    "gpt-oss-20b": (3.61, False, "arXiv 2508.10925, table 1: 3.61B, with the unembedding alone"),
    "gpt-oss-120b": (
        5.13,
        False,
        "arXiv 2508.10925, table 1: 5.13B, with the unembedding alone",
    ),
    "deepseek-v2-lite": (2.45, False, "its model card: 2.4B activated"),
    "deepseek-v3": (37.5, True, "DeepSeek-AI 2024 (arXiv 2412.19437): 37B activated"),
}
"""Entry -> billions of parameters that a token goes through, with the embedding's or not, and where they stand."""


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_goes_through_the_parameters_that_were_published(name):
    billions, with_embedding, _ = ACTIVE[name]
    shape = ModelFacts.from_config(find_config(name)).shape
    table = shape.vocab * shape.hidden if with_embedding and not shape.tied else 0
    assert matmul_parameters(shape) + table == pytest.approx(billions * 1e9, rel=0.02)


NAMES = [
    ("GPT2", "gpt2"),
    ("openai-community/gpt2", "gpt2"),
    ("gpt2_XL", "gpt2-xl"),
    ("llama3.1-8b", "llama-3.1-8b"),
    ("Llama-3-70B", "llama-3-70b"),
    ("llama3-70b", "llama-3-70b"),
    ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
    ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
    ("meta-llama/llama3-70b", "llama-3-70b"),
    ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
    ("mistral-7b-v0.1", "mistral-7b"),
    ("EleutherAI/pythia-70m-deduped", "pythia-70m"),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
    ("bigscience/bloom", "bloom-176b"),
    ("opt1.3b", "opt-1.3b"),
    ("opt-13b", "opt-13b"),
    ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
    ("gptoss-20b", "gpt-oss-20b"),
    ("phi4-mini", "phi-4-mini"),
]
TUNED = [
    ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
    ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
    ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
    ("google/gemma-3-4b-it", "gemma-3-4b"),
]
OTHERS = ["someone/gpt2", "gpt2-huge", "gemma-22b", "mistralai/Mistral-7B-v0.2", "_aliases", "_about", "", "/", "-"]


@pytest.mark.parametrize(("name", "entry"), NAMES)
def test_an_entry_is_found_in_any_case_and_spelling_and_by_its_hub_name(name, entry):
    assert find_name(name) == entry
    assert find_config(name) == find_config(entry)


@pytest.mark.parametrize(("name", "entry"), TUNED)
def test_an_estimate_takes_tuned_weights_for_their_base_and_a_run_does_not(name, entry):
    assert local_config(name) == find_config(entry)
    assert find_name(name) is None


@pytest.mark.parametrize("name", OTHERS)
def test_another_models_name_is_not_found(name):
    assert find_name(name, tuned=True) is None


@pytest.mark.parametrize("tuned", [False, True])
def test_no_two_entries_share_a_spelling(tuned):
    published = [(shape.hub_spelling(entry), entry) for entry in shape.names()]
    assert len([hub for hub, _ in published if hub]) > 80
    assert [entry for hub, entry in published if find_name(hub or entry, tuned=tuned) != entry] == []
    assert len({shape._spelling(entry, tuned) for entry in shape.names()}) == len(shape.names())


def test_a_directory_comes_before_a_loose_spelling_and_after_an_exact_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("llama3-8b", "llama-3-8b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "gpt2"}')
    assert find_config("llama3-8b") == {"model_type": "gpt2"}
    assert find_config("llama-3-8b")["model_type"] == "llama"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("someone/Llama3-70B", " Did you mean llama-3-70b?"),
        ("qwen2.5-8b", " Did you mean qwen2.5-7b, qwen2.5-3b or qwen2.5-72b?"),
        ("zzzz", ""),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name, says):
    assert nearest_names(name) == says


EXPERTS = [name for name in shape.names() if find_config(name)["model_type"] not in CONFIG_SCHEMAS]


def test_the_shape_of_an_entry_with_experts_is_not_read_from_its_config_alone():
    assert len(EXPERTS) == 9
    for name in EXPERTS:
        config = find_config(name)
        assert find(config["model_type"]).supports("pipeline")
        with refused(ModelError, "model_type", remedy=f"see dstk families {config['model_type']}") as found:
            ModelShape.from_config(config)
        assert len(str(found[0])) < 200
