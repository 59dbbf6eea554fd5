"""`dstk plan --report DIR`: the page of a search."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from toolkit.errors import LayoutError
from toolkit.files import expanded
from toolkit.planner.costs import Cost
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.search import evaluated

_NOT_THE_PAGE = ("as_json", "write", "overwrite")


def check_report(options: Mapping[str, Any]) -> None:
    """Raise ToolkitError where no page can be written: before the search."""
    from toolkit.report.page import check_replaceable
    from toolkit.report.plan_page import FILES

    for name in ("layout", "why"):
        if options[name] is not None:
            reason = f"its page is that of a search, and --{name} is about one layout"
            raise LayoutError.of("--report", options["report"], reason, f"leave --{name} out")
    if options["write"] is not None and expanded(options["write"]).resolve() == expanded(options["report"]).resolve():
        reason = "a page is alone in its folder, and --write names the same"
        raise LayoutError.of("--report", options["report"], reason, "name another")
    check_replaceable(expanded(options["report"]), FILES)


def write_report(request: PlanRequest, options: Mapping[str, Any], chosen: Sequence[Plan], cost: Cost | None) -> Path:
    """Write the page of a search that chose these plans."""
    from toolkit.report.plan_page import PlansPage, write_plans

    goal = options["goal"]
    result = evaluated(request, goal=goal)
    page = PlansPage(request=request, goal=goal, evaluated=result, chosen=chosen, cost=cost, command=_command_line())
    return write_plans(expanded(options["report"]), page)


def _command_line() -> str:
    """Return the command that asks for the page, without options for what else is printed or written."""
    context = click.get_current_context()
    words = ["dstk", "plan"]
    for option in context.command.params:
        name = option.name or ""
        if name not in _NOT_THE_PAGE and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            words.append(option.opts[0])
            value = context.params[name]
            if not (isinstance(option, click.Option) and option.is_flag):
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return shlex.join(words)
