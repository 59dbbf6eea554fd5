"""Live DeepSpeed engines around models of which few parameters train, and what the estimate says of them."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from engine_memory import Cell, allow_fp16, count, live_tensors, storages

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.trainable import Trainable
from toolkit.parallel.tiny_model import tiny_config
from toolkit.recorder.frozen import freeze

# Odd sizes, so that flat buffers need padding.
CONFIG = tiny_config("llama", vocab_size=321, hidden_size=48, intermediate_size=90, tie_word_embeddings=False)
_STEPS, _ACCUMULATION = 2, 2


def measure(trainable: str, config: dict[str, Any]) -> Cell:
    """Train as a script with the Trainer's groups does: AdamW of PyTorch, those that decay and the others."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    allow_fp16()
    before = set(storages(live_tensors()))
    what = Trainable.parse(trainable)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    freeze(model, what)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if (p.ndim >= 2) == decays]} for decays in (True, False)]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3),
        config=config | _FIXED,
    )
    bucket = config["zero_optimization"].get("reduce_bucket_size", 0)
    sizes = {2 * bucket, 4 * bucket}
    held: Any = SimpleNamespace(optimizer=engine.optimizer, model=engine.module, engine=engine, partition=None)
    ids = torch.randint(0, 321, (2, 12))
    snapshot = {}
    for _ in range(_STEPS):
        for micro in range(_ACCUMULATION):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            if micro == _ACCUMULATION - 1:
                snapshot = count(held, before, sizes)
            engine.step()
    snapshot.pop("counters", None)
    between, update = _estimated(what, config)
    return Cell(
        measured=count(held, before, sizes),
        estimated=between,
        measured_at_update=snapshot,
        estimated_at_update=update,
    )


_FIXED = {
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": _ACCUMULATION,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def _estimated(what: Trainable, config: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    settings = DeepSpeedSettings.from_config(config, device="cpu")
    params = parameters(config_text(CONFIG.to_dict()), what.text).rank_parameters()
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    states = deepspeed_states(settings, params, dp=world, data_rank=rank, accumulation=_ACCUMULATION)
    kinds = ("parameters", "gradients", "masters", "optimizer", "buckets", "model_buffers", "counters")
    between = {kind: getattr(states.resident, kind) + getattr(states.host, kind) for kind in kinds}
    update = between | {"gradients": between["gradients"] + states.complete + states.host_complete}
    update["alive_buckets"] = states.complete_buckets
    del update["counters"]
    return tuple({kind: size for kind, size in each.items() if size} for each in (between, update))  # type: ignore[return-value]
