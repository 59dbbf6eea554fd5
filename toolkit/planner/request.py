"""PlanRequest: a model, GPUs and a batch; and Plan: what one layout of them would take, in memory and time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self, cast

from toolkit.config.layout import RECOMPUTE_PERIODS, Batch, Layout
from toolkit.config.parallel_rules import model_conflicts, setting_conflicts
from toolkit.config.recipe import OptimizerName, Precision, Recipe
from toolkit.config.stage_balance import CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE
from toolkit.config.strategy import Strategy, strategy_text
from toolkit.config.trained_parameters import trained_parameter_conflicts
from toolkit.errors import LayoutError, ModelError, Refusal
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.computation import Attention
from toolkit.estimate.flops import has_these_flops
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.memory_request import Framework, MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.recorded.recordings import parameters
from toolkit.estimate.stage_bounds import bounds_of
from toolkit.estimate.trainable import EVERYTHING, Trainable, without_4bit
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.hardware import Gpu
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.planner.cluster import Cluster
from toolkit.planner.execution import Execution, Kernel
from toolkit.planner.run_memory import computes_reference, framework_of, model_config, recipe_of, training_setup
from toolkit.planner.step_request import StepRequest
from toolkit.planner.step_time import StepTime, predict_step
from toolkit.planner.trained import Trained

MEMORY_PROFILES = {"fsdp": "torchtitan"}
"""Profiles of step times whose memory stands under another name."""
_KERNELS: Mapping[str, Kernel] = {"sdpa": "flash2", "flash": "flash2", "eager": "eager"}
"""Kernels that run for a model's attention: PyTorch's sdpa takes FlashAttention-2's kernels for causal masks."""

_KERNELS_WITH_SCORES: tuple[Kernel, ...] = ("eager", "unfused", "fused-softmax")
"""Kernels of other frameworks that keep the scores of attention for the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with its micro-batch: the fullest stage's memory, and one step."""

    layout: Layout
    batch: Batch
    memory: MemoryBreakdown
    step: StepTime

    host_bytes: int
    """Bytes that the ranks of a node keep in its host memory."""
    host_room: float
    """Bytes of a node's host memory."""
    reference_seconds: float
    """Seconds of the forward pass that a reference takes over the data set before the first step, for as many samples
    as a step has; 0 without such a pass."""

    @property
    def fits(self) -> bool:
        """Whether it fits surely, within the band of the estimate's error: the GPU and its host."""
        return self.memory.fits and self.host_bytes <= self.host_room

    @property
    def offloads(self) -> bool:
        """Whether states or parameters are kept in host memory or on NVMe."""
        return self.layout.offload_optimizer != "none" or self.layout.offload_params != "none"

    @property
    def strategy(self) -> str:
        """The layout and the micro-batch size as `--layout` takes them: `dp8-tp4-pp2-z1-sp-recompute-m2`."""
        return strategy_text(self.layout, self.batch.micro_batch_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """A training setup whose layout is to be found, and the GPUs that it is planned for."""

    name: str
    """Name of the model, as recipes name it."""
    setup: TrainingSetup
    """What is trained, as one GPU would train it sample by sample; `setup_in` has it in a layout."""
    config: Mapping[str, Any]
    """The model's config.json."""
    cluster: Cluster
    gpus: int
    """Number of GPUs."""
    precision: Precision = "bf16"
    execution: Execution = field(default_factory=Execution)
    base: Recipe | None = None
    """The recipe to be planned; None: the toolkit's defaults for what a plan does not depend on."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields of Layout, and of `micro_batch_size`, that every plan has; empty: all are chosen."""
    offloads: bool = True
    """Whether layouts that offload are tried."""
    schedules: bool = False
    """Whether pipeline schedules of the toolkit's own are tried beside DeepSpeed's 1F1B."""

    @classmethod
    def of(
        cls,
        name: str,
        config: Mapping[str, Any],
        *,
        seq_len: int,
        global_batch_size: int,
        precision: Precision = "bf16",
        trainable: Trainable = EVERYTHING,
        imbalance: float = 1.0,
        base: Recipe | None = None,
        **fields: Any,
    ) -> Self:
        """A request for a model with this config; a `base` says itself which parameters train.

        Raises ModelError for a model whose steps are not modeled, and LayoutError for one that the options do not suit.
        """
        model = ModelFacts.from_config(config)
        _check_is_modeled(name, config, model, seq_len=seq_len)
        _check_profile(fields.get("execution", Execution()), name, model)
        model.check_options(name, seq_len=seq_len, imbalance=imbalance)
        recipe = base
        if recipe is None:
            recipe = recipe_of(
                name,
                Layout(zero_stage=1),
                micro_batch_size=1,
                seq_len=seq_len,
                accumulation=global_batch_size,
                precision=precision,
                trainable=trainable,
            )
        batch = Batch(global_batch_size=global_batch_size, micro_batch_size=1, dp=1)
        setup = training_setup(recipe, Layout(), batch, model)
        computation = replace(setup.computation, imbalance=imbalance)
        setup = replace(setup, computation=computation)
        return cls(name=name, setup=setup, config=config, precision=precision, base=base, **fields)

    @property
    def model(self) -> ModelFacts:
        """The model that is trained."""
        return self.setup.model

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self.setup.seq_len

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, of all GPUs."""
        return self.setup.global_batch_size

    @property
    def flops_per_byte(self) -> float:
        """FLOPs in the time of a byte of memory traffic, by which training chooses the layers of pipeline stages."""
        return CPU_FLOPS_PER_BYTE if self.cluster.cores else GPU_FLOPS_PER_BYTE

    @property
    def gpu(self) -> Gpu:
        """GPU of the cluster."""
        return self.cluster.gpu

    @cached_property
    def trainable(self) -> Trainable:
        """The selection of parameters that train."""
        return Trainable.parse(self.setup.computation.trainable or "all")

    @cached_property
    def trained(self) -> Trained | None:
        """Parameters that train; None: all. Raises ModelError where the selection names none."""
        text = self.setup.computation.trainable
        if not text:
            return None
        listed = parameters(self.model.config, without_4bit(text))
        return Trained.of(listed, dropout=self.trainable.dropout > 0)

    @property
    def optimizer(self) -> OptimizerName:
        """Name of the recipe's optimizer."""
        return "adamw" if self.base is None else self.base.optimizer.name

    @property
    def kernel(self) -> Kernel:
        """Kernels of attention that this toolkit runs for the model."""
        return _KERNELS[self.setup.computation.attention]

    def recipe(self, layout: Layout, batch: Batch) -> Recipe:
        """A recipe that trains the model in a layout with a batch."""
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
        """Return why training refuses a layout, whatever the batch; None if it does not."""
        recipe = self._recipe_of_one_sample(layout)
        settings = chain(setting_conflicts(recipe, None), trained_parameter_conflicts(recipe))
        return self.impossible(layout) or next(settings, None)

    def impossible(self, layout: Layout) -> Refusal | None:
        """Return why the model cannot be split by a layout in any framework; None if it can."""
        return next(model_conflicts(self._recipe_of_one_sample(layout), self.config, self.model.shape), None)

    def _recipe_of_one_sample(self, layout: Layout) -> Recipe:
        """Return the recipe in a layout with one sample on each replica."""
        return self.recipe(layout, Batch(global_batch_size=layout.dp, micro_batch_size=1, dp=layout.dp))

    def setup_in(self, layout: Layout, batch: Batch) -> TrainingSetup:
        """The setup in a layout. No rank has more rows of experts than there are, however unbalanced they are."""
        setup = replace(
            self.setup,
            layout=layout,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
        )
        imbalance = min(setup.computation.imbalance, setup.expert_owners)
        return replace(setup, computation=replace(setup.computation, imbalance=imbalance))

    def step_request(self, layout: Layout, batch: Batch) -> StepRequest:
        """Return the time model's input. Raises LayoutError for stages that the model cannot fill."""
        setup = self.setup_in(layout, batch)
        execution = self.execution
        trained = self.trained
        bounds: tuple[int, ...] = ()
        if layout.pp > 1 and execution.framework == "toolkit":
            bounds = bounds_of(setup, flops_per_byte=self.flops_per_byte)
        if trained is not None and layout.recompute in RECOMPUTE_PERIODS:
            trained = trained.recomputed
        if execution.framework == "toolkit" and execution.attention != self.kernel:
            execution = replace(execution, attention=self.kernel)
        return StepRequest(
            setup=setup,
            cluster=self.cluster,
            execution=execution,
            bounds=bounds,
            trained=trained,
            optimizer=self.optimizer,
        )

    def step(self, layout: Layout, batch: Batch) -> StepTime:
        """Predict one step."""
        if self.execution.framework != "toolkit":
            layout.refuse_schedule("--virtual-stages says how another framework interleaves")
        return predict_step(self.step_request(layout, batch))

    def memory_request(self, layout: Layout, batch: Batch, *, stand_ins: bool = True) -> MemoryRequest:
        """Return the memory estimate's input; with `stand_ins` it takes what is recorded."""
        setup = self.setup_in(layout, batch)
        framework = self._framework(layout, batch)
        if isinstance(framework, FrameworkProfile):
            kinds = framework.facts["attention"]
            attention: Attention = "eager" if self.execution.attention in _KERNELS_WITH_SCORES else "flash"
            if attention not in kinds:
                attention = next(iter(kinds))
            setup = replace(setup, computation=replace(setup.computation, attention=attention))
        return MemoryRequest(
            setup=setup,
            framework=framework,
            gpu=self.gpu,
            stand_ins=stand_ins,
            flops_per_byte=self.flops_per_byte,
        )

    def memory(self, layout: Layout, batch: Batch, *, stand_ins: bool = True) -> MemoryBreakdown:
        """Estimate the stage that takes most; `stand_ins` as in `memory_request`."""
        return self.memory_request(layout, batch, stand_ins=stand_ins).peak()

    def _framework(self, layout: Layout, batch: Batch) -> Framework:
        """Return what keeps the model states: the recipe's engine, or another framework's profile."""
        name = self.execution.framework
        if name == "toolkit":
            return framework_of(self.recipe(layout, batch), layout, batch, shape=self.model.shape)
        return FrameworkProfile(
            name=MEMORY_PROFILES.get(name, name),
            precision=cast(Any, self.precision),
            virtual_stages=self.execution.virtual_stages if layout.pp > 1 else 1,
            context_parallel=self.execution.context_parallel,
            fused_norm=self.execution.fused_norm,
        )

    def plan(self, layout: Layout, batch: Batch) -> Plan:
        """Predict the memory and the step of a layout with a batch."""
        return self.estimated(layout, batch, self.step(layout, batch), stand_ins=False)

    def estimated(self, layout: Layout, batch: Batch, step: StepTime, *, stand_ins: bool = True) -> Plan:
        """A plan whose step is known."""
        memory = self.memory(layout, batch, stand_ins=stand_ins)
        local_ranks = min(self.cluster.gpus_per_node, layout.world_size)
        return Plan(
            layout=layout,
            batch=batch,
            memory=memory,
            step=step,
            host_bytes=memory.host.total * local_ranks,
            host_room=self.cluster.host_memory_bytes,
            reference_seconds=step.forward if self.base is not None and computes_reference(self.base) else 0.0,
        )

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


def _check_is_modeled(name: str, config: Mapping[str, Any], model: ModelFacts, *, seq_len: int) -> None:
    """Raise ModelError for a model whose layers the time model does not know."""
    is_read = str(config.get("model_type")) in CONFIG_SCHEMAS or "text_config" in config
    if not is_read and not has_these_flops(model.shape, model.parameters, seq_len):
        reason = "the time model knows decoders with attention and an MLP or experts, and its layers have others"
        raise ModelError.of("--model", name, reason, "estimate its memory with dstk memory")


def _check_profile(execution: Execution, name: str, model: ModelFacts) -> None:
    """Raise LayoutError for a framework whose profile does not have the model's kind of MLP."""
    if not model.shape.gated and "plain" not in execution.facts["activation"]:
        settings = (("--framework", execution.framework), ("--model", name))
        raise LayoutError.between(settings, "its profile has no MLPs without a gate", "choose another framework")


def request_for(
    recipe: Recipe, cluster: Cluster | Gpu, gpus: int, config: Mapping[str, Any] | None = None
) -> PlanRequest:
    """Make the request of a recipe on these GPUs; `config` is its model's. Raises ModelError for an unknown model."""
    return PlanRequest.of(
        recipe.model.name_or_path,
        model_config(recipe) if config is None else config,
        cluster=cluster if isinstance(cluster, Cluster) else Cluster.of(cluster),
        gpus=gpus,
        seq_len=recipe.data.seq_len,
        global_batch_size=recipe.batch.global_batch_size,
        precision=recipe.precision,
        execution=Execution(precision=recipe.precision, compiled=recipe.train.compile),
        base=recipe,
    )


def predict(recipe: Recipe, layout: Layout, batch: Batch, cluster: Cluster | Gpu) -> StepTime:
    """Predict a step of a recipe in a layout on these GPUs. Raises ModelError for a model that is not known here."""
    return request_for(recipe, cluster, layout.world_size).step(layout, batch)
