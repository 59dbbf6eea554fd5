"""Checkpoints as torchtitan writes them: its modules and names of Llama 3 and Qwen 3, trained by FSDP2, and the losses.

torchtitan itself is not installed. Its Llama turns pairs of neighboring features as complex numbers, its Qwen 3 the two
halves of a head. Other families are as in its `transformers_modeling_backend`: the model of transformers inside another
module, with torchtitan's blocks in the place of those with experts.
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
from transformers import AutoModelForCausalLM

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
        self.turns_halves = config.model_type != "llama"
        self.qkv_linear = QueryKeyValue(config)
        self.wo = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        if self.turns_halves:
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


class GroupedExperts(nn.Module):
    """The weights of all experts of a layer: E experts of width F, D features."""

    def __init__(self, *, experts: int, width: int, features: int) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.empty(experts, width, features))
        self.w2_EDF = nn.Parameter(torch.empty(experts, features, width))
        self.w3_EFD = nn.Parameter(torch.empty(experts, width, features))

    def forward(self, hidden: torch.Tensor, expert: int) -> torch.Tensor:
        gate = hidden @ self.w1_EFD[expert].T
        up = hidden @ self.w3_EFD[expert].T
        return (F.silu(gate) * up) @ self.w2_EDF[expert].T


class RoutedExperts(nn.Module):
    """What torchtitan computes between sending tokens to experts and collecting them."""

    def __init__(self, *, experts: int, width: int, features: int) -> None:
        super().__init__()
        self.inner_experts = GroupedExperts(experts=experts, width=width, features=features)

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs; `weights`: [tokens, experts], zero for experts not chosen."""
        parts = [weights[:, expert, None] * self.inner_experts(hidden, expert) for expert in range(weights.shape[-1])]
        return torch.stack(parts).sum(0)


class Router(nn.Module):
    """Softmax over all experts; a token is routed to those with the highest scores."""

    def __init__(self, config: Any, *, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, experts, bias=False)
        self.experts_per_token = config.num_experts_per_tok
        self.normalizes = getattr(config, "norm_topk_prob", True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.gate(hidden).float().softmax(-1)
        top_scores, experts = scores.topk(self.experts_per_token, dim=-1)
        if self.normalizes:
            top_scores = top_scores / top_scores.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, experts, top_scores)


class MixtureBlock(nn.Module):
    """A block with experts, whose router has a bias to balance them, which stays zero here."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.router = Router(config, experts=experts)
        self.routed_experts = RoutedExperts(experts=experts, width=width, features=config.hidden_size)
        self.register_buffer("expert_bias_E", torch.zeros(experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.flatten(0, 1)
        return self.routed_experts(flat, self.router(flat)).view_as(hidden)


class BackendModel(nn.Module):
    """A model of transformers as the backend holds it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for layer in self.blocks:
            if hasattr(layer.mlp, "experts"):
                layer.mlp = MixtureBlock(config)
        initialize(self)

    @property
    def blocks(self) -> Any:
        return self.model.model.layers

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


class Block(nn.Module):
    """A layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config)
        if config.model_type == "qwen3_moe":
            self.moe = MixtureBlock(config)
        else:
            self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), angles)
        block = self.moe if hasattr(self, "moe") else self.feed_forward
        return hidden + block(self.ffn_norm(hidden))


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
        initialize(self)

    @property
    def blocks(self) -> Any:
        return self.layers.values()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rates = 1.0 / self.theta ** (torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.outer(torch.arange(ids.shape[1]).float(), rates)
        hidden = self.tok_embeddings(ids)
        for layer in self.layers.values():
            hidden = layer(hidden, angles)
        return self.lm_head(self.norm(hidden))


def initialize(model: nn.Module) -> None:
    """Draw all matrices."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)


def model_of(config: Any) -> Decoder | BackendModel:
    """Return torchtitan's own model of a family, or where it has none, that of its backend."""
    return Decoder(config) if config.model_type in ("llama", "qwen3", "qwen3_moe") else BackendModel(config)


def train_with_titan(folder: str, recipe: Recipe, saved_step: int) -> list[float]:
    """Train with FSDP2, save `step-N` before a step; return the losses of all steps. A collective call."""
    torch.manual_seed(0)
    model = model_of(load_config(recipe.model))
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.blocks:
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
