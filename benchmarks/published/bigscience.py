"""BigScience's runs of 2021 and 2022: which framework a row ran, and the module that models it."""

from published import megatron_2021, megatron_deepspeed, zero3
from published.prediction import Prediction
from published.rows import Row


def predict(row: Row) -> Prediction | str:
    """By the framework that the row names."""
    if row.framework == "Megatron-LM (2021)":
        return megatron_2021.predict(row)
    if row.zero == 3:
        return zero3.predict(row)
    return megatron_deepspeed.predict(row)
