"""Checkpoints as the Trainer writes them with FSDP, of a recipe's model on a recipe's samples, and the losses after."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit.config.job import Job
from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.optimizer import learning_rate
from toolkit.model_init.build_model import load_config


def samples_of(recipe: Recipe) -> list[dict[str, torch.Tensor]]:
    """All samples of a recipe's steps, in order; `targets` are shifted already."""
    size = recipe.batch.global_batch_size
    batch = Batch(global_batch_size=size, micro_batch_size=size, dp=1)
    corpus = prepare(recipe.data, progress=False)
    loader = MicroBatchLoader.open(Job(recipe=recipe, layout=Layout(), batch=batch), corpus, rank=0)
    samples = []
    with loader.prefetch() as ahead:
        for step in range(recipe.train.steps):
            (whole,) = loader.micro_batches(step, ahead)
            pairs = zip(whole.input_ids, whole.labels, strict=True)
            samples += [{"input_ids": ids, "targets": targets} for ids, targets in pairs]
    return samples


_wrap = FullyShardedDataParallel.__init__


def _wrap_on_cpu(module: FullyShardedDataParallel, *arguments: Any, **options: Any) -> None:
    """Wrap a module by FSDP1 on the CPU, which it takes for another device than the `cpu:0` of accelerate."""
    options["device_id"] = torch.device("cpu")
    _wrap(module, *arguments, **options)


def train_with_trainer(
    folder: str, recipe: Recipe, fsdp: int, saved_step: int, state_dict_type: str = "SHARDED_STATE_DICT"
) -> list[float]:
    """Train with FSDP1 or FSDP2, or plainly where `fsdp` is 0; return the losses of all steps. A collective call."""
    import accelerate
    from accelerate.utils import DistributedType
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    config = load_config(recipe.model)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    layer = sorted(
        {type(module).__name__ for module in model.modules() if type(module).__name__ in model._no_split_modules}
    )
    ranks = dist.get_world_size()
    size = recipe.batch.global_batch_size

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        total = outputs["targets"].ne(-100).sum()
        dist.all_reduce(total)
        logits = outputs["logits"].flatten(0, 1)
        return ranks * F.cross_entropy(logits, outputs["targets"].flatten(), reduction="sum") / total

    class InOrder(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if fsdp:  # accelerate 1.15 silently uses DDP on CPU ranks
                plugin = accelerate.FullyShardedDataParallelPlugin(
                    fsdp_version=fsdp,
                    auto_wrap_policy="transformer_based_wrap",
                    transformer_cls_names_to_wrap=layer,
                    state_dict_type=state_dict_type,
                    reshard_after_forward=True if fsdp == 2 else "FULL_SHARD",
                    sync_module_states=False,
                    use_orig_params=True,  # flat parameters have no names, by which decay leaves out biases and norms
                )
                self.accelerator.state.distributed_type = DistributedType.FSDP
                accelerate.PartialState().distributed_type = DistributedType.FSDP
                self.accelerator.state.fsdp_plugin = plugin
                self.is_fsdp_enabled = True

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
            return loss({"logits": logits, "targets": inputs["targets"]}, None)

    rate = learning_rate(recipe)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=size // ranks,
        max_steps=recipe.train.steps,
        seed=recipe.train.seed,
        save_steps=saved_step,
        save_total_limit=None,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        learning_rate=recipe.optimizer.lr,
        weight_decay=recipe.optimizer.weight_decay,
        adam_beta1=recipe.optimizer.betas[0],
        adam_beta2=recipe.optimizer.betas[1],
        adam_epsilon=recipe.optimizer.eps,
        max_grad_norm=recipe.train.grad_clip,
        lr_scheduler_type=recipe.schedule.name,
        warmup_steps=recipe.schedule.warmup_steps,
        average_tokens_across_devices=False,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=samples_of(recipe))  # type: ignore[arg-type]
    with patch.object(FullyShardedDataParallel, "__init__", _wrap_on_cpu):
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["learning_rate"] for entry in history] == [rate(step) for step in range(recipe.train.steps)]
    if dist.get_rank() == 0:
        for checkpoint in Path(folder).glob("checkpoint-*"):
            if checkpoint.name != f"checkpoint-{saved_step}":
                shutil.rmtree(checkpoint)
        config.save_pretrained(folder)
    return [entry["loss"] for entry in history]
