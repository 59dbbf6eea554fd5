"""`dstk`: finds the command, runs it, and turns what went wrong into a line and an exit code.

A command is a click command in a module of its own, imported when it is used: `dstk --help` and a typing mistake
answer at once.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from toolkit import __version__
from toolkit.cli import CommandGroup
from toolkit.errors import ToolkitError, printed_lines, unusable

COMMANDS: dict[str, tuple[str, str]] = json.loads(Path(__file__).with_name("commands.json").read_text(encoding="utf-8"))
"""Each command's module and attribute, and its line in `dstk --help`."""

_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_BROKEN_PIPE = 1  # as click exits


class CommandTable(CommandGroup):
    """A group that knows its commands by name and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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
    arguments = sys.argv[1:] if argv is None else argv
    try:
        result = cli.main(args=argv, prog_name="dstk", standalone_mode=False)
        sys.stdout.flush()  # report a closed pipe here, not while the interpreter shuts down
        code = result if isinstance(result, int) else 0
    except ToolkitError as error:
        if os.environ.get("DSTK_TRACEBACK") == "1":
            raise
        if error.is_reported_by(os.environ):
            _print_errors(str(error), arguments)
        code = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "dstk"
        see = f" See {command} --help." if isinstance(error, click.UsageError) else ""
        _print_errors(f"{error.format_message()}{see}", arguments)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        if list(arguments)[:1] in (["train"], ["demo"]):
            _print_errors("interrupted before the ranks started; nothing was saved yet.", arguments)
        code = _INTERRUPTED
    except BrokenPipeError:
        # The reader is gone (`dstk … | head`). Python would report it once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _BROKEN_PIPE
    except OSError as error:
        if error.filename is None or os.environ.get("DSTK_TRACEBACK") == "1":
            raise
        _print_errors(unusable(error), arguments)
        code = ToolkitError.exit_code
    sys.exit(code)


def _print_errors(message: str, arguments: Sequence[str]) -> None:
    for line in printed_lines(message, arguments):
        click.echo(f"{click.style('error:', fg='red', bold=True)} {line}", err=True)
