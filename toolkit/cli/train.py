"""`dstk train`: start the ranks of this machine on recipes/train.py; `dstk sample` and `dstk demo`: generate text."""

import os
import signal
from pathlib import Path

import click

from toolkit.checkpoint.names import step_of
from toolkit.cli import FiniteRange
from toolkit.config import load_recipe
from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError
from toolkit.files import expanded, reason_of
from toolkit.launch.spawn import AUTO, Restart, find_recipes, run_local_ranks, run_with_restarts
from toolkit.training.arguments import unused_run_directory


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on this machine.")
@click.option("--deepspeed-config", metavar="JSON", help="DeepSpeed settings that the recipe does not decide.")
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code that a model directory brings.")
@click.option("--overwrite", is_flag=True, help="Replace the run in run_dir.")
@click.option("--resume", metavar="auto|PATH", help="From a run or checkpoint; auto: from run_dir, if it has one.")
@click.option("--strict", is_flag=True, help="Fail on a damaged newest checkpoint, instead of taking the one before.")
@click.option("--restarts", type=click.IntRange(min=0), default=0, metavar="N", help="Restarts after crashes, at most.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    nproc: int,
    deepspeed_config: str | None,
    trust_remote_code: bool,
    overwrite: bool,
    resume: str | None,
    strict: bool,
    restarts: int,
) -> int:
    """Train RECIPE on this machine's ranks.

    With --restarts, a rank that dies of a signal or an unexpected error ends the others, and all restart from the
    newest complete checkpoint. Bad input (exit code 2) and a request to stop (75) end the run.

    \b
    dstk train recipes/demo.yaml --nproc 2
    dstk train recipes/demo.yaml --nproc 2 parallel.zero_stage=3 train.steps=50
    dstk train recipes/demo.yaml --nproc 4 --resume auto --restarts 3 checkpoint.every=100
    """
    if strict and resume is None and not restarts:
        raise click.UsageError("--strict without --resume: no checkpoint is read. Remove it.")
    # Report a mistake in the recipe now, not after the seconds in which N ranks import torch.
    decoded = load_recipe(recipe, overrides, world_size=nproc)
    arguments = ["--config", recipe, *overrides]
    if deepspeed_config is not None:
        arguments += ["--deepspeed_config", deepspeed_config]
    arguments += ["--trust-remote-code"] * trust_remote_code + ["--strict"] * strict
    if resume == AUTO and decoded.run_dir is None:
        raise click.UsageError("--resume auto without a run_dir: nothing says which run. Set run_dir=….")
    script = find_recipes() / "train.py"
    if not restarts:
        arguments += ["--overwrite"] * overwrite + (["--resume", resume] if resume else [])
        return run_local_ranks(script, arguments, nproc)
    run_dir = _run_directory(decoded, recipe, resume)
    again = Restart(run_dir=run_dir, given=arguments, resume=resume, overwrite=overwrite)
    return run_with_restarts(script, again.arguments, nproc, restarts)


def _run_directory(decoded: Recipe, recipe: str, resume: str | None) -> Path:
    """The directory of this run and all its restarts, chosen once."""
    if decoded.run_dir is not None:
        return expanded(decoded.run_dir)
    if resume is not None:
        path = expanded(resume)
        return path.parent if step_of(path.resolve().name) is not None else path
    return unused_run_directory(Path(recipe).stem)


@click.command()
@click.argument("run")
@click.option("--prompt", default="def ", show_default=True, help="Text that the model continues.")
@click.option("--tokens", type=click.IntRange(min=1), default=120, show_default=True, help="Tokens to generate.")
@click.option("--temperature", type=FiniteRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the sampling.")
def sample(run: str, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Print what the model of RUN (a run directory or a Hugging Face directory) generates after a prompt."""
    click.echo(generate(run, prompt=prompt, tokens=tokens, temperature=temperature, seed=seed))


def generate(run: str, *, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Return the prompt and its continuation. Raises ModelError where there is no model."""
    folder = Path(run) / "model" if (Path(run) / "model").is_dir() else Path(run)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{run}: neither a run directory with a model nor a Hugging Face directory. Give one of them.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    except Exception as error:
        raise ModelError(f"{run}: transformers cannot load it ({reason_of(error)}). Give another model.") from error
    torch.manual_seed(seed)
    inputs = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt")
    room = getattr(model.config, "max_position_embeddings", None)
    length = inputs["input_ids"].shape[1]
    if room is not None and length >= room:
        raise ModelError(f"--prompt has {length} tokens, but the model has {room} positions. Shorten the prompt.")
    written = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=min(tokens, room - length) if room is not None else tokens,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 50} if temperature > 0 else {}),
        pad_token_id=tokenizer.eos_token_id,
    )
    text: str = tokenizer.decode(written[0], skip_special_tokens=True)
    return text


@click.command()
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks on this machine.")
def demo(overrides: tuple[str, ...], nproc: int) -> int:
    """Train a small GPT-2 on the standard library's source code, and sample it."""
    recipes = find_recipes()
    run_dir = unused_run_directory("demo")
    arguments = ["--config", str(recipes / "demo.yaml"), f"run_dir={run_dir}", *overrides]
    code = run_local_ranks(recipes / "train.py", arguments, nproc)
    if code != 0:
        return code
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing left to save
    text = generate(str(run_dir), prompt="def ", tokens=120, temperature=0.8, seed=1)
    click.echo(click.style("Generated after `def `:", bold=True))
    click.echo("".join(f"    {line}\n" for line in text.splitlines()))
    click.echo(click.style("Try next:", bold=True))
    here = os.path.relpath(recipes)
    for command_line, meaning in (
        (f"dstk train {here}/demo.yaml --nproc {nproc} parallel.zero_stage=3", "the same loss under ZeRO-3"),
        (f"dstk sample {run_dir} --prompt 'class '", "more of its text"),
        (f"dstk config {here}/gpt2/z2.yaml --world-size 8", "the DeepSpeed JSON of a run on 8 GPUs"),
    ):
        click.echo(f"    {command_line}\n        {meaning}")
    return 0
