"""`parallel: auto` at launch: every rank says what it runs on, the first one plans, and all take its plan."""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError, ToolkitError
from toolkit.hardware import host_memory_bytes
from toolkit.launch.elastic import Torchrun
from toolkit.launch.process_group import decided_by_first, keep_first_ranks
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.model_init.build_model import load_config
from toolkit.planner.auto.plan_recipe import Planned, planned
from toolkit.planner.auto.ranks import RankDevice, cluster_of
from toolkit.planner.calibration.file import CPU
from toolkit.planner.run_memory import model_config
from toolkit.units import plural


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The plan of a recipe for the ranks of this launch."""

    recipe: Recipe
    note: str
    """The plan on one line."""
    world_size: int
    """Ranks that train; in an elastic launch there may be more, which are spares."""


def planned_for_ranks(recipe: Recipe, here: RankEnvironment) -> LaunchPlan:
    """Plan a recipe for the ranks of this launch. A collective call; on spares it does not return.

    Hosts may differ in what they have, so a plan of each rank's own could differ too: one rank plans for all. An
    elastic launch cannot choose its number of ranks, so it takes the largest that has a layout. Raises SpareError on
    the ranks beyond it, when the run has ended.
    """
    torchrun = Torchrun.detect()
    least_ranks = 1 if torchrun is not None and torchrun.is_elastic else here.world_size

    def decide(descriptions: list[str]) -> str:
        devices = [RankDevice(**json.loads(description)) for description in descriptions]
        plan, world_size = _plan_of_most(recipe, devices, least_ranks)
        sections = {"parallel": plan.recipe.parallel.model_dump(), "batch": plan.recipe.batch.model_dump()}
        return json.dumps({"sections": sections, "note": plan.note, "world_size": world_size})

    description = json.dumps(asdict(_rank_device(pick_device(here))))
    decision = json.loads(decided_by_first(here, description, decide))
    world_size = decision["world_size"]
    note = decision["note"]
    if world_size < here.world_size:
        keep_first_ranks(here, world_size)
        spares = plural(here.world_size - world_size, "rank is a spare", "ranks are spares")
        note = f"{note}; {spares}, as {here.world_size} ranks have no layout"
    return LaunchPlan(recipe=recipe.changed(decision["sections"]), note=note, world_size=world_size)


def _plan_of_most(recipe: Recipe, devices: Sequence[RankDevice], least_ranks: int) -> tuple[Planned, int]:
    """The plan for the most of the first devices that have a layout, and how many these are.

    Raises the error of all devices where no number of at least `least_ranks` has one.
    """
    config = _config(recipe)
    refusal: ToolkitError | None = None
    for count in range(len(devices), least_ranks - 1, -1):
        cluster, on = cluster_of(devices[:count])
        try:
            return planned(recipe, cluster, count, on=on, config=config), count
        except ToolkitError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _rank_device(device: torch.device) -> RankDevice:
    memory = host_memory_bytes()
    if device.type == "cpu":
        return RankDevice(host=socket.gethostname(), device=CPU, memory_bytes=memory, host_memory_bytes=memory)
    return RankDevice(
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device),
        memory_bytes=torch.cuda.mem_get_info(device)[1],
        host_memory_bytes=memory,
    )


def _config(recipe: Recipe) -> dict[str, object]:
    """The model's config, of a hub model too."""
    try:
        return model_config(recipe)
    except ModelError:
        return dict(json.loads(load_config(recipe.model).to_json_string(use_diff=False)))
