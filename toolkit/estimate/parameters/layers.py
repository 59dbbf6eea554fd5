"""The parameters of one decoder layer, family by family, in the order in which Hugging Face's modules name them.

What a family's code fixes stands in the functions; what its config says is asked of `Facts`.
"""

from collections.abc import Callable

from toolkit.estimate.parameters.facts import Facts
from toolkit.estimate.parameters.gpt import GPT_LIKE
from toolkit.estimate.parameters.linear import Tensors
from toolkit.estimate.parameters.llama import LLAMA_LIKE

LAYERS: dict[str, Callable[[Facts], Tensors]] = {**GPT_LIKE, **LLAMA_LIKE}
"""The families of `toolkit.shape`, but for those that run another's code."""
