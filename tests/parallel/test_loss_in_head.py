"""The loss inside the head, over chunks of tokens, against plain PyTorch on full logits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from allocations import LiveBytes
from nonempty import nonempty
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from toolkit.models.chunked_head import HeadFormula, chunk_tokens, head_formula
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.shard import shard_of
from toolkit.parallel.tensor.vocabulary import shard_head
from toolkit.parallel.tiny_model import VOCABULARY, tiny_config

Ranks = Callable[..., list[Any]]
FAMILIES = ("gpt2", "llama", "gemma2", "cohere", "granite", "gptj")
"""A tied head, a plain one, one with a soft cap, with a factor, with a divisor, and with a bias."""
SAMPLES, POSITIONS, CHUNK = 3, 7, 4


def tiny(family: str, *, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model whose logits are large enough for a soft cap to matter."""
    config = tiny_config(family)
    if hasattr(config, "final_logit_softcapping"):
        config.final_logit_softcapping = 2.0
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_(std=0.3)
        if head.bias is not None:
            head.bias.normal_()
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels; some positions have none, and a whole sample."""
    chance = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, VOCABULARY, (SAMPLES, POSITIONS), generator=chance) for _ in range(2))
    labels[0, 2:5], labels[2], labels[1, 0] = IGNORE, IGNORE, VOCABULARY - 1
    return ids, labels


def plain(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and those of samples, by F.cross_entropy on full logits."""
    ids, labels = batch()
    logits = model(input_ids=ids, use_cache=False).logits.double()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.sum(), losses.view(labels.shape).sum(dim=1).detach()


def inside(model: PreTrainedModel, *, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the head."""
    placed = LossInHead.of(model)
    assert placed is not None
    ids, placed.labels = batch()
    placed.chunk_tokens = lambda tokens, rows: chunk
    loss: torch.Tensor = model(input_ids=ids, use_cache=False).loss
    return loss, placed.take_sample_losses()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("frozen", ["nothing", "head", "all but the head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_full_logits(family: str, frozen: str) -> None:
    expected = tiny(family)
    head = {id(parameter) for parameter in expected.get_output_embeddings().parameters()}
    for parameter in expected.parameters() if frozen != "nothing" else ():
        parameter.requires_grad_((id(parameter) in head) ^ (frozen == "head"))
    model = copy.deepcopy(expected)
    loss, of_samples = plain(expected)
    found, found_of_samples = inside(model)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found_of_samples, of_samples, rtol=1e-12, atol=0)
    (loss / 17).backward()
    (found / 17).backward()
    torch.testing.assert_close(gradients(model), gradients(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_in_fp32_it_is_within_1e_6(family: str) -> None:
    exact, model = tiny(family), tiny(family).float()
    loss, _ = plain(exact)
    found, _ = inside(model)
    torch.testing.assert_close(found.double(), loss, rtol=1e-6, atol=0)
    loss.backward()
    found.backward()
    for name, wanted in gradients(exact).items():
        assert float((gradients(model)[name] - wanted).norm() / wanted.norm()) < 1e-6, name


def split(family: str) -> bool:
    """Compare this rank's part of the head, and what it hands back."""
    group = dist.group.WORLD
    assert group is not None
    expected = tiny(family)
    model = copy.deepcopy(expected)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # a tied embedding stays whole here
    shard_head(head, "head", group)
    loss, of_samples = plain(expected)
    loss.backward()
    found, found_of_samples = inside(model)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found_of_samples, of_samples, rtol=1e-12, atol=0)
    wanted = gradients(expected)
    tied = expected.get_input_embeddings().weight is expected.get_output_embeddings().weight
    for name, gradient in gradients(model).items():
        if any(gradient is parameter.grad for parameter in head.parameters()):
            if not tied:
                own = next(each for each in head.parameters() if each.grad is gradient)
                full = dict(expected.get_output_embeddings().named_parameters())[name.rpartition(".")[2]].grad
                torch.testing.assert_close(gradient, shard_of(own).take(full), rtol=1e-9, atol=1e-12)
        elif not tied or ("emb" not in name and "wte" not in name):
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
    return True


@pytest.mark.parametrize("family", ["llama", "gemma2", "gptj"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_over_a_split_vocabulary_every_rank_has_the_loss_and_its_gradients(
    ranks: Ranks, size: int, family: str
) -> None:
    assert all(nonempty(ranks(split, size, family)))


class Largest(LiveBytes):
    """Also the most elements of a tensor with one column for each entry of the vocabulary, parameters aside."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return result


def rows_of_logits(loss_of: Callable[[PreTrainedModel], Any], family: str, *, learns: bool) -> int:
    model = tiny(family, dtype=torch.float32)
    with torch.set_grad_enabled(learns), Largest() as largest:
        loss, _ = loss_of(model)
        if learns:
            loss.backward()
    hidden: int = model.get_output_embeddings().in_features
    return 0 if largest.rows == hidden else largest.rows  # a transposed weight


@pytest.mark.parametrize("learns", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_more_logits_exist_than_those_of_a_chunk(family: str, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SAMPLES", 40)
    tokens = SAMPLES * POSITIONS
    assert rows_of_logits(plain, family, learns=learns) == tokens
    assert rows_of_logits(lambda model: inside(model, chunk=100), family, learns=learns) == 100


def test_validation_makes_no_gradients() -> None:
    model = _Only(64, 4096)
    placed = LossInHead(model, HeadFormula())
    placed.labels, placed.chunk_tokens = torch.zeros(1, 8, dtype=torch.long), lambda tokens, rows: 1
    with torch.no_grad(), LiveBytes() as live:
        model(torch.randn(1, 8, 64))
    assert live.peak_bytes < model.head.weight.nbytes / 8


def test_the_number_of_chunks_hardly_rounds_the_weights_gradient_in_bf16() -> None:
    torch.manual_seed(0)
    errors = {}
    for chunk in (2048, 16):
        torch.manual_seed(1)
        exact = _Only(256, 64).double()
        rounded = copy.deepcopy(exact).bfloat16()
        exact.load_state_dict(rounded.state_dict())
        hidden = torch.randn(1, 2048, 256).bfloat16()
        labels = torch.randint(64, (1, 2048))
        exact_loss = F.cross_entropy(exact.head(hidden.double())[0], labels[0], reduction="sum")
        exact_loss.backward()
        placed = LossInHead(rounded, HeadFormula())
        placed.chunk_tokens, placed.labels = lambda tokens, rows, chunk=chunk: chunk, labels
        rounded(hidden).loss.backward()
        wanted = exact.head.weight.grad
        errors[chunk] = float((rounded.head.weight.grad.double() - wanted).norm() / wanted.norm())
    assert errors[16] < 1.5 * errors[2048] < 0.01


class _Only(nn.Module):
    """A head, and nothing else of a model."""

    def __init__(self, hidden: int, entries: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, entries, bias=False)
        self.config = tiny_config("llama")

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.head(hidden)


def test_a_second_pass_without_labels_returns_logits() -> None:
    model = tiny("llama")
    expected = model(input_ids=batch()[0], use_cache=False).logits
    inside(model)
    assert torch.equal(model(input_ids=batch()[0], use_cache=False).logits, expected)


@pytest.mark.parametrize(("tokens", "rows"), [(8192, 128_256), (1, 32), (1500, 128_256), (4096, 151_936), (300, 10**7)])
def test_chunks_fit_their_budget_and_are_as_even_as_can_be(tokens: int, rows: int) -> None:
    chunk = chunk_tokens(tokens, rows)
    assert 1 <= chunk <= tokens
    assert chunk * rows * 4 <= 2**29 + 128 * rows * 4
    count = -(-tokens // chunk)
    assert tokens - (count - 1) * chunk > chunk - 128 * count


def test_the_formula_is_found_by_family() -> None:
    found = {family: head_formula(family) for family in (*FAMILIES, "nobody")}
    assert found["gemma2"] == HeadFormula(steps=(("cap", "final_logit_softcapping"),))
    assert found["granite"] == HeadFormula(steps=(("/", "logits_scaling"),))
    assert found["nobody"] is None
