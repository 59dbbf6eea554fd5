"""Dropout masks: the same activations must lose the same elements, and other activations others."""

from dataclasses import replace

import pytest

from toolkit.parity.masks import Mask, mask_faults

ONE = Mask(rank=0, layer="h.0", call=0, step=1, micro_batch=1, drawn=b"a", activation=(1.0, 2.0))
OTHER = (2.0, -1.0)
ROUNDED = (1.0 + 1e-6, 2.0)


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (replace(ONE, rank=1, activation=OTHER), "ranks 0 and 1 draw the same masks for different activations in h.0"),
        (replace(ONE, layer="h.1", activation=OTHER), "rank 0 draws the same masks in several layers: h.0 and h.1"),
        (replace(ONE, step=2, activation=OTHER), "rank 0 draws the same masks in steps 1 and 2 in h.0"),
        (replace(ONE, micro_batch=2, activation=OTHER), "rank 0 draws the same masks for micro-batches 1 and 2 in h.0"),
        (replace(ONE, call=1, activation=OTHER), "rank 0 draws the same masks twice in h.0"),
        (
            replace(ONE, rank=1, drawn=b"b", activation=ROUNDED),
            "ranks 0 and 1 draw different masks where they must agree, for the same activations in h.0",
        ),
        (replace(ONE, drawn=b"b", is_recomputed=True), "rank 0 draws other masks when it recomputes h.0"),
    ],
)
def test_a_fault_is_named(second: Mask, fault: str) -> None:
    assert mask_faults([ONE, second]) == (fault,)


@pytest.mark.parametrize(
    "second",
    [
        replace(ONE, rank=1, activation=ROUNDED),
        replace(ONE, rank=1, drawn=b"b", activation=OTHER),
        replace(ONE, is_recomputed=True, call=5),
        # The inputs of several adapters are the same.
        replace(ONE, call=1, drawn=b"b"),
    ],
)
def test_what_is_right_is_no_fault(second: Mask) -> None:
    assert mask_faults([ONE, second]) == ()


def test_layers_are_listed_once_for_each_pair_of_ranks() -> None:
    masks = [
        replace(ONE, rank=rank, layer=f"h.{layer}", drawn=bytes([layer]), activation=(float(rank), float(layer)))
        for rank in (0, 1)
        for layer in range(1, 6)
    ]
    (fault,) = mask_faults(masks)
    assert fault.endswith("different activations in h.1, h.2, h.3 and 2 more")
