"""What a tiny Hugging Face model keeps and allocates in one pass, and what its recording says."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from allocations import DeviceBytes, LiveBytes
from training_setups import rank_pass
from transformers import AutoModelForCausalLM, PreTrainedModel

from toolkit.estimate.recorded.activations import Activations, UnrecordedInLayer
from toolkit.estimate.recorded.recording import RankPass, config_text
from toolkit.estimate.recorded.recordings import activations
from toolkit.estimate.recorded.tiled_mlp import narrow, tile_bytes
from toolkit.model_init.offload_activations import offload_activations
from toolkit.model_init.recompute import recompute
from toolkit.model_init.tiled_mlp import tile_mlps
from toolkit.models.chunked_head import Chunks
from toolkit.models.shape import ModelShape
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.loss import token_loss_sum
from toolkit.parallel.tiny_model import tiny_config

SEQ_LEN = 48
EAGER_ONLY = ("gptj", "gpt_neo", "codegen", "bloom", "gemma2", "vaultgemma", "mpt", "xglm", "openai-gpt")
NEVER_RECOMPUTED = ("openai-gpt",)
_POSITIONS = ("n_positions", "max_position_embeddings", "seq_length", "max_seq_len")
_NOT_OF_THE_DECODER = ("classifier_dropout", "layerdrop")
_NO_DROPOUT = ("diffllama",)
"""Families that refuse dropout of scores."""
_OF_THE_SCORES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and one way to run it."""

    family: str
    attention: str = "sdpa"
    dtype: torch.dtype = torch.bfloat16
    samples: int = 2
    recompute: str = "none"
    sequence_parallel: bool = False
    documents: int = 1
    """In a sample; more than one do not see each other."""
    autocast: bool = False
    """The forward pass runs under torch.autocast in bf16."""
    drops: bool = True
    device: Literal["cpu", "cuda"] = "cpu"
    """Of the estimate: a GPU's rules where a test follows them on this CPU."""
    tiled: bool = False
    """MLPs are computed in tiles."""
    offload: bool = False
    """What layers keep goes to the host."""
    changes: dict[str, Any] = field(default_factory=dict)
    trainable: str = ""
    """As `dstk memory --trainable` says it."""
    chunk: int = 0
    """Tokens of a chunk of the loss inside the head; 0: a loss of full logits."""

    def __str__(self) -> str:
        parts = [
            self.family,
            self.attention,
            str(self.dtype).removeprefix("torch."),
            f"b{self.samples}",
            self.recompute,
        ]
        if self.sequence_parallel:
            parts.append("sp")
        if self.autocast:
            parts.append("autocast")
        if self.documents > 1:
            parts.append(f"{self.documents}-documents")
        parts += [self.trainable] if self.trainable else []
        parts += [f"chunk{self.chunk}"] if self.chunk else []
        return "-".join([*parts, *(f"{key}={value}" for key, value in self.changes.items())])

    def config(self) -> Any:
        """Enable every dropout, except that of scores in a fused kernel, which a CPU does not have."""
        given = tiny_config(self.family).to_dict()
        dropouts = {
            name: 0.1 if self._drops(name) else 0.0
            for name, value in given.items()
            if isinstance(value, float) and "drop" in name and name not in _NOT_OF_THE_DECODER
        }
        positions = {name: 2 * SEQ_LEN for name in _POSITIONS if name in given}
        return tiny_config(self.family, **dropouts | positions | self.changes)

    def _drops(self, name: str) -> bool:
        fused = self.attention != "eager" or self.family in _NO_DROPOUT
        return self.drops and not (fused and name in _OF_THE_SCORES)

    def model(self) -> PreTrainedModel:
        """In training mode."""
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            self.config(), attn_implementation=self.attention, dtype=self.dtype
        )
        return self.prepared(model)

    def prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        """In training mode, and with its layers recomputed where the case says so."""
        model.train()
        recompute(model, self.recompute)  # type: ignore[arg-type]
        if self.tiled:
            tile_mlps(model)
        if self.offload:
            offload_activations(model)
        return model

    def rank_pass(self, *, tp: int = 1) -> RankPass:
        """What the toolkit is asked, of kernels on a CPU."""
        text = config_text(self.config().to_dict())
        precision = "autocast" if self.autocast else {4: "fp32", 2: "bf16"}[self.dtype.itemsize]
        return rank_pass(
            narrow(text, 8) if self.tiled else text,
            tp=tp,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            attention=self.attention,
            precision=precision,
            documents=self.documents > 1,
            device=self.device,
            samples="one" if self.samples == 1 else "many",
            trainable=self.trainable,
            chunks=self._chunks() if self.chunk else None,
        )

    def _chunks(self) -> Chunks:
        text = self.config().get_text_config()
        is_one = self.chunk >= self.samples * SEQ_LEN
        return Chunks(
            tokens=min(self.chunk, self.samples * SEQ_LEN),
            is_one=is_one,
            vocabulary=text.vocab_size,
            hidden=text.hidden_size,
        )

    def estimate(self, *, tp: int = 1) -> Activations:
        """What the toolkit says."""
        return activations(self.rank_pass(tp=tp), self.samples, SEQ_LEN)

    def predicted_kept(self, *, tp: int = 1) -> int:
        """What the toolkit says that lives when the forward pass is over."""
        return self.estimate(tp=tp).kept(range(self.layers()))

    def predicted_peak(self) -> int:
        """What the toolkit says that lives at the worst moment."""
        unrecorded = UnrecordedInLayer()
        if self.tiled:
            shape = ModelShape.from_config(self.config().to_dict())
            unrecorded = UnrecordedInLayer(
                before_attention=tile_bytes(shape, self.samples * SEQ_LEN, self.dtype.itemsize, tp=1)
            )
        return self.estimate().worst_moment(range(self.layers()), offloaded=self.offload, unrecorded=unrecorded).total

    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config().get_text_config().num_hidden_layers)

    def inputs(self, model: PreTrainedModel) -> tuple[dict[str, Any], torch.Tensor]:
        """What the model is given, and labels."""
        ids, labels = self._tokens(model)
        inputs = {"input_ids": ids, "use_cache": False}
        if self.documents > 1:
            positions = torch.arange(SEQ_LEN // self.documents).repeat(self.documents)
            inputs["position_ids"] = positions.expand(self.samples, -1).contiguous()
        return inputs, labels

    def logits(self, model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
        """What the model makes of the inputs. The loss is computed outside autocast."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            found: torch.Tensor = model(**inputs).logits
        return found

    def loss(self, model: PreTrainedModel, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The sum of the token losses."""
        if not self.chunk:
            return token_loss_sum(self.logits(model, inputs), labels)
        placed = LossInHead.of(model)
        assert placed is not None
        placed.labels, placed.chunk_tokens = labels, lambda tokens, rows: self.chunk
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            found: torch.Tensor = model(**inputs).loss
        return found

    def _tokens(self, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels."""
        vocabulary = model.config.get_text_config().vocab_size
        return tuple(torch.randint(0, vocabulary, (self.samples, SEQ_LEN)) for _ in range(2))  # type: ignore[return-value]


def kept_bytes(case: Case, model: PreTrainedModel, loss_sum: Callable[..., torch.Tensor] = token_loss_sum) -> int:
    """What lives when the forward pass is over, with what the model was given."""
    inputs, labels = case.inputs(model)
    with LiveBytes() as live:
        loss = loss_sum(case.logits(model, inputs), labels)
        time.sleep(0.02)  # the thread of a collective lets go of its tensors a moment after it is done
        gc.collect()
        found = live.live_bytes
    del loss
    return found + labels.nbytes + sum(one.nbytes for one in inputs.values() if isinstance(one, torch.Tensor))


def peak_bytes(case: Case, model: PreTrainedModel) -> int:
    """The most that lives at once in a forward and backward pass, beside parameters and their gradients."""
    inputs, labels = case.inputs(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with DeviceBytes() if case.offload else LiveBytes() as live:
        case.loss(model, inputs, labels).backward()
    return live.peak_bytes + 2 * labels.nbytes
