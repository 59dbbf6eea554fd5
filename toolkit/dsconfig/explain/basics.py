"""Keys at the top of a DeepSpeed config: batch, gradients, precision, logging, pipeline."""

from toolkit.dsconfig.explain.key import Key
from toolkit.dsconfig.job import ConfigJob


def _precision(name: str) -> str:
    return f"the precision is not {name}, or weights stay fp32 under autocast (ZeRO-0)"


def _sums(job: ConfigJob) -> str:
    options = job.options
    if options.gradient_dtype == "fp32":
        return "a sum in 16 bits depends on its order in the third digit"
    return f"asked for: sums in {options.gradient_dtype} take half the memory and depend on their order"


def _reduced(job: ConfigJob) -> str:
    if job.options.communication_dtype == "fp32":
        return "so that the sum does not depend on the number of ranks"
    return f"asked for: half the bytes, in {job.options.communication_dtype}"


def _accumulation(job: ConfigJob) -> str:
    batch = job.batch
    return f"{batch.global_size} = {batch.micro_size} micro x {batch.accumulation} accumulation x {batch.dp} dp"


_LOSS_SCALE = {
    "auto_cast": Key(what="Cast floating-point inputs to fp16.", default=False, why="token ids are no floats"),
    "loss_scale": Key(what="A fixed loss scale; 0 adapts it.", default=0, why="adapting is the safe choice"),
    "initial_scale_power": Key(what="The first loss scale is 2 to this power.", default=16, why="the default is fine"),
    "loss_scale_window": Key(what="Steps without overflow before it doubles.", default=1000, why="the default is fine"),
    "hysteresis": Key(what="Overflows before it halves.", default=2, why="the default is fine"),
    "consecutive_hysteresis": Key(
        what="Count overflows anew after a good step.", default=False, why="overflows in a row are not needed"
    ),
    "min_loss_scale": Key(what="It never falls below.", default=1, why="below 1 the loss would shrink"),
}

BATCH = {
    "train_batch_size": Key(what="Samples in one optimizer step, over all ranks.", why=_accumulation),
    "train_micro_batch_size_per_gpu": Key(what="Samples in one forward pass of a rank.", why="memory and speed decide"),
    "gradient_accumulation_steps": Key(what="Forward passes of a rank for one step.", why=_accumulation),
    "gradient_clipping": Key(
        what="Largest norm of the whole model's gradient; 0 switches clipping off.",
        default=1.0,
        why="always written: the default was 0 before DeepSpeed 0.19.3",
    ),
    "prescale_gradients": Key(
        what="Divide gradients by the ranks before reducing, not after.",
        default=False,
        why="in fp32 nothing overflows, and ZeRO-1 to 3 need no help",
    ),
    "gradient_predivide_factor": Key(
        what="With prescaling: by what to divide before.", default=1.0, why="there is no prescaling"
    ),
    "communication_data_type": Key(what="In which gradients are reduced; none: their own.", why=_reduced),
    "seq_parallel_communication_data_type": Key(
        what="The same where ranks share sequences (Ulysses).", default="fp32", why=_reduced
    ),
}

PRECISION = {
    "data_types.grad_accum_dtype": Key(
        what="In which micro-batches' gradients are summed; none: that of the weights.", why=_sums
    ),
    "bf16.enabled": Key(
        what="Weights and activations in bf16, fp32 master weights.",
        default=False,
        why=lambda job: "precision=bf16" if job.config["bf16"]["enabled"] else _precision("bf16"),
    ),
    "bf16.check_grad_overflow": Key(
        what="Skip a step whose gradient is not finite.", default=True, why="else it would reach the weights"
    ),
    "fp16.enabled": Key(
        what="Weights and activations in fp16, fp32 master weights, a scaled loss.",
        default=False,
        why=lambda job: "precision=fp16" if job.config["fp16"]["enabled"] else _precision("fp16"),
    ),
    **{f"fp16.{name}": key for name, key in _LOSS_SCALE.items()},
    "torch_autocast.enabled": Key(
        what="Forward passes under torch.autocast, weights in fp32.",
        default=False,
        why=lambda job: (
            "without ZeRO, DeepSpeed would sum gradients in 16 bits; this takes the same memory"
            if job.config["torch_autocast"]["enabled"]
            else "weights have the precision of the run"
        ),
    ),
    "torch_autocast.dtype": Key(what="The precision of autocast.", why="the recipe's"),
}

REST = {
    "zero_allow_untested_optimizer": Key(
        what="Allow ZeRO with an optimizer that is not on DeepSpeed's list.",
        default=False,
        why="true for SGD, for Lion, and where a program brings its own optimizer",
    ),
    "zero_force_ds_cpu_optimizer": Key(
        what="Refuse another optimizer than DeepSpeed's CPU kernels under offload (accelerate: put them in its place).",
        default=True,
        why="true where a program brings its own optimizer and its states are offloaded",
    ),
    "steps_per_print": Key(
        what="Steps between DeepSpeed's own progress lines; none: no lines.", why="the program logs"
    ),
    "wall_clock_breakdown": Key(
        what="Time forward, backward and step; synchronizes the device.",
        default=False,
        why=lambda job: "asked for" if job.options.wall_clock_breakdown else "it costs speed",
    ),
    "dump_state": Key(what="Print the engine's state at the start.", default=False, why="for debugging only"),
}

PIPELINE = {
    "pipeline.activation_checkpoint_interval": Key(
        what="Recompute every so many layers in the backward pass; 0: none.",
        default=0,
        why=lambda job: (
            "asked for" if job.options.activation_checkpointing else "recomputation is the model's own (recompute)"
        ),
    ),
    "pipeline.use_reentrant": Key(
        what="PyTorch's old kind of recomputation.",
        default=True,
        why="it fails where the first layer's input needs no gradient",
    ),
    "pipeline.pipe_partitioned": Key(
        what="Each tensor-parallel rank sends a slice of the activation.",
        default=True,
        why="under sequence parallelism the ranks hold different activations",
    ),
    "pipeline.grad_partitioned": Key(
        what="The same for the gradients of activations.", default=True, why="as pipe_partitioned"
    ),
}
