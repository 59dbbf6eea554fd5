"""`dstk sample`: generate text with a trained model; `dstk demo`: train one and sample it."""

import os
import shutil
import signal
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli import FiniteRange
from toolkit.config import load_recipe
from toolkit.config.gallery import find_recipes
from toolkit.errors import ModelError, ToolkitError
from toolkit.files import reason_of
from toolkit.launch.spawn import run_local_ranks
from toolkit.training.arguments import unused_run_directory
from toolkit.training.preload import preload_training

if TYPE_CHECKING:
    from torch import Tensor

QUESTIONS = (
    "What does ZeRO stage 2 shard?",
    "Which ZeRO stages can I use with a pipeline?",
    "Can I resume my run on more GPUs?",
    "What is a pipeline bubble?",
    "What is the capital of France?",
)
"""Of the chat demo: none is in its data, where other words ask the same, or nothing does."""


@click.command()
@click.argument("run")
@click.option("--prompt", default="def ", show_default=True, help="Text that the model continues.")
@click.option("--chat", is_flag=True, help="The prompt is a user's turn: print the answer of a chat model.")
@click.option("--tokens", type=click.IntRange(min=1), default=120, show_default=True, help="Tokens to generate.")
@click.option("--temperature", type=FiniteRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the sampling.")
def command(run: str, prompt: str, chat: bool, tokens: int, temperature: float, seed: int) -> None:
    """Print what the model of RUN (a run directory or a Hugging Face directory) generates after a prompt."""
    model = GenerativeModel(run)
    generate = model.answer if chat else model.continue_text
    click.echo(generate(prompt, tokens=tokens, temperature=temperature, seed=seed))


class GenerativeModel:
    """The model of a run or of a Hugging Face directory, with its tokenizer."""

    def __init__(self, run: str) -> None:
        """Load it. Raises ModelError where there is none."""
        folder = Path(run) / "model" if (Path(run) / "model").is_dir() else Path(run)
        is_adapted = (folder / "adapter_config.json").is_file()
        if not ((folder / "config.json").is_file() or is_adapted):
            reason = "neither a run directory with a model nor a Hugging Face directory"
            raise ModelError(f"{run}: {reason}. Give one of them.")
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            load = _adapted if is_adapted else AutoModelForCausalLM.from_pretrained
            self._model = load(folder, trust_remote_code=False).eval()
        except ToolkitError:
            raise
        except Exception as error:
            raise ModelError(f"{run}: transformers cannot load it ({reason_of(error)}). Give another model.") from error
        self._run = run

    def continue_text(self, prompt: str, *, tokens: int, temperature: float, seed: int = 0) -> str:
        """Return the prompt and its continuation, of at most `tokens` tokens. Raises ModelError for a long prompt."""
        prompt_ids = self._tokenizer(prompt or self._tokenizer.eos_token, return_tensors="pt")["input_ids"]
        return self._decode(self._generate(prompt_ids, tokens, temperature, seed))

    def answer(self, question: str, *, tokens: int, temperature: float, seed: int = 0) -> str:
        """Return the answer to a user's turn. Raises ModelError without a chat template, or for a long prompt."""
        if not self._tokenizer.chat_template:
            raise ModelError(f"{self._run}: its tokenizer has no chat template. Leave --chat out.")
        turns = [{"role": "user", "content": question}]
        rendered = self._tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompt_ids = rendered["input_ids"]
        return self._decode(self._generate(prompt_ids, tokens, temperature, seed)[prompt_ids.shape[1] :]).strip()

    def _generate(self, prompt_ids: "Tensor", tokens: int, temperature: float, seed: int) -> "Tensor":
        import torch

        torch.manual_seed(seed)
        room = getattr(self._model.config, "max_position_embeddings", None)
        length = prompt_ids.shape[1]
        if room is not None and length >= room:
            raise ModelError(f"--prompt has {length} tokens, but the model has {room} positions. Shorten the prompt.")
        written: Tensor = self._model.generate(
            input_ids=prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=min(tokens, room - length) if room is not None else tokens,
            do_sample=temperature > 0,
            **({"temperature": temperature, "top_k": 50} if temperature > 0 else {}),
            pad_token_id=self._tokenizer.eos_token_id,
        )
        return written[0]

    def _decode(self, ids: "Tensor") -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _adapted(folder: Path, **options: Any) -> Any:
    """Load adapters with the model that they are beside. Raises CheckpointError where that is not found."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from toolkit.convert.adapters import base_of

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_of(folder), **options), folder)


@click.command()
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), default=2, show_default=True, help="Ranks on this machine.")
@click.option("--chat", metavar="MODEL", help="Teach this chat model with LoRA, and ask it before and after.")
def demo(overrides: tuple[str, ...], nproc: int, chat: str | None) -> int:
    """Train a small GPT-2 on the standard library's source code, and sample it.

    With --chat, LoRA teaches a chat model in Hugging Face format to answer questions about DeepSpeed instead
    (recipes/demo-chat.yaml; `make demo-chat` downloads SmolLM2-135M for it).
    """
    if chat is not None:
        return _demo_chat(chat, overrides, nproc)
    run_dir = unused_run_directory("demo")
    code = _train("demo.yaml", run_dir, overrides, nproc)
    if code != 0:
        return code
    text = GenerativeModel(str(run_dir)).continue_text("def ", tokens=120, temperature=0.8, seed=1)
    click.echo(click.style("Generated after `def `:", bold=True))
    click.echo("".join(f"    {line}\n" for line in text.splitlines()))
    here = os.path.relpath(find_recipes())
    _try_next(
        (f"dstk train {here}/demo.yaml --nproc {nproc} parallel.zero_stage=3", "the same loss under ZeRO-3"),
        (f"dstk sample {run_dir} --prompt 'class '", "more of its text"),
        (f"dstk config {here}/gpt2/gpt2-pretrain.yaml --layout 8xH100", "the DeepSpeed JSON of a run on 8 GPUs"),
    )
    return 0


def _demo_chat(name: str, overrides: tuple[str, ...], nproc: int) -> int:
    before = _answers(GenerativeModel(name))
    recipes, model = find_recipes(), Path(name).resolve()
    own = (f"model.name_or_path={model}", f"data.tokenizer={model}", f"data.source={recipes / 'demo-chat.jsonl'}")
    run_dir = unused_run_directory("demo-chat")
    code = _train("demo-chat.yaml", run_dir, (*own, *overrides), nproc)
    if code != 0:
        return code
    width = min(120, shutil.get_terminal_size().columns)
    for question, *answers in zip(QUESTIONS, before, _answers(GenerativeModel(str(run_dir))), strict=True):
        click.echo(click.style(question, bold=True))
        for when, color, answer in zip(("before", "after "), ("yellow", "green"), answers, strict=True):
            lines = textwrap.wrap(answer, width - 12) or [""]
            click.echo(f"    {click.style(when, fg=color)}  " + "\n            ".join(lines))
    _try_next(
        (f"dstk sample {run_dir} --chat --temperature 0 --prompt 'What is MFU?'", "another question"),
        (f"dstk data {run_dir / 'recipe.yaml'} --show 3", "what it was trained on"),
        (f"dstk export {run_dir} --merge -o merged", "the model with the adapter added to its weights"),
    )
    return 0


def _answers(model: GenerativeModel) -> list[str]:
    return [model.answer(question, tokens=48, temperature=0) for question in QUESTIONS]


def _train(recipe: str, run_dir: Path, overrides: tuple[str, ...], nproc: int) -> int:
    recipes = find_recipes()
    arguments = ["--config", str(recipes / recipe), f"run_dir={run_dir}", *overrides]
    decoded = load_recipe(str(recipes / recipe), overrides)
    code = run_local_ranks(recipes / "train.py", arguments, nproc, preload=partial(preload_training, decoded))
    if code == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing left to save
    return code


def _try_next(*commands: tuple[str, str]) -> None:
    click.echo(click.style("Try next:", bold=True))
    for command_line, meaning in commands:
        click.echo(f"    {command_line}\n        {meaning}")
