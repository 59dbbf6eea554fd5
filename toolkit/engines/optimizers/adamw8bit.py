"""AdamW with 8-bit moments, by bitsandbytes: its states read and written as the fp32 moments that they stand for.

bitsandbytes divides each tensor that is updated, a parameter or ZeRO's flat partition of many, into blocks of 256
elements. An element is a code, whose value is in a table from -1 to 1, times the largest magnitude of its block.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from toolkit.config.update_chunk import UPDATE_CHUNK_ELEMENTS
from toolkit.engines.optimizer_states import KINDS, MASTER, OptimizerStates
from toolkit.errors import RunError

_BLOCK = 256
_NUMBERS = {"exp_avg": 1, "exp_avg_sq": 2}
"""Numbers by which bitsandbytes names the state of each moment."""


def adamw8bit() -> Any:
    """Return the class, with `optim_bits` in each parameter group: 8 or 32. Raises RunError without bitsandbytes."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it names the kernels that this machine cannot load, whichever are used
    try:
        from bitsandbytes import optim
    except ImportError:
        raise RunError.of(
            "optimizer.name",
            "adamw8bit",
            "bitsandbytes is not installed",
            "install it: pip install bitsandbytes",
            ("optimizer.name", "adamw"),
        ) from None
    finally:
        logging.disable(level)

    class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            return config | {"optim_bits": group["optim_bits"]}

    return AdamW8bit


class EightBitStates(OptimizerStates):
    """Moments that are decoded to be read, and encoded when they have been written. `inner` knows where they are."""

    def __init__(self, inner: OptimizerStates) -> None:
        super().__init__(inner.base, KINDS["adamw8bit"])
        self._inner = inner
        inner.kinds = ()
        self._places = {id(parameter): (tensor, offset) for tensor, parameter, offset in inner.placements()}

    @override
    def create(self) -> None:
        for index, group in enumerate(self.base.param_groups):
            listed = group["params"]
            for tensor in self._inner.held(index):
                if not self.base.state[tensor]:
                    group["params"] = [tensor]  # ZeRO-3 lists its sub-groups during a step only
                    self.base.init_state(group, tensor, index, 0)
            group["params"] = listed

    @override
    @contextmanager
    def opened(self, kind: str, *, writes: bool = False) -> Iterator[None]:
        if kind == MASTER:
            yield
            return
        self.create()
        groups = range(len(self.base.param_groups))
        states = {tensor: self.base.state[tensor] for index in groups for tensor in self._inner.held(index)}
        for tensor, state in states.items():
            state[kind] = _decode(state, kind, 0, tensor.numel()).view_as(tensor)
        self._inner.kinds = (kind,)
        self._inner.create()  # which tells ZeRO's partitions of them
        try:
            yield
        finally:
            for state in states.values():
                moments = state.pop(kind)
                if writes:
                    _encode(state, kind, moments.reshape(-1))
            self._inner.kinds = ()
            self._inner.create()

    @override
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        return self._inner.read(parameter, kind)

    @override
    def extent(self, parameter: nn.Parameter, kind: str = MASTER) -> tuple[int, int]:
        return self._inner.extent(parameter)

    @override
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if kind == MASTER:
            return self._inner.local(parameter, kind)
        self.create()
        tensor, offset = self._places[id(parameter)]
        return _decode(self.base.state[tensor], kind, offset, self.extent(parameter)[1])

    @override
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        self._inner.write(parameter, kind, value)


def _decode(state: Mapping[str, Any], kind: str, start: int, length: int) -> torch.Tensor:
    """Return elements of a moment in fp32, as a copy."""
    number = _NUMBERS[kind]
    codes = state[f"state{number}"].view(-1)
    if codes.dtype == torch.float32:  # small tensors stay as they are
        return codes.narrow(0, start, length).clone()  # type: ignore[no-any-return]
    values = torch.empty(length, device=codes.device)
    for first in range(0, length, UPDATE_CHUNK_ELEMENTS):
        run = slice(start + first, start + min(first + UPDATE_CHUNK_ELEMENTS, length))
        blocks = torch.arange(run.start, run.stop, device=codes.device) // _BLOCK
        scales = state[f"absmax{number}"][blocks]
        values[run.start - start : run.stop - start] = state[f"qmap{number}"][codes[run].int()] * scales
    return values


def _encode(state: Mapping[str, Any], kind: str, values: torch.Tensor) -> None:
    number = _NUMBERS[kind]
    stored = state[f"state{number}"].view(-1)
    if stored.dtype == torch.float32:
        stored.copy_(values)
        return
    for first in range(0, values.numel(), UPDATE_CHUNK_ELEMENTS):
        run = values[first : first + UPDATE_CHUNK_ELEMENTS]
        blocks = nn.functional.pad(run, (0, -run.numel() % _BLOCK)).view(-1, _BLOCK)
        codes, scales = _quantize(blocks, state[f"qmap{number}"])
        stored[first : first + run.numel()] = codes.view(-1)[: run.numel()]
        state[f"absmax{number}"][first // _BLOCK :][: len(scales)] = scales


def round_again(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Round all 8-bit moments once more, in blocks whose scales are 1 to 2 times larger, drawn at random.

    Another layout cuts the blocks elsewhere, so that an element has other neighbors, another scale, and another value
    next to its own to be rounded to.
    """
    for state in optimizer.state.values():
        for kind, number in _NUMBERS.items():
            stored = state.get(f"state{number}")
            if stored is None or stored.dtype != torch.uint8:
                continue
            table = state[f"qmap{number}"]
            scales = state[f"absmax{number}"]
            values = _decode(state, kind, 0, stored.numel())
            scales.mul_(1 + torch.rand(scales.shape, generator=generator).to(scales.device))
            borders = (table[1:] + table[:-1]) / 2
            blocks = torch.arange(stored.numel(), device=stored.device) // _BLOCK
            codes = torch.searchsorted(borders, values / scales.clamp(min=1e-38)[blocks])
            stored.view(-1).copy_(codes.to(torch.uint8))


def _quantize(blocks: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [n, 256] and the scale [n] of each block.

    The table has a 1, but no -1: of a block whose largest magnitude was negative the decoded one is smaller than its
    scale. If another scale gives exactly these values, it is theirs, so that a run resumes with the same bits.
    """
    largest = blocks.abs().amax(1)
    borders = (table[1:] + table[:-1]) / 2
    scales = largest.clone()
    codes = torch.searchsorted(borders, blocks / scales.clamp(min=1e-38)[:, None])
    lowest = -float(table[0])
    if lowest > 0:
        guess = largest / lowest
        for candidate in (guess, guess.nextafter(largest), guess.nextafter(guess * 2)):
            candidate_codes = torch.searchsorted(borders, blocks / candidate.clamp(min=1e-38)[:, None])
            fits = (table[candidate_codes] * candidate[:, None] == blocks).all(1)
            scales = torch.where(fits, candidate, scales)
            codes = torch.where(fits[:, None], candidate_codes, codes)
    return codes.to(torch.uint8), scales
