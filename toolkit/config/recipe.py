"""Recipe: everything that decides what a run computes, as sections of frozen fields.

A recipe is a YAML file, decoded strictly (`toolkit.config`): unknown keys, wrong types, duplicate keys and numbers
that are not finite are errors. Nothing in `model`, `data`, `batch.global_batch_size`, `optimizer`, `schedule` and
`train` depends on the number of ranks; `parallel`, `batch.micro_batch_size` and `precision` only say where and in which
precision the same computation happens. One exception: dropout masks are drawn per micro-batch, so
`batch.micro_batch_size` changes them.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from toolkit.config.data_section import DataSection
from toolkit.config.distill_section import DistillSection
from toolkit.config.layout import Batch, CpExchange, ExpertSharding, Layout, OffloadDevice, Recompute, least_dp
from toolkit.config.objective_section import ObjectiveSection
from toolkit.config.pipeline_schedules import CHUNKS
from toolkit.config.pipeline_schedules import Kind as ScheduleKind
from toolkit.config.section import Fraction, NonNegativeInt, PositiveInt, Section, Seed, Text
from toolkit.errors import BatchError, LayoutError, Refusal, Setting
from toolkit.units import LARGEST_COUNT

Precision = Literal["fp32", "bf16", "fp16"]
EngineName = Literal["deepspeed", "reference", "ddp", "fsdp"]
OptimizerName = Literal["adamw", "adam", "sgd", "lion", "muon", "adafactor", "adamw8bit"]
AdjustLr = Literal["match_rms_adamw", "original"]
ScheduleName = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]

Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSection(Section):
    """Adapters of LoRA beside the linear layers, in the format and with the meaning of the `peft` library."""

    r: PositiveInt = 8
    """Rank of an adapter: the columns of its A and the rows of its B."""
    alpha: PositiveInt = 8
    """An adapter's output is multiplied by alpha / r, with `rslora` by alpha / √r."""
    dropout: Fraction = 0.0
    """Share of an adapter's inputs that are dropped in training."""
    targets: tuple[Text, ...] = ()
    """Names of the linear layers that get adapters (`[q_proj, v_proj]`), or `[all-linear]`; empty: what peft has as the
    default of the model's family."""
    rslora: bool = False
    """Rank-stabilized LoRA: scale by alpha / √r."""
    dora: bool = False
    """DoRA: a trained magnitude for each output beside the direction."""


class RouterAuxLossSection(Section):
    """The loss that balances the experts of a model, added to the mean token loss (docs/experts.md)."""

    coefficient: Annotated[float, Field(ge=0)] | None = None
    """Factor of the loss; null: `router_aux_loss_coef` of the model's config. 0 turns it off."""
    scope: Literal["micro_batch", "sequence", "global"] = "micro_batch"
    """Tokens that are balanced together. `micro_batch`: Hugging Face's formula; `sequence`: DeepSeek-V3's, for each
    sample by itself; `global`: Hugging Face's over the global batch, which takes a second forward pass."""


class ModelSection(Section):
    """The model, and where its weights come from."""

    name_or_path: Text
    """A named shape (`gpt2`), a local directory in Hugging Face format, or a hub name (`org/name`)."""
    init: Literal["random", "pretrained"] = "random"
    """`random`: seeded by train.seed, the same values in every layout. `pretrained`: read from the directory or hub."""
    overrides: dict[str, Any] = {}
    """Fields of the Hugging Face config to change, for instance `{n_layer: 4, resid_pdrop: 0.0}`."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "blocks"] | None = "auto"
    """The attention kernel of transformers. `auto`, or null: `sdpa`, or `eager` for families without it (Gemma 2,
    BLOOM, …). `blocks`: the toolkit's own, of context parallelism, also where a rank has whole sequences: documents are
    kept apart without a mask (docs/long-context.md)."""
    loss: Literal["auto", "chunked", "plain"] = "auto"
    """`chunked`: head and cross-entropy together, over chunks of tokens, so that full logits never exist. `plain`: from
    full logits. `auto`: chunked where that is exact (`dstk families`), in all precisions but fp16."""
    kernels: Literal["torch", "liger"] = "torch"
    """`liger`: norms, rotary embedding, MLPs and the loss by the Triton kernels of liger-kernel, on CUDA, for the
    families that they were tested for (docs/engines.md)."""
    lora: LoraSection | None = None
    """Train LoRA's adapters alone, beside frozen weights; null: no adapters."""
    float8: Literal["rowwise", "tensorwise"] | None = None
    """Multiply in float8 in the linear layers of decoder layers, by torchao: with a scale for each row, or one for each
    tensor. In bf16, without tp, ulysses and lora, on GPUs of compute capability 8.9 or more; CPUs emulate it."""
    load_in_4bit: bool = False
    """Keep the frozen linear layers in 4 bits (QLoRA, by bitsandbytes). With `lora`, published weights, CUDA, and data
    parallelism with zero_stage 0 to 2."""
    freeze: tuple[Text, ...] = ()
    """Parameters that do not train, by patterns of their Hugging Face names (`*.embed_tokens.*`)."""
    train_only: tuple[Text, ...] = ()
    """The only parameters that train, by patterns of their Hugging Face names; empty: all but those of `freeze`."""
    router_aux_loss: RouterAuxLossSection | None = None
    """Balance the load of experts by a loss; null: as the model's config asks with `output_router_logits`."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the loss that keeps the routers' logits small (ST-MoE); 0 turns it off."""
    router_bias_update: Annotated[float, Field(ge=0)] = 0.0
    """Balance the load of experts without a loss: in each step the bias of a router that has one (DeepSeek-V3) moves by
    this much, up for an expert with less than the mean load and down for others. 0 leaves it."""

    expert_capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """An expert takes at most this many times its equal share of a micro-batch's tokens in training, those with the
    largest router weights; others pass it by. null: all tokens reach their experts."""

    @property
    def attention(self) -> str | None:
        """The attention kernel that is asked for; None where transformers chooses."""
        return None if self.attn_implementation == "auto" else self.attn_implementation


class ParallelSection(Section):
    """The layout of the computation over ranks. It changes the rounding of what is computed, and in a few cases more
    (docs/recipes.md names them)."""

    auto: bool = False
    """Plan at launch, for the GPUs or CPU ranks that are there, what is not given of this section, and
    batch.micro_batch_size where that is not given. `parallel: auto` is short for it alone."""
    dp: PositiveInt | None = None
    """Data-parallel replicas; the default follows from the number of ranks."""
    ep: PositiveInt = 1
    """Expert-parallel ranks: so many neighboring replicas shard the experts of a mixture. A divisor of dp x cp."""
    experts: ExpertSharding = "whole"
    """How tp shards the experts of a mixture: `whole` ones to each rank, or the `inner` dimension of every expert."""
    cp: PositiveInt = 1
    """Context-parallel ranks that split each sequence, for long ones: half of seq_len is a multiple of it. Each rank
    attends to the keys and values of all (docs/long-context.md)."""
    cp_exchange: CpExchange = "auto"
    """How cp ranks see each other's keys and values. `gather`: all at once for a layer; `ring`: those of one rank at a
    time, sent while the block at hand is computed; `auto`: `ring` where gathering would take more than 1 GiB."""
    cp_ulysses: PositiveInt = 1
    """Neighbors among the cp ranks that exchange heads for positions (Ulysses). Keys and values are exchanged between
    these groups alone, as cp_exchange says: heads inside a node, a ring between nodes. A divisor of cp, and with tp of
    the attention heads. In a layout `u8-cp2` is cp 16 with cp_ulysses 8."""
    tp: PositiveInt = 1
    """Megatron tensor-parallel ranks: each holds a shard of every layer. A divisor of the attention heads."""
    pp: PositiveInt = 1
    """Pipeline stages: each holds some of the decoder layers. With zero_stage 0 or 1."""
    schedule: ScheduleKind | Literal["auto"] | None = None
    """Order of a pipeline's passes: `1f1b`, `gpipe`, `interleaved`, `zb-h1` or `zb-v`, whose messages never keep a rank
    from computing (docs/pipeline-schedules.md); null: 1F1B by DeepSpeed's own instructions. `auto`: the one that a
    simulation with the model's own times finds fastest among those that fit, chosen at launch."""
    chunks: PositiveInt = 1
    """Chunks of the model on each pipeline rank, with schedule: interleaved; 1 means the least, which is 2. zb-v always
    has 2, and other schedules have 1."""
    max_pending_weights: PositiveInt | None = None
    """The most backward passes for weights that wait on a rank, each of a micro-batch in one stage, with schedule:
    zb-h1 or zb-v. Fewer need less memory, and ranks wait longer. null: as many as the schedule lets wait."""
    ulysses: PositiveInt = 1
    """DeepSpeed-Ulysses ranks that split each sequence, for long ones: a divisor of seq_len and of the attention heads.
    With any zero_stage, without tp and pp."""
    sequence_parallel: bool = False
    """Megatron sequence parallelism: what tp replicates is split along the sequence. Needs tp=2 or more."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """0: nothing sharded over dp; 1: optimizer states; 2: and gradients; 3: and parameters."""
    offload_optimizer: OffloadDevice = "none"
    """`cpu`: keep and update optimizer states in host memory. `nvme`: in files below nvme_path, with ZeRO-3."""
    offload_params: OffloadDevice = "none"
    """`cpu`: keep ZeRO-3 parameter shards in host memory. `nvme`: in files below nvme_path."""
    nvme_path: str | None = None
    """A directory on a drive of each node, for what is offloaded to `nvme`."""
    hpz: PositiveInt = 1
    """ZeRO++: neighboring ranks, usually a node's, that keep a second partition of ZeRO-3's weights, from which the
    backward pass gathers. A divisor of dp."""
    quantized_weights: bool = False
    """ZeRO++: ZeRO-3 gathers weights in 8 bits. On GPUs; changes the numbers."""
    quantized_gradients: bool = False
    """ZeRO++: ZeRO-3 sends gradients between nodes in 4 bits. On GPUs; changes the numbers."""
    recompute: Recompute = "none"
    """`full`: keep only each decoder layer's input and recompute the rest in the backward pass. `every_2` to
    `every_8`: so for the layers whose index in the whole model is a multiple of 2 to 8. `selective`: recompute only the
    core attention, which needs much memory and little time."""
    offload_activations: bool = False
    """Keep what the backward pass needs of decoder layers in host memory: copied while the next layer computes, and
    fetched one layer ahead. With `recompute: full` that is their inputs."""
    tiled_mlp: bool = False
    """Compute the MLPs of decoder layers a tile of tokens at a time, forward and again in the backward pass, so that
    their wide tensors never exist for a whole sequence. For dense models without dropout in the MLP."""

    @property
    def layout_fields(self) -> dict[str, Any]:
        """The fields of Layout."""
        fields = self.model_dump(
            exclude={"auto", "cp_exchange", "nvme_path", "quantized_weights", "quantized_gradients"}
        )
        if self.schedule == "auto":
            fields["schedule"] = None
        elif self.schedule is not None and self.chunks == 1:
            fields["chunks"] = CHUNKS[self.schedule]
        return fields

    @property
    def is_planned(self) -> bool:
        """Whether a plan at launch chooses the layout, or its pipeline schedule."""
        return self.auto or self.schedule == "auto"

    @property
    def model_size(self) -> int:
        """Number of ranks of one model replica."""
        return self.cp * self.tp * self.pp * self.ulysses

    @property
    def least_ranks(self) -> int:
        """The smallest number of ranks that these sizes allow."""
        return (self.dp or least_dp(ep=self.ep, cp=self.cp, hpz=self.hpz)) * self.model_size

    @property
    def fixed_fields(self) -> dict[str, Any]:
        """The fields of Layout that the recipe sets, which a plan keeps; `dp: null` leaves dp to the plan."""
        fields = self.layout_fields.items()
        return {name: value for name, value in fields if name in self.model_fields_set and value is not None}


class BatchSection(Section):
    """Samples per optimizer step."""

    global_batch_size: PositiveInt
    """Samples in one optimizer step, over all ranks. Part of the mathematics."""
    micro_batch_size: PositiveInt | None = None
    """Samples in one forward pass of one rank. Affects memory and speed; with dropout, also which activations are
    dropped. May be left out with `parallel: auto`, which then plans it."""


class OptimizerSection(Section):
    """The optimizer. Weight decay skips biases and norms (parameters with fewer than two dimensions)."""

    name: OptimizerName = "adamw"
    """adamw (decoupled decay), adam (L2), sgd, lion, muon (orthogonal updates of the decoder layers' matrices, and
    adamw for all else), adafactor (second moments from means over rows and columns), or adamw8bit (adamw with moments
    of 8 bits, by bitsandbytes). See docs/optimizers.md."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    adamw_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the parameters that adamw updates beside muon; null: that of `lr`."""
    adjust_lr: AdjustLr = "match_rms_adamw"
    """How muon's learning rate depends on a matrix. `match_rms_adamw`: updates as large as adamw's usually are, for one
    learning rate; `original`: times √max(1, rows / columns). As in torch.optim.Muon."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the moments (adamw, adam, adamw8bit, lion, beside muon; Lion's authors use 0.9 and 0.99)."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Number that is added to the square root of the second moment (adamw, adam, adamw8bit, beside muon)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of parameters with two or more dimensions."""
    momentum: Beta = 0.0
    """Momentum (sgd, muon); 0 means 0.95 for muon."""

    @property
    def muon_momentum(self) -> float:
        """Muon's momentum."""
        return self.momentum or 0.95


class ScheduleSection(Section):
    """The learning rate over steps, as `transformers.get_scheduler` computes it. A function of the step alone."""

    name: ScheduleName = "cosine"
    """A schedule of `transformers.get_scheduler`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    decay_steps: PositiveInt | None = None
    """Steps of the final decay (warmup_stable_decay); the default is a tenth of train.steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate / peak (cosine_with_min_lr, polynomial, warmup_stable_decay)."""


class ProfileSection(Section):
    """Steps that torch.profiler traces (docs/report.md)."""

    start: PositiveInt = 10
    """The first step that is traced, counted from 1."""
    steps: PositiveInt = 3
    """Number of steps that are traced. A trace has some megabytes a step."""


class TrainSection(Section):
    """Length, seed and engine of the run."""

    steps: PositiveInt
    """Optimizer steps."""
    seed: Seed = 0
    """Seeds the initial weights, the order of samples and dropout."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Maximum norm of the whole model's gradient; 0 turns clipping off."""
    eval_every: NonNegativeInt = 0
    """Steps between validations on held-out text; 0 means never."""
    eval_samples: PositiveInt = 64
    """Samples in one validation."""
    objective: ObjectiveSection = ObjectiveSection.model_construct()
    """What the run minimizes: the token loss, or an objective of preference tuning."""
    distill: DistillSection | None = None
    """A teacher whose distributions the run learns beside its text (docs/distillation.md); null: none."""
    engine: EngineName = "deepspeed"
    """`deepspeed`; `reference` is plain PyTorch in one process; `ddp` and `fsdp` are PyTorch's, through accelerate."""
    compile: bool = False
    """Compile each decoder layer with torch.compile; equal layers share the compiled code. Not with `tiled_mlp`,
    parameters on NVMe and Liger's kernels."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss or gradient that is not finite, which never reaches the weights: `stop` the run with a
    checkpoint, `skip` the step, or `rollback` to the last checkpoint and continue with later samples."""
    spike_sigmas: Annotated[float, Field(ge=0)] = 0.0
    """Roll back as well when the loss exceeds the mean of the last steps by this many standard deviations; 6 is usual,
    0 means never."""
    spike_window: Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = 64
    """Number of last steps whose mean and standard deviation `spike_sigmas` compares the loss with."""
    replica_check: NonNegativeInt = 0
    """Steps between comparisons of what several ranks hold: weights, and optimizer states that are not sharded. Where
    they differ, the rank is named and the run rolls back to the newest checkpoint; 0 means never."""
    repeat_check: NonNegativeInt = 0
    """Steps between comparisons of what replicas compute: all take the same micro-batch forward and backward, and where
    the loss or a gradient differs in a bit, the rank is named and the run rolls back; 0 means never."""
    profile: ProfileSection | None = None
    """Trace some steps: a file for Perfetto, a memory snapshot, and where the time goes; null: none."""
    max_incidents: PositiveInt = 3
    """Steps skipped in a row, or rollbacks to the same checkpoint, after which the run stops."""
    hang_timeout: NonNegativeInt = 600
    """Seconds without progress after which a run counts as hung: the rank that blocks it is named, and all ranks exit.
    Three times as long in validations and checkpoints, at least half an hour until the first step is done. 0 means
    never."""


class CheckpointSection(Section):
    """Checkpoints while training: each is a Hugging Face model, with the optimizer's states beside it."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0 means only the trained model at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; older ones are deleted."""
    keep_every: NonNegativeInt = 0
    """Checkpoints at multiples of this many steps are never deleted; 0 means no such exception."""
    url: Text | None = None
    """Directory for checkpoints in S3, or in any store that fsspec knows: s3://bucket/run. Hosts then need not share a
    file system."""
    memory_every: NonNegativeInt = 0
    """Steps between checkpoints in the memory of hosts, each host's also in that of the next one: for a launcher that
    starts ranks again, which then resume from there; 0 means none."""
    asynchronous: bool = False
    """Continue training while a checkpoint is written, from a snapshot of each rank's shards in host memory."""


class LogSection(Section):
    """Console output and trackers."""

    every: PositiveInt = 1
    """Steps between progress lines when the output is not a terminal. metrics.jsonl has every step."""
    report_to: tuple[Text, ...] = ()
    """Trackers of accelerate, on rank 0: tensorboard, wandb, mlflow, trackio, …"""
    level: Literal["debug", "info", "warning"] = "info"
    """`debug` also shows DeepSpeed's messages; `warning` hides the banner and the progress."""
    slow_ranks: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Name a rank that holds the others up by more than this share of a step, for 20 steps; 0 names none."""


class Recipe(Section):
    """One training run. Build it with `toolkit.load_recipe`, which reports every problem with its line."""

    model: ModelSection
    """The model, and where its weights come from."""
    data: DataSection
    """The text, how it becomes tokens, and how tokens become samples."""
    parallel: ParallelSection = ParallelSection.model_construct()
    """The layout of the computation over ranks. It changes the rounding of what is computed, and in a few cases more
    (docs/recipes.md names them)."""
    batch: BatchSection
    """Samples of a step and of a micro-batch."""
    precision: Precision = "fp32"
    """Data type of parameters and activations in training; bf16 and fp16 keep fp32 master weights."""
    optimizer: OptimizerSection
    """The optimizer."""
    schedule: ScheduleSection = ScheduleSection.model_construct()
    """The learning rate over steps."""
    train: TrainSection
    """Length, seed and engine."""
    checkpoint: CheckpointSection = CheckpointSection.model_construct()
    """Checkpoints while training."""
    log: LogSection = LogSection.model_construct()
    """Console output and trackers."""
    run_dir: Text | None = None
    """Directory for the results; the default is a new one under runs/."""
    layouts: dict[str, Text | tuple[Text, ...]] = {}
    """Layouts that the recipe was tested with, by number and kind of GPUs: `{8xH100: dp8-z3, 2xL40S: [z2-m4, z3]}`.
    `--layout` takes such a name, or any layout. Of several layouts the first is taken. A run keeps the one it took."""

    @property
    def attends_in_blocks(self) -> bool:
        """Whether the toolkit's own attention computes: under context parallelism, or where the recipe asks for it.

        The reference has transformers' attention and masks, whatever it is held against.
        """
        asked = self.parallel.cp > 1 or self.model.attn_implementation == "blocks"
        return asked and self.train.engine != "reference"

    @property
    def world_size(self) -> int | None:
        """The number of ranks where the recipe fixes it with parallel.dp, else None: the launch decides."""
        section = self.parallel
        if section.auto and not {"cp", "tp", "pp", "ulysses"} <= section.fixed_fields.keys():
            return None
        return section.dp and section.least_ranks

    def layout(self, world_size: int) -> Layout:
        """The layout on `world_size` ranks. Raises LayoutError when it does not fit, or is still to be planned."""
        if self.parallel.auto:
            reason = "it is planned where the number and kind of ranks are known"
            advice = "name a layout with --layout"
            raise LayoutError(self.conflict("parallel.auto", reason=reason, remedy=(advice,)))
        return Layout.resolve(world_size, **self.parallel.layout_fields)

    def strategy(self, layout: Layout) -> str:
        """The run's way to spread over ranks, in a few words: the layout, or for engines without ZeRO their name."""
        return str(layout) if self.train.engine == "deepspeed" else f"{self.train.engine} dp{layout.dp}"

    def resolve_batch(self, layout: Layout) -> Batch:
        """The split of the global batch under `layout`. Raises BatchError when it does not divide or is not planned."""
        if self.batch.micro_batch_size is None:
            field = "batch.micro_batch_size"
            raise BatchError.of(field, None, "only a plan chooses it", (field, "1 or more"))
        return Batch.resolve(**self.batch.model_dump(), dp=layout.dp)

    def changed(self, sections: Mapping[str, Mapping[str, Any]]) -> Self:
        """A copy with other values of fields (section -> field -> value), which are not checked again."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=copies)

    def value_of(self, field: str) -> Any:
        """The value of `section.key`."""
        return reduce(getattr, field.split("."), self)

    def conflict(
        self, *fields: str, reason: str, remedy: tuple[Setting | str, ...] = (), field: str | None = None
    ) -> Refusal:
        """Refuse the values of `fields`. `field` is the one to look at, by default the first."""
        settings = tuple((name, self.value_of(name)) for name in fields)
        return Refusal(field=field or fields[0], settings=settings, reason=reason, remedy=remedy)
