"""`dstk export`: a checkpoint as a plain Hugging Face directory, or as another program's training state."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli import ByteSize, Count, Place
from toolkit.launch.output import quiet
from toolkit.remote_files import RemotePath
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.checkpoint.model_directory import WrittenDirectory
    from toolkit.convert.export_model import Exported
    from toolkit.convert.megatron_states import MegatronForm
    from toolkit.convert.model_comparison import ModelComparison

_DIFFERS = 1

output_option: Callable[[Any], Any] = click.option(
    "-o", "--output", required=True, metavar="DIR", type=click.Path(path_type=Path), help="A new directory."
)
max_shard_size_option: Callable[[Any], Any] = click.option(
    "--max-shard-size",
    type=ByteSize(),
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Largest size of a file.",
)


def describe(written: "WrittenDirectory", *details: str) -> str:
    """Path, number of tensors, size, details, number of files."""
    size = [f"{written.tensors} tensors", format_bytes(written.nbytes)]
    return f"{written.path}: {', '.join([*size, *details])}, {written.files} file{'' if written.files == 1 else 's'}"


@click.command()
@click.argument("source", metavar="RUN_OR_CHECKPOINT", type=Place())
@output_option
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Dtype of the weights.  [default: as stored]"
)
@max_shard_size_option
@click.option(
    "--format",
    "format_",
    type=click.Choice(["hf", "dcp", "titan-hf", "megatron", "universal"]),
    default="hf",
    show_default=True,
    help="Hugging Face, or weights and moments for torchtitan (dcp; titan-hf for its transformers_modeling_backend), "
    "Megatron-Core or DeepSpeed.",
)
@click.option(
    "--pad-vocabulary",
    type=Count(),
    default=1,
    metavar="N",
    help="For megatron: pad the vocabulary to a multiple of N (make-vocab-size-divisible-by x tp).",
)
@click.option(
    "--transformer-impl",
    type=click.Choice(["transformer_engine", "local"]),
    default="transformer_engine",
    show_default=True,
    help="For megatron: whose layers read it.",
)
@click.option("--expert-parallel", is_flag=True, help="For megatron: an expert-model-parallel-size above 1 reads it.")
@click.option("--merge", is_flag=True, help="Add LoRA's adapters to the weights that they are beside.")
@click.option(
    "--verify",
    is_flag=True,
    help="Load both with transformers (and peft), and compare logits and greedy text.",
)
def command(
    source: Path,
    output: Path,
    dtype: str | None,
    max_shard_size: int,
    format_: str,
    pad_vocabulary: int,
    transformer_impl: str,
    expert_parallel: bool,
    merge: bool,
    verify: bool,
) -> int:
    """Write the newest complete checkpoint of a run, or the one that is named, as a plain Hugging Face directory.

    Writes weights, config, generation config, tokenizer and a model card; not the optimizer. Of a run with LoRA it
    writes the adapters, or with --merge the whole model. With another --format it writes the fp32 weights and the
    moments of Adam as that program stores them. With --verify, exits with 1 if what transformers computes with the
    directory (of another format: imported again) differs from its source by more than the rounding to --dtype.

    \b
    dstk export runs/demo -o demo-bf16 --dtype bf16 --verify
    dstk export runs/lora -o merged --merge
    dstk export runs/demo/step-00000500 -o halfway --max-shard-size 500MB
    dstk export runs/demo -o for-megatron --format megatron --pad-vocabulary 128
    """
    if verify and isinstance(source, RemotePath):
        raise click.UsageError(f"--verify with {source}: transformers reads directories, not URLs. Leave it out.")
    if format_ != "hf" and (dtype or merge):
        option = "--dtype" if dtype else "--merge"
        raise click.UsageError(f"{option} with --format {format_}: it has the fp32 weights of the optimizer. Omit it.")
    if pad_vocabulary > 1 and format_ != "megatron":
        raise click.UsageError(f"--pad-vocabulary with --format {format_}: only Megatron-Core pads it. Omit it.")
    is_local = transformer_impl == "local"
    if (is_local or expert_parallel) and format_ != "megatron":
        option = "--transformer-impl" if is_local else "--expert-parallel"
        raise click.UsageError(f"{option} with --format {format_}: it is of Megatron-Core. Omit it.")
    quiet(debug=False)
    if format_ != "hf":
        from toolkit.convert.megatron_states import MegatronForm

        megatron = MegatronForm(
            vocabulary_multiple=pad_vocabulary, is_local=is_local, is_expert_parallel=expert_parallel
        )
        return _export_state(source, output, format_, megatron, verify=verify)
    from toolkit.convert.export_model import DTYPES, export_checkpoint

    wanted = DTYPES[dtype] if dtype else None
    done = export_checkpoint(
        source, output, dtype=wanted, max_shard_bytes=max_shard_size, merge=merge, will_verify=verify
    )
    for notice in done.notices:
        click.echo(f"note: {notice}", err=True)
    click.echo(f"{done.source} → {describe(done.written, str(done.dtype).removeprefix('torch.'))}")
    return _verify(done) if verify else 0


def _verify(done: "Exported") -> int:
    from transformers.utils import logging

    from toolkit.convert.model_comparison import compare_models

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return _print_comparison(compare_models(done.source, done.written.path, dtype=done.dtype), done)


def _export_state(source: Path, output: Path, format_: str, megatron: "MegatronForm", *, verify: bool) -> int:
    from transformers.utils import logging

    from toolkit.convert.export_state import export_state

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    done = export_state(source, output, form=format_, megatron=megatron)
    for notice in done.notices:
        click.echo(f"note: {notice}", err=True)
    click.echo(f"{done.source} → {describe(done.written)}")
    if not verify:
        return 0
    from toolkit.convert.import_weights import import_weights
    from toolkit.convert.model_comparison import compare_models

    with tempfile.TemporaryDirectory(prefix="dstk-export-") as folder:
        back = Path(folder) / "back"
        import_weights(output, back)
        return _print_comparison(compare_models(done.source, back, dtype=None), done)


def _print_comparison(comparison: "ModelComparison", done: "Exported") -> int:
    text = "the greedy text is the same" if comparison.is_same_text else "the greedy text is another"
    if comparison.logit_difference == 0:
        click.echo(f"all logits are the same, and {text}")
    else:
        limit = f"the largest logit is {comparison.largest_logit:.3g}"
        click.echo(f"logits differ by {comparison.logit_difference:.2g} at most ({limit}); {text}")
    if comparison.is_explained:
        if comparison.logit_difference or not comparison.is_same_text:
            click.echo(f"rounding to {str(done.dtype).removeprefix('torch.')} explains all of the difference")
        return 0
    difference = f"{comparison.unexplained_difference:.2g}"
    click.echo(
        f"error: {done.written.path}: rounding does not explain a difference of {difference}. Do not use it.", err=True
    )
    return _DIFFERS
