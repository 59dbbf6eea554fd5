"""`dstk sample`: generate text with a trained model; `dstk demo`: train one and sample it."""

import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli import LOCAL_RANKS, Count, FiniteRange, directories_only
from toolkit.cli.answer_checks import (
    AnswerCheck,
    CheckedAnswer,
    KindResult,
    kind_results,
    print_answers,
    print_results,
    read_checks,
    write_answers,
)
from toolkit.cli.margin_check import MarginResult, margin_results
from toolkit.config import load_recipe
from toolkit.config.gallery import find_recipes
from toolkit.errors import ModelError, RunError, ToolkitError
from toolkit.files import expanded, reason_of
from toolkit.launch.output import quiet
from toolkit.launch.spawn import run_local_ranks
from toolkit.training.arguments import unused_run_directory
from toolkit.training.preload import preload_training
from toolkit.units import LARGEST_SEED

if TYPE_CHECKING:
    from torch import Tensor

_ANSWER_TOKENS = 48


@click.command()
@click.argument("run", callback=directories_only)
@click.option("--prompt", default="def ", show_default=True, help="Text that the model continues.")
@click.option("--chat", is_flag=True, help="The prompt is a user's turn: print the answer of a chat model.")
@click.option("--tokens", type=Count(), default=120, show_default=True, help="Tokens to generate.")
@click.option("--temperature", type=FiniteRange(min=0), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--seed", type=Count(min=0, max=LARGEST_SEED), default=0, show_default=True, help="Seed of the sampling.")
def command(run: str, prompt: str, chat: bool, tokens: int, temperature: float, seed: int) -> None:
    """Print what the model of RUN (a run directory or a Hugging Face directory) generates after a prompt."""
    model = GenerativeModel(run)
    generate = model.answer if chat else model.continue_text
    click.echo(generate(prompt, tokens=tokens, temperature=temperature, seed=seed))


class GenerativeModel:
    """The model of a run or of a Hugging Face directory, with its tokenizer."""

    def __init__(self, run: str) -> None:
        """Load the model and its tokenizer. Raises ModelError and CheckpointError for what cannot be loaded."""
        folder = Path(run) / "model" if (Path(run) / "model").is_dir() else Path(run)
        is_adapted = (folder / "adapter_config.json").is_file()
        if not ((folder / "config.json").is_file() or is_adapted):
            reason = "neither a run directory with a model nor a Hugging Face directory"
            raise ModelError(f"{run}: {reason}. Give one of them.")
        quiet(debug=False)
        from transformers import AutoTokenizer
        from transformers.utils import logging

        from toolkit.convert.adapters import base_of, load_adapted
        from toolkit.convert.loaded_model import load_model

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            if is_adapted:
                self._model = load_adapted(folder, base_of(folder)).eval()
            else:
                self._model = load_model(folder)
        except ToolkitError:
            raise
        except Exception as error:
            raise ModelError(f"{run}: transformers cannot load it ({reason_of(error)}). Give another model.") from error
        self._run = run

    def continue_text(self, prompt: str, *, tokens: int, temperature: float, seed: int = 0) -> str:
        """Return the prompt and its continuation, of at most `tokens` tokens. Raises ModelError for a long prompt."""
        prompt_ids = self._tokenizer(prompt or self._tokenizer.eos_token)["input_ids"]
        (continuation,) = self._generate([prompt_ids], tokens, temperature, seed)
        return self._decode([*prompt_ids, *continuation])

    def answer(self, question: str, *, tokens: int, temperature: float, seed: int = 0) -> str:
        """Return the answer to a user's turn. Raises ModelError without a chat template, or for a long prompt."""
        (answer,) = self.answers([question], tokens=tokens, temperature=temperature, seed=seed)
        return answer

    def answers(self, questions: Sequence[str], *, tokens: int, temperature: float, seed: int = 0) -> list[str]:
        """Return the answers to several chats of one user's turn each, generated as one batch.

        Raises ModelError without a chat template, or for a long prompt.
        """
        if not self._tokenizer.chat_template:
            raise ModelError(f"{self._run}: its tokenizer has no chat template. Leave --chat out.")
        prompts = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for question in questions
        ]
        return [self._decode(ids).strip() for ids in self._generate(prompts, tokens, temperature, seed)]

    def _generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Return what follows each prompt, filled with end-of-text tokens to a common length.

        Shorter prompts are padded on the left, where the attention mask hides the padding.
        """
        import torch

        torch.manual_seed(seed)
        room = getattr(self._model.config, "max_position_embeddings", None)
        length = max(map(len, prompts))
        if room is not None and length >= room:
            raise ModelError(f"--prompt has {length} tokens, but the model has {room} positions. Shorten the prompt.")
        padding = [length - len(prompt) for prompt in prompts]
        padding_id = self._tokenizer.eos_token_id
        prompt_ids = [[padding_id] * count + [*prompt] for count, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * count + [1] * (length - count) for count in padding]
        sampling = {"temperature": temperature, "top_k": 50} if temperature > 0 else {}
        written: Tensor = self._model.generate(
            input_ids=torch.tensor(prompt_ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=min(tokens, room - length) if room is not None else tokens,
            do_sample=temperature > 0,
            **sampling,
            pad_token_id=padding_id,
        )
        continuations: list[list[int]] = written[:, length:].tolist()
        return continuations

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


@click.command()
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--nproc", type=LOCAL_RANKS, default=2, show_default=True, help="Ranks on this machine.")
@click.option("--chat", metavar="MODEL", help="Teach this chat model facts with LoRA, and ask it before and after.")
@click.option("--dpo", metavar="MODEL", help="Teach this chat model a style by DPO, and ask it before and after.")
def demo(overrides: tuple[str, ...], nproc: int, chat: str | None, dpo: str | None) -> int:
    """Train a small GPT-2 on the standard library's source code, and sample it.

    With --chat, LoRA teaches a chat model in Hugging Face format to answer questions about DeepSpeed instead
    (recipes/demo-chat.yaml), and with --dpo DPO teaches it a style of answers from pairs (recipes/demo-dpo.yaml);
    `make demo-chat` and `make demo-dpo` download SmolLM2-135M for it. The model is asked before and after, in other
    words than its training data, and general questions as well; the exit code is 1 if too few answers are right.
    """
    if chat is not None and dpo is not None:
        conflict = (("--chat", chat), ("--dpo", dpo))
        raise RunError.between(conflict, "a demo teaches one thing", "leave one of them out")
    if chat is not None:
        return _demo_with_questions(_CHAT, chat, overrides, nproc)
    if dpo is not None:
        return _demo_with_questions(_DPO, dpo, overrides, nproc)
    code, run_dir = _train("demo.yaml", unused_run_directory("demo"), overrides, nproc)
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


@dataclass(frozen=True, kw_only=True)
class ChatDemo:
    """A demo that trains a chat model, and asks it questions before and after."""

    name: str
    """Name of its recipe and its training data, and with `-checks` of its questions."""
    question: str
    """A question to try next."""


_CHAT = ChatDemo(
    name="demo-chat",
    question="Explain ZeRO-3.",
)
_DPO = ChatDemo(
    name="demo-dpo",
    question="Why is the sky dark at night?",
)


def _demo_with_questions(chat_demo: ChatDemo, name: str, overrides: tuple[str, ...], nproc: int) -> int:
    recipes = find_recipes()
    data = recipes / f"{chat_demo.name}.jsonl"
    checks = read_checks(recipes / f"{chat_demo.name}-checks.jsonl")
    click.echo(f"Asking {name} {len(checks)} questions, before it is trained")
    before = _answers(GenerativeModel(name), checks)
    model = Path(name).resolve()
    paths = (f"model.name_or_path={model}", f"data.tokenizer={model}", f"data.source={data}")
    code, run_dir = _train(f"{chat_demo.name}.yaml", unused_run_directory(chat_demo.name), (*paths, *overrides), nproc)
    if code != 0:
        return code
    after = _answers(GenerativeModel(str(run_dir)), checks)
    answers = [
        CheckedAnswer(check=check, before=answer_before, after=answer_after)
        for check, answer_before, answer_after in zip(checks, before, after, strict=True)
    ]
    write_answers(answers, run_dir / "answers.jsonl")
    print_answers(answers, width=min(120, shutil.get_terminal_size().columns))
    results: list[KindResult | MarginResult] = [
        *kind_results(answers),
        *margin_results(run_dir / "metrics.jsonl"),
    ]
    print_results(results)
    here = os.path.relpath(recipes)
    click.echo(f"None of these questions is in the training data, {here}/{data.name}.")
    click.echo(f"Right answers have all required phrases and no forbidden one of {here}/{chat_demo.name}-checks.jsonl.")
    click.echo(f"Whole answers: {run_dir / 'answers.jsonl'}")
    _try_next(
        (f"dstk sample {run_dir} --chat --temperature 0 --prompt '{chat_demo.question}'", "another question"),
        (f"dstk data {run_dir / 'recipe.yaml'} --show 3", "what it was trained on"),
        (f"dstk export {run_dir} --merge -o merged", "the model with the adapter added to its weights"),
    )
    return 0 if all(result.passed for result in results) else 1


def _answers(model: GenerativeModel, checks: tuple[AnswerCheck, ...]) -> list[str]:
    return model.answers([check.question for check in checks], tokens=_ANSWER_TOKENS, temperature=0)


def _train(recipe: str, new_directory: Path, overrides: tuple[str, ...], nproc: int) -> tuple[int, Path]:
    """Train in a new directory, or in that of an override. Return the exit code and the run directory."""
    recipes = find_recipes()
    overrides = (f"run_dir={new_directory}", *overrides)
    arguments = ["--config", str(recipes / recipe), *overrides]
    decoded = load_recipe(str(recipes / recipe), overrides)
    run_dir = new_directory if decoded.run_dir is None else expanded(decoded.run_dir)
    code = run_local_ranks(recipes / "train.py", arguments, nproc, preload=partial(preload_training, decoded))
    if code == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing left to save
    return code, run_dir


def _try_next(*commands: tuple[str, str]) -> None:
    click.echo(click.style("Try next:", bold=True))
    for command_line, meaning in commands:
        click.echo(f"    {command_line}\n        {meaning}")
