"""`dstk sample`: let a trained model write."""

from pathlib import Path

import click

from toolkit.errors import ModelError


@click.command()
@click.argument("run")
@click.option("--prompt", default="def ", show_default=True, help="What the model continues.")
@click.option("--tokens", type=click.IntRange(min=1), default=120, show_default=True, help="Tokens to write.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random draw.")
def command(run: str, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Print a text that the model of RUN (a run directory or a Hugging Face directory) writes after a prompt."""
    click.echo(sample(run, prompt=prompt, tokens=tokens, temperature=temperature, seed=seed))


def sample(run: str, *, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation. Raises ModelError where there is no model."""
    folder = Path(run) / "model" if (Path(run) / "model").is_dir() else Path(run)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{run}: neither a run directory with a model nor a Hugging Face directory. Give one of them.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
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
