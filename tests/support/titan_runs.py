"""Checkpoints as torchtitan writes them: its modules and names of Llama 3 and Qwen 3, trained by FSDP2, and the losses.

torchtitan itself is not installed. Its Llama turns pairs of neighboring features as complex numbers, its Qwen 3 the two
halves of a head.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_runs import samples_of

from toolkit.config.recipe import Recipe
from toolkit.engines.optimizer import learning_rate
from toolkit.model_init.build_model import load_config


class QueryKeyValue(nn.Module):
    """Three projections, stored as `qkv_linear`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wq = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)


class Attention(nn.Module):
    """Causal attention with rotary embeddings in the order of the family."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.turns_halves = config.model_type == "qwen3"
        self.qkv_linear = QueryKeyValue(config)
        self.wo = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        if config.model_type == "qwen3":
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """`angles` has a row for each position."""
        query = self.qkv_linear.wq(hidden).unflatten(-1, (-1, self.width))
        key = self.qkv_linear.wk(hidden).unflatten(-1, (-1, self.width))
        value = self.qkv_linear.wv(hidden).unflatten(-1, (-1, self.width))
        if self.turns_halves:
            query = turn_halves(self.q_norm(query), angles)
            key = turn_halves(self.k_norm(key), angles)
        else:
            query = turn_pairs(query, angles)
            key = turn_pairs(key, angles)
        key = key.repeat_interleave(self.group, dim=2)
        value = value.repeat_interleave(self.group, dim=2)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.wo(attended.transpose(1, 2).flatten(start_dim=2))


def turn_pairs(features: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate features 0 and 1, 2 and 3, and so on."""
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(features.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(start_dim=-2)


def turn_halves(features: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate each feature of the first half with that of the second."""
    both = torch.cat([angles, angles], dim=-1)[:, None]
    first, second = features.chunk(2, dim=-1)
    return features * both.cos() + torch.cat([-second, first], dim=-1) * both.sin()


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Block(nn.Module):
    """A layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), angles)
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class Decoder(nn.Module):
    """A model of Hugging Face's config, under torchtitan's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width = config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in range(config.num_hidden_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rates = 1.0 / self.theta ** (torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.outer(torch.arange(ids.shape[1]).float(), rates)
        hidden = self.tok_embeddings(ids)
        for layer in self.layers.values():
            hidden = layer(hidden, angles)
        return self.lm_head(self.norm(hidden))


def train_with_titan(folder: str, recipe: Recipe, saved_step: int) -> list[float]:
    """Train with FSDP2, save `step-N` before a step; return the losses of all steps. A collective call."""
    torch.manual_seed(0)
    model = Decoder(load_config(recipe.model))
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.optimizer.lr,
        weight_decay=recipe.optimizer.weight_decay,
        betas=recipe.optimizer.betas,
        eps=recipe.optimizer.eps,
    )
    rate = learning_rate(recipe)
    samples = samples_of(recipe)
    size = recipe.batch.global_batch_size
    losses = []
    for step in range(recipe.train.steps):
        if step == saved_step:
            save(Path(folder) / f"step-{step}", model, optimizer, step)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        batch = samples[step * size : (step + 1) * size][dist.get_rank() :: ranks]
        ids = torch.stack([sample["input_ids"] for sample in batch])
        targets = torch.stack([sample["targets"] for sample in batch])
        total = targets.ne(-100).sum()
        dist.all_reduce(total)
        loss = ranks * F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum") / total
        loss.backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), recipe.train.grad_clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def save(step_folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save as torchtitan's checkpointer does: weights at the top, the optimizer by name, counters, the data loader."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    counters = {"step": torch.tensor(step, dtype=torch.int32), "ntokens_seen": torch.tensor(step, dtype=torch.int64)}
    content = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": counters,
        "lr_scheduler": {"last_epoch": step},
        "dataloader": {f"dp_rank_{dist.get_rank()}": b"position", "world_size": dist.get_world_size()},
    }
    dcp.save(content, checkpoint_id=step_folder)
