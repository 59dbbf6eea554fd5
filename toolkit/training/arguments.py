"""Options of a run, and the command line of a training script, with the arguments that DeepSpeed's launcher adds."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NoReturn

from toolkit.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a run that are not part of its job."""

    name: str = "run"
    """Name of the run directory, where the recipe names none."""
    resume: str | None = None
    """`auto`, a run directory or a checkpoint."""
    strict: bool = False
    """Whether a damaged newest checkpoint is an error, instead of the one before it being used."""
    overwrite: bool = False
    """Whether a run that run_dir holds is replaced."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON with settings that the recipe does not decide."""
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of the command line."""

    config: str
    layout: str | None
    overrides: tuple[str, ...]
    options: TrainOptions


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}. Run with --help for the arguments.")


def parse_arguments(argv: Sequence[str], description: str) -> Arguments:
    """Read `--config FILE [section.key=value …]`. Raises RecipeError for arguments that do not exist."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a YAML recipe, or a name of the gallery")
    parser.add_argument("--layout", help="one that the recipe lists, such as 8xH100, or any, such as dp8-z3")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that a model directory brings"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run that run_dir holds")
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="resume from a checkpoint, in any layout; auto: the newest complete one of run_dir, if it has one",
    )
    parser.add_argument("--strict", action="store_true", help="with --resume: a damaged newest checkpoint is an error")
    group = parser.add_argument_group("DeepSpeed's own")
    group.add_argument("--deepspeed_config", metavar="JSON", help="settings that the recipe does not decide")
    group.add_argument("--deepspeed", nargs="?", const="", metavar="JSON", help="accepted; JSON as --deepspeed_config")
    group.add_argument("--local_rank", "--local-rank", type=int, help="set by the launcher")
    known = parser.parse_intermixed_args(argv)
    if known.deepspeed and "=" in known.deepspeed:
        # `--deepspeed section.key=value`: the flag takes a path only optionally, and this is not one.
        known.overrides.append(known.deepspeed)
        known.deepspeed = None
    if known.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(known.local_rank))
    return Arguments(
        config=known.config,
        layout=known.layout,
        overrides=tuple(known.overrides),
        options=TrainOptions(
            name=run_name(known.config),
            # accelerate passes its --deepspeed_config_file in the environment.
            deepspeed_config=known.deepspeed_config
            or known.deepspeed
            or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"),
            trust_remote_code=known.trust_remote_code,
            overwrite=known.overwrite,
            resume=known.resume,
            strict=known.strict,
        ),
    )


def run_name(recipe: str) -> str:
    """The name of a recipe's runs: that of its file, or in the gallery."""
    return Path(recipe).name.removesuffix(".yaml").removesuffix(".yml") or "run"


def unused_run_directory(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that does not exist."""
    candidates = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in candidates if not path.exists())
