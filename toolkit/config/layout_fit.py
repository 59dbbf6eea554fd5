"""Check that a model's heads, layers and experts can be shared by the ranks of a layout."""

from toolkit.config.layout import Layout
from toolkit.errors import LayoutError
from toolkit.models.shape import ModelShape
from toolkit.models.support import misfits


def check_layout_fit(shape: ModelShape, layout: Layout) -> None:
    """Raise LayoutError for the first axis of `layout` that a model of this shape does not allow."""
    for misfit in misfits(
        shape,
        tp=layout.tp,
        pp=layout.pp,
        chunks=layout.chunks,
        ulysses=layout.ulysses,
        ep=layout.ep,
        inner=layout.experts == "inner",
    ):
        size = getattr(layout, misfit.axis)
        raise LayoutError.of(misfit.axis, size, misfit.reason, (misfit.axis, misfit.allowed))
