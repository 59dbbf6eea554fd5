"""The loss of distillation is the Kullback-Leibler divergence of PyTorch where all tokens are top ones."""

import pytest
import torch

from toolkit.parallel.distilled_loss import (
    DistilledLoss,
    Divergence,
    TeacherTokens,
    TopTokens,
    plain_distilled_losses,
)
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.tensor.vocabulary import VocabularyShard

TOKENS = 40
VOCABULARY = 23
KINDS = ("forward", "reverse")


def make(top_k: int, temperature: float = 2.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TeacherTokens]:
    """Logits of a student and of a teacher in fp64, targets, and the teacher's top tokens."""
    generator = torch.Generator().manual_seed(4)
    student, teacher = 3 * torch.randn(2, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[::7] = IGNORE
    top = TopTokens(top_k, temperature, vocabulary=VOCABULARY)
    top.add_logits(teacher)
    return student.requires_grad_(), teacher, targets, top.take()


def test_top_tokens_are_those_of_the_softmax_and_the_rest_is_what_is_left() -> None:
    _, teacher, _, top = make(5)
    expected = (teacher / 2.0).log_softmax(-1)
    values, ids = expected.topk(5)
    assert top.ids.equal(ids)
    assert torch.allclose(top.logps[:, :5].double(), values, atol=1e-6)
    assert torch.allclose(top.logps.double().exp().sum(-1), torch.ones(TOKENS, dtype=torch.float64), atol=1e-6)


def test_tokens_that_the_student_does_not_have_are_among_the_rest() -> None:
    _, teacher, _, _ = make(5)
    top = TopTokens(5, 1.0, vocabulary=20)
    top.add_logits(teacher)
    found = top.take()
    assert int(found.ids.max()) < 20
    assert torch.allclose(found.logps[:, 0].double(), teacher.log_softmax(-1)[:, :20].amax(-1), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_tokens_it_is_the_divergence_of_pytorch(kind: str) -> None:
    student, teacher, targets, top = make(VOCABULARY)
    how = Divergence(weight=0.3, temperature=2.0, kind=kind)  # type: ignore[arg-type]
    p, q = (teacher / 2.0).log_softmax(-1), (student / 2.0).log_softmax(-1)
    first, second = (q, p) if kind == "forward" else (p, q)
    divergences = torch.nn.functional.kl_div(first, second, reduction="none", log_target=True).sum(-1)
    token_losses = torch.nn.functional.cross_entropy(student, targets, ignore_index=IGNORE, reduction="none")
    expected = (0.7 * token_losses + 0.3 * 4.0 * divergences)[targets != IGNORE].sum()
    (gradient,) = torch.autograd.grad(expected, student)
    shard = VocabularyShard(size=VOCABULARY, start=0, rows=VOCABULARY)
    loss, _, _ = DistilledLoss.apply(student, targets, top, None, how, shard, None)  # type: ignore[no-untyped-call]
    (own,) = torch.autograd.grad(loss, student)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert torch.linalg.norm(own - gradient) < 1e-6 * torch.linalg.norm(gradient)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 6, VOCABULARY])
@pytest.mark.parametrize("weighted", [False, True])
def test_slopes_in_closed_form_are_those_of_autograd(kind: str, top_k: int, weighted: bool) -> None:
    student, _, targets, top = make(top_k)
    how = Divergence(weight=0.8, temperature=2.0, kind=kind)  # type: ignore[arg-type]
    weights = torch.linspace(0, 2, TOKENS, dtype=torch.float64) if weighted else None
    losses, token_losses, divergences = plain_distilled_losses(student, targets, top, how)
    assert bool((divergences > -1e-7).all())
    expected = (losses if weights is None else losses * weights).sum()
    (gradient,) = torch.autograd.grad(expected, student)
    shard = VocabularyShard(size=VOCABULARY, start=0, rows=VOCABULARY)
    parts = DistilledLoss.apply(student, targets, top, weights, how, shard, None)  # type: ignore[no-untyped-call]
    (own,) = torch.autograd.grad(parts[0], student)
    assert float(parts[0]) == pytest.approx(float(expected), rel=1e-9)
    assert torch.allclose(parts[1], token_losses)
    assert torch.allclose(parts[2], divergences, atol=1e-9)
    assert torch.linalg.norm(own - gradient) < 1e-9 * torch.linalg.norm(gradient)


def test_the_divergence_grows_with_the_tokens_that_are_known_and_ends_at_that_of_all() -> None:
    values = []
    for top_k in (1, 6, 15, VOCABULARY):
        student, _, targets, top = make(top_k)
        how = Divergence(weight=1.0, temperature=2.0, kind="forward")
        values.append(float(plain_distilled_losses(student, targets, top, how)[2].sum()))
    assert values == sorted(values)
    assert 0 < values[0] < values[-1]
