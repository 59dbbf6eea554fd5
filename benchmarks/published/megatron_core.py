"""Megatron-Core: its functional tests' values, and SimuMax's runs of it on B200.

Each rank is run on paper: states, layers, schedule and workspaces in their order, on an allocator that works as
PyTorch's. The mechanisms, and where they can be read, stand in megatron_states.py, megatron_layer.py, megatron_ends.py
and megatron_run.py; what follows from a test's name in megatron_setup.py. No number is taken from a measurement.

Not modelled, by rule:
- Megatron-FSDP (zero = 3), whose buffers are allocated unit by unit by a code of its own, and PyTorch's FSDP there;
- experts, multi-latent, sparse and linear attention, fp8, distillation, inference (words of the test's name), and
  selective recomputation;
- runs that share optimizer states among an unknown number of ranks;
- the peak (not the static memory) of the loss compiled by torch.compile in the development container on A100: the
  tests' series have their maximum in the first step already, before moments exist: kernels are tuned on copies then.
"""

from functools import cache

from published.megatron_run import Outcome, Run
from published.megatron_setup import Setup, read
from published.prediction import Prediction
from published.rows import Row

_OTHER_CODE = ("_mla", "_dsa", "_gdn", "_ep", "moe", "experts", "fp8", "distill", "inference", "grpo")


def predict(row: Row) -> Prediction | str:
    """The rank that was measured; for SimuMax's runs the stage that takes most. Or why it is not modelled."""
    if row.zero == 3 or "fsdp" in row.model:
        return "FSDP in Megatron"
    if row.recompute == "selective" or (row.ep or 1) > 1 or any(word in row.model for word in _OTHER_CODE):
        return "layers or a precision that are not modelled"
    if row.dp is None and row.zero:
        return "how many ranks share the optimizer's states is not told"
    stages = range(row.pp) if row.pp_stage is None else [row.pp_stage]
    outcomes = [_outcome(read(row, stage)) for stage in stages]
    tunes = "cross_entropy_loss_fusion" in row.model and "(dev)" in row.framework and "A100" in row.gpu
    return Prediction(
        peak=None if tunes else max(outcome.peak for outcome in outcomes),
        static=outcomes[-1].static if row.pp_stage is not None else None,
    )


@cache
def _outcome(setup: Setup) -> Outcome:
    return Run(setup).outcome()
