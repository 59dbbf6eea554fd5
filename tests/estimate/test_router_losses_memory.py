"""What losses of routers keep from the forward to the backward pass: the estimate against two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.routing import Routing
from toolkit.estimate.model_facts import ModelFacts
from toolkit.parallel.tiny_model import tiny_config
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.planner.run_memory import estimate_for_run, model_config, training_setup


def kept_by_losses(recipe: Recipe) -> int:
    """Bytes of all large tensors that autograd keeps of them in a micro-batch, on this rank."""
    found: list[dict[int, int]] = []
    finish = Routing.finish

    def noting(routing: Routing, received: torch.Tensor | None = None) -> torch.Tensor | None:
        sizes: dict[int, int] = {}
        least = 4 * routing._samples * routing._seq_len * routing.count

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            # The choice of the largest probabilities has a backward pass that nothing needs, and so no graph keeps it.
            if storage.nbytes() >= least and tensor.is_floating_point():
                sizes[storage.data_ptr()] = 4 * tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            sums = finish(routing, received)
        found.append(sizes)
        return sums

    Routing.finish = noting  # type: ignore[method-assign]
    train_in_memory(recipe)
    return sum(found[0].values())


@pytest.mark.parametrize(
    ("family", "losses", "count"),
    [
        ("mixtral", {"router_aux_loss": {"coefficient": 0.1}, "router_z_loss": 0.1}, 2),
        pytest.param("mixtral", {"router_aux_loss": {"coefficient": 0.1}}, 1, marks=pytest.mark.whole),
        pytest.param("mixtral", {"router_z_loss": 0.1}, 1, marks=pytest.mark.whole),
        pytest.param(
            "deepseek_v3", {"router_aux_loss": {"coefficient": 0.1, "scope": "sequence"}}, 1, marks=pytest.mark.whole
        ),
        pytest.param("mixtral", {}, 0, marks=pytest.mark.whole),
    ],
)
def test_each_loss_keeps_a_number_for_each_token_and_expert(
    family: str,
    losses: dict[str, Any],
    count: int,
    make_recipe: Callable[..., Recipe],
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    tiny_config(family, num_hidden_layers=2, vocab_size=321).save_pretrained(tmp_path / "model")
    fields = {"name_or_path": str(tmp_path / "model"), **losses}
    recipe = make_recipe(model=fields, precision="bf16", train={"steps": 1})
    recipe = Strategy.parse("dp2-ep2-z1").apply(recipe, 2)
    layout = recipe.layout(2)
    batch = recipe.resolve_batch(layout)
    (stage,) = estimate_for_run(recipe, layout, batch)
    model = ModelFacts.from_config(model_config(recipe))
    assert training_setup(recipe, layout, batch, model).router_losses == count
    assert set(ranks(kept_by_losses, 2, recipe)) == {stage.activations.get("routers", 0)}
