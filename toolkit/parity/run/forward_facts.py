"""ForwardFacts: the dtypes that decoder layers compute in, and the positions of their input, over all ranks."""

import math
from typing import Any

import torch
from torch import nn

from toolkit.engines.base import Engine
from toolkit.parallel.model_structure import decoder_layer_list
from toolkit.parallel.pipeline.stage import NonLocalLayer
from toolkit.parity.run.observe import gather_on_rank_0


class ForwardFacts:
    """Watches the modules inside of decoder layers, and what tells the first layer positions.

    Positions are known by the table of learned ones, whose input they are, or by what a rotary embedding hands to the
    layers. Their mean does not depend on how ranks share samples and positions. Compiled layers are not looked into:
    a hook would break their graphs.
    """

    def __init__(self, engine: Engine) -> None:
        self._dtypes: set[str] = set()
        self._positions = [0.0, 0.0, 0]  # sum, sum of squares, count
        self._hooks: list[Any] = []
        _, layers = decoder_layer_list(engine.model)
        for module in layers.modules() if engine.compiled is None else ():
            if next(module.children(), None) is None and not isinstance(module, NonLocalLayer):
                self._hooks.append(module.register_forward_hook(self._note_dtype))
        if isinstance(layers[0], NonLocalLayer):
            return  # of a later stage: what it looks up has no use
        self._hooks.append(layers[0].register_forward_pre_hook(self._note_rotary, with_kwargs=True))
        inside = {*layers.modules(), engine.model.get_input_embeddings()}
        for module in engine.model.modules():
            if isinstance(module, nn.Embedding) and module not in inside:
                self._hooks.append(module.register_forward_pre_hook(self._note_learned, with_kwargs=True))

    def read(self) -> tuple[frozenset[str], tuple[float, ...]]:
        """Return dtypes, and mean and mean square of positions (none where they are not known); remove the hooks.

        A collective call; complete on rank 0.
        """
        for hook in self._hooks:
            hook.remove()
        parts = gather_on_rank_0((self._dtypes, self._positions))
        dtypes = frozenset(dtype for rank_dtypes, _ in parts for dtype in rank_dtypes)
        total, squares, count = (math.fsum(positions[place] for _, positions in parts) for place in range(3))
        return dtypes, (total / count, squares / count) if count else ()

    def _note_dtype(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self._dtypes.add(str(result.dtype).removeprefix("torch."))

    def _note_rotary(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        rotary = keywords.get("position_embeddings")
        if isinstance(rotary, tuple) and isinstance(rotary[0], torch.Tensor):
            self._note(rotary[0])

    def _note_learned(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        ids = next((value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)), None)
        if ids is not None:
            self._note(ids)

    def _note(self, positions: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputed in the backward pass
        values = positions.detach().double()
        self._positions[0] += float(values.sum())
        self._positions[1] += float(values.square().sum())
        self._positions[2] += values.numel()
