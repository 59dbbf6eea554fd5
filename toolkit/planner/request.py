"""PlanRequest: a model, GPUs and a batch; and Plan: what one layout of them would take, in memory and time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self, cast

from toolkit.config.layout import RECOMPUTE_PERIODS, Batch, Layout
from toolkit.config.parallel_rules import model_conflicts, setting_conflicts
from toolkit.config.recipe import Precision, Recipe
from toolkit.config.strategy import Strategy, strategy_text
from toolkit.config.trained_parameters import trained_parameter_conflicts
from toolkit.errors import LayoutError, ModelError, Refusal
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.flops import has_these_flops
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.memory_model import Framework, MemoryModel
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.stage_bounds import CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE, balanced_bounds
from toolkit.estimate.trainable import EVERYTHING, Trainable, without_4bit
from toolkit.hardware import Gpu
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.planner.cluster import Cluster
from toolkit.planner.execution import Execution, Kernel
from toolkit.planner.run_memory import framework_of, model_config, recipe_of, workload_of
from toolkit.planner.setup import Setup
from toolkit.planner.step_time import StepTime, predict_step
from toolkit.planner.trained import Trained

MEMORY_PROFILES = {"fsdp": "torchtitan"}
"""Profiles of step times whose memory stands under another name."""
_KERNELS: Mapping[str, Kernel] = {"sdpa": "flash2", "flash": "flash2", "eager": "eager"}
"""What runs for a model's attention: PyTorch's sdpa takes FlashAttention-2's kernels for causal masks."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with its micro-batch: the fullest stage's memory, and one step."""

    layout: Layout
    batch: Batch
    memory: MemoryBreakdown
    step: StepTime

    host_bytes: int
    """What the ranks of a node keep in its memory."""
    host_room: float

    @property
    def fits(self) -> bool:
        """Whether it fits surely, within the band of the estimate's error: the GPU and its host."""
        return self.memory.fits and self.host_bytes <= self.host_room

    @property
    def strategy(self) -> str:
        """As `--layout` takes it, micro-batch and all: `dp8-tp4-pp2-z1-sp-recompute-m2`."""
        return strategy_text(self.layout, self.batch.micro_batch_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """What is to be trained, and on what."""

    name: str
    """The model's, as recipes name it."""
    model: MemoryModel
    config: Mapping[str, Any]
    cluster: Cluster
    gpus: int
    seq_len: int
    global_batch_size: int
    precision: Precision = "bf16"
    run: Execution = field(default_factory=Execution)
    trainable: Trainable = EVERYTHING
    """What trains; with `base`, that says it."""
    imbalance: float = 1.0
    """Rows of the busiest rank's experts over the mean."""
    base: Recipe | None = None
    """What is to be trained, all of it; None: the toolkit's defaults for what a plan does not depend on."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Layout, and `micro_batch_size`, that are decided."""
    offloads: bool = True
    """Whether layouts that offload are tried."""

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], **fields: Any) -> Self:
        """A request for a model with this config. Raises ModelError for one whose steps are not modeled."""
        family = str(config.get("model_type"))
        model = MemoryModel.from_config(config)
        is_read = family in CONFIG_SCHEMAS or "text_config" in config
        if not is_read and not has_these_flops(model.shape, model.parameters, fields["seq_len"]):
            reason = "the time model knows decoders with attention and an MLP or experts, and its layers have others"
            raise ModelError.of("--model", name, reason, "estimate its memory with dstk memory")
        positions, seq_len = model.shape.positions, fields["seq_len"]
        if fields.get("imbalance", 1.0) != 1 and model.shape.experts is None:
            reason = f"{name} has no experts"
            raise LayoutError.of("--imbalance", fields["imbalance"], reason, "remove --imbalance")
        if model.shape.learned_positions and positions is not None and seq_len > positions:
            raise LayoutError.of(
                "--seq", seq_len, f"{name} has {positions} positions", ("--seq", f"{positions} or less")
            )
        return cls(name=name, model=model, config=config, **fields)

    @property
    def gpu(self) -> Gpu:
        """Of the cluster."""
        return self.cluster.gpu

    @cached_property
    def trained(self) -> Trained | None:
        """Which weights train; None: all. Raises ModelError where what trains names nothing."""
        trainable = self.trainable if self.base is None else Trainable.of(self.base.model)
        if not trainable.text:
            return None
        return Trained.of(parameters(self.model.config, without_4bit(trainable.text)), dropout=trainable.dropout > 0)

    @cached_property
    def setup_attention(self) -> Kernel:
        recipe = self.recipe(Layout(zero_stage=1), Batch(global_batch_size=1, micro_batch_size=1, dp=1))
        return _KERNELS[workload_of(recipe, recipe.resolve_batch(Layout()), self.model).attention]

    def recipe(self, layout: Layout, batch: Batch) -> Recipe:
        """A recipe that trains the model so."""
        if self.base is not None:
            sizes = {"micro_batch_size": batch.micro_batch_size, "global_batch_size": batch.global_batch_size}
            return self.base.changed({"parallel": {**asdict(layout), "auto": False}, "batch": sizes})
        return recipe_of(
            self.name,
            layout,
            micro_batch_size=batch.micro_batch_size,
            seq_len=self.seq_len,
            accumulation=batch.accumulation,
            precision=self.precision,
            trainable=self.trainable,
        )

    def refusal(self, layout: Layout) -> Refusal | None:
        """Why training refuses a layout, whatever the batch; None if it does not."""
        recipe = self._one(layout)
        settings = chain(setting_conflicts(recipe, None), trained_parameter_conflicts(recipe))
        return self.impossible(layout) or next(settings, None)

    def impossible(self, layout: Layout) -> Refusal | None:
        """What of the model a layout cannot split, in any framework."""
        return next(model_conflicts(self._one(layout), self.config, self.model.shape), None)

    def _one(self, layout: Layout) -> Recipe:
        return self.recipe(layout, Batch(global_batch_size=layout.dp, micro_batch_size=1, dp=layout.dp))

    def setup(self, layout: Layout, batch: Batch) -> Setup:
        """What the time model is asked. Raises LayoutError for stages that the model cannot fill."""
        bounds: tuple[int, ...] = ()
        if layout.pp > 1 and self.run.framework == "toolkit":
            flops = CPU_FLOPS_PER_BYTE if self.cluster.cores else GPU_FLOPS_PER_BYTE
            sizes = {"micro_batch_size": batch.micro_batch_size, "seq_len": self.seq_len}
            bounds = balanced_bounds(
                self.model.parameters,
                layout.pp,
                **sizes,
                recompute=layout.recompute,
                head_alone=self.trained is None or not self.trained.adapters,
                flops_per_byte=flops,
            )
        run, trained = self.run, self.trained
        if trained is not None and layout.recompute in RECOMPUTE_PERIODS:
            trained = trained.recomputed
        if run.framework == "toolkit":
            run = replace(run, attention=self.setup_attention) if self.setup_attention != run.attention else run
        return Setup(
            shape=self.model.shape,
            layout=layout,
            cluster=self.cluster,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
            seq_len=self.seq_len,
            run=run,
            bounds=bounds,
            trained=trained,
            imbalance=self._imbalance(layout),
            optimizer="adamw" if self.base is None else self.base.optimizer.name,
        )

    def _imbalance(self, layout: Layout) -> float:
        """Of a layout: no rank has more rows than there are, nor other rows than its own where it has all experts."""
        return min(self.imbalance, layout.ep * (1 if layout.experts == "inner" else layout.tp))

    def step(self, layout: Layout, batch: Batch) -> StepTime:
        """Predict one step."""
        return predict_step(self.setup(layout, batch))

    def memory(self, layout: Layout, batch: Batch, *, stand_ins: bool = True) -> MemoryBreakdown:
        """Estimate the stage that takes most; with `stand_ins` from what is recorded, see `Workload`."""
        recipe = self.recipe(layout, batch)
        framework = self._framework(recipe, layout, batch)
        work = workload_of(recipe, batch, self.model)
        work = replace(work, stand_ins=stand_ins, imbalance=self._imbalance(layout))
        if isinstance(framework, FrameworkProfile):
            work = replace(work, attention=next(iter(framework.facts["attention"])))
        return self.model.peak(layout, work, framework, self.gpu)

    def _framework(self, recipe: Recipe, layout: Layout, batch: Batch) -> Framework:
        name = self.run.framework
        if name == "toolkit":
            return framework_of(recipe, layout, batch, shape=self.model.shape)
        return FrameworkProfile(
            name=MEMORY_PROFILES.get(name, name),
            precision=cast(Any, self.precision),
            virtual_stages=self.run.virtual_stages if layout.pp > 1 else 1,
        )

    def plan(self, layout: Layout, batch: Batch) -> Plan:
        """Both."""
        return self.estimated(layout, batch, self.step(layout, batch), stand_ins=False)

    def estimated(self, layout: Layout, batch: Batch, step: StepTime, *, stand_ins: bool = True) -> Plan:
        """A plan whose step is known."""
        memory = self.memory(layout, batch, stand_ins=stand_ins)
        local = min(self.cluster.gpus_per_node, layout.world_size)
        host, room = memory.host.total * local, self.cluster.host_memory_bytes
        return Plan(layout=layout, batch=batch, memory=memory, step=step, host_bytes=host, host_room=room)

    def read_layout(self, text: str) -> tuple[Layout, int | None]:
        """A strategy on all GPUs, and the micro-batch that it names. Raises LayoutError for what no model can run.

        What only this toolkit's training refuses is predicted all the same: see `refusal`.
        """
        strategy = Strategy.parse(text)
        if strategy.engine != "deepspeed":
            raise LayoutError.of("--layout", text, "only DeepSpeed's layouts are planned", "remove the engine")
        fields = strategy.sections(strategy.dp)["parallel"]
        layout = Layout.resolve(self.gpus, **fields)
        refusal = self.impossible(layout)
        if refusal is not None:
            raise LayoutError(refusal)
        return layout, strategy.micro_batch_size


def request_for(
    recipe: Recipe, cluster: Cluster | Gpu, gpus: int, config: Mapping[str, Any] | None = None
) -> PlanRequest:
    """What a recipe asks of these GPUs; `config` is its model's. Raises ModelError for one that is not known here."""
    return PlanRequest.of(
        recipe.model.name_or_path,
        model_config(recipe) if config is None else config,
        cluster=cluster if isinstance(cluster, Cluster) else Cluster.of(cluster),
        gpus=gpus,
        seq_len=recipe.data.seq_len,
        global_batch_size=recipe.batch.global_batch_size,
        precision=recipe.precision,
        run=Execution(precision=recipe.precision, compiled=recipe.train.compile),
        base=recipe,
    )


def predict(recipe: Recipe, layout: Layout, batch: Batch, cluster: Cluster | Gpu) -> StepTime:
    """Predict a step of a recipe in a layout on these GPUs. Raises ModelError for a model that is not known here."""
    return request_for(recipe, cluster, layout.world_size).step(layout, batch)
