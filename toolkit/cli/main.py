"""`dstk`: finds the command, runs it, and turns what went wrong into a line and an exit code.

A command is a module with a click command named `command`. It is imported when it is asked for, so that
`dstk --help` and a typing mistake answer at once.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from toolkit import __version__
from toolkit.errors import ToolkitError, nearest

COMMANDS = {
    "demo": ("toolkit.cli.demo", "Train a small GPT-2 here in a few minutes, and look at it."),
    "train": ("toolkit.cli.train", "Train a recipe on this machine's ranks."),
    "sample": ("toolkit.cli.sample", "Let a trained model write."),
    "checkpoint": ("toolkit.cli.checkpoint", "List, verify or inspect the checkpoints of a run."),
    "export": ("toolkit.cli.export", "Write a checkpoint as a plain Hugging Face directory."),
    "import": ("toolkit.cli.import_", "Take over a model, or a checkpoint of DeepSpeed."),
    "memory": ("toolkit.cli.memory", "Calculate what a layout takes of each GPU's memory."),
    "compare": ("toolkit.cli.compare", "Prove that a parallel run trains the same, or say why not."),
    "report": ("toolkit.cli.report", "Write a page of plots and numbers about runs."),
    "validate": ("toolkit.cli.validate", "Check recipes without running them."),
    "config": ("toolkit.cli.config", "Print the DeepSpeed JSON of a recipe or layout, explained."),
    "lint": ("toolkit.cli.lint", "Find mistakes in DeepSpeed configs, and mend them."),
    "doctor": ("toolkit.cli.doctor", "Look at this machine: what it lacks, and the mend."),
    "families": ("toolkit.cli.families", "Print which Hugging Face families can be cut, and why not."),
    "schema": ("toolkit.cli.schema", "Print the JSON Schema of recipes, for editors."),
}

_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_BROKEN_PIPE = 1  # as click does where it sees it first


class CommandTable(click.Group):
    """A group that knows its commands by name and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table: what one does first comes first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the nearest name."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            known = f"Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"{args[0]} is not a command.{nearest(args[0], COMMANDS) or f' {known}'}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])


@click.group(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="COMMAND ...",
    options_metavar="",
    epilog="dstk COMMAND --help explains a command. DSTK_TRACEBACK=1 shows where an error comes from.",
)
@click.version_option(__version__, message="dstk %(version)s")
def cli() -> None:
    """Train Hugging Face GPT models with DeepSpeed and Megatron-style parallelism."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 2 bad input (one line a problem on stderr), 130 interrupted."""
    try:
        result = cli.main(args=argv, prog_name="dstk", standalone_mode=False)
        sys.stdout.flush()  # a closed pipe shows here and not while the interpreter shuts down
        code = result if isinstance(result, int) else 0
    except ToolkitError as error:
        if os.environ.get("DSTK_TRACEBACK") == "1":
            raise
        if error.is_reported_by(os.environ):
            _complain(str(error))
        code = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "dstk"
        _complain(f"{error.format_message()} See {command} --help.")
        code = error.exit_code
    except click.ClickException as error:
        _complain(error.format_message())
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`dstk … | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _BROKEN_PIPE
    sys.exit(code)


def _complain(message: str) -> None:
    for line in message.split("\n"):
        click.echo(f"{click.style('error:', fg='red', bold=True)} {line}", err=True)
