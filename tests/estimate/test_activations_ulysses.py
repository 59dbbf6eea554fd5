"""What a rank keeps under Ulysses sequence parallelism: the recording of its share of positions, against live ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from measured_activations import SEQ_LEN, Case, kept_bytes
from training_setups import memory_request

from toolkit.config.layout import Layout
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.model_facts import ModelFacts


def _measure(case: Case) -> int:
    """On one of two ranks that share each sequence, in a process whose attention is DeepSpeed's from now on."""
    import deepspeed

    from toolkit.engines.deepspeed_patches import complete_attention_config, keep_heads_separate
    from toolkit.parallel.sequence.ulysses import register_attention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    sizes = {"ranks": 2, "micro_batch_size": case.samples, "seq_len": 2 * SEQ_LEN}
    _, mask = register_attention(complete_attention_config(case.config()), case.attention, **sizes)
    keep_heads_separate(case.attention)
    if case.documents > 1:
        mask.start(torch.arange(SEQ_LEN // case.documents).repeat(2 * case.documents).expand(case.samples, -1))
    return kept_bytes(case, case.model())


@pytest.mark.parametrize(
    "case",
    [
        Case(family="llama"),
        Case(family="qwen3", dtype=torch.float32, samples=1),
        Case(family="llama", recompute="full"),
        Case(family="gpt2"),
        Case(family="llama", documents=3),
        Case(family="llama", documents=3, changes={"num_attention_heads": 8, "num_key_value_heads": 4}),
    ],
    ids=str,
)
def test_a_rank_keeps_what_its_share_of_positions_keeps(case: Case, ranks: Callable[..., list[Any]]) -> None:
    model = ModelFacts.from_config(case.config().to_dict())
    work = {
        "micro_batch_size": case.samples,
        "seq_len": 2 * SEQ_LEN,
        "device": "cpu",
        "recompute": case.recompute,
        "documents": case.documents > 1,
    }
    framework = DeepSpeedSettings(zero_stage=3, precision="fp32" if case.dtype == torch.float32 else "bf16")
    both, alone = (
        memory_request(model, Layout(ulysses=u, zero_stage=3), work, framework).peak().buckets for u in (2, 1)
    )
    exchanged = both - alone if case.recompute == "none" else 0  # then one layer's, at a peak
    assert exchanged == 0 or exchanged > 4 * case.samples * SEQ_LEN
    share = replace(case, documents=1)  # the mask is of all positions
    for measured in ranks(_measure, 2, case):
        assert share.predicted_kept() + exchanged == pytest.approx(measured, rel=0.01)
