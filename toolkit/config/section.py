"""Section: the base of every section of a recipe, and the types of its fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from toolkit.units import LARGEST_COUNT, LARGEST_SEED

PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no coercion, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # one validator for the whole recipe instead of one per section
        protected_namespaces=(),
    )
