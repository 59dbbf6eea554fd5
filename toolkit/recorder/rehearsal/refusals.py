"""What cannot be rehearsed, said before torch is imported."""

from toolkit.config.job import Job
from toolkit.errors import RunError


def check_rehearsable(job: Job) -> None:
    """Raise RunError for a job that needs values, files or another engine than DeepSpeed's."""
    recipe = job.recipe
    if recipe.train.engine != "deepspeed":
        reason = "a rehearsal runs DeepSpeed's engines"
        raise RunError.of("train.engine", recipe.train.engine, reason, ("train.engine", "deepspeed"))
    if recipe.model.load_in_4bit:
        reason = "weights in 4 bits are packed from their values, and a rehearsal has none"
        raise RunError.of("model.load_in_4bit", True, reason, ("model.load_in_4bit", False))
    if recipe.precision == "fp16":
        reason = "a rehearsal runs on a CPU, where DeepSpeed has no fp16; with bf16 the ranks communicate the same way"
        raise RunError.of("precision", "fp16", reason, ("precision", "bf16"))
    for field in ("offload_optimizer", "offload_params"):
        if getattr(job.layout, field) == "nvme":
            reason = "a rehearsal writes no files"
            raise RunError.of(f"parallel.{field}", "nvme", reason, (f"parallel.{field}", "cpu"))
