"""`parallel: auto` at launch: every rank says what it runs on, the first one plans, and all take its plan."""

import json
import socket
from dataclasses import asdict

import torch

from toolkit.config.recipe import Recipe
from toolkit.errors import ModelError
from toolkit.hardware import host_memory_bytes
from toolkit.launch.process_group import decided_by_first
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.model_init.build_model import load_config
from toolkit.planner.auto.plan_recipe import planned
from toolkit.planner.auto.ranks import RankDevice, cluster_of
from toolkit.planner.calibration.file import CPU
from toolkit.planner.run_memory import model_config


def planned_for_ranks(recipe: Recipe, here: RankEnvironment) -> tuple[Recipe, str]:
    """The recipe with the plan for the ranks of this launch in it, and the plan on one line. A collective call.

    Hosts may differ in what they have, so a plan of each rank's own could differ too: one rank plans for all.
    """

    def decide(descriptions: list[str]) -> str:
        cluster, on = cluster_of([RankDevice(**json.loads(description)) for description in descriptions])
        plan = planned(recipe, cluster, here.world_size, on=on, config=_config(recipe))
        sections = {"parallel": plan.recipe.parallel.model_dump(), "batch": plan.recipe.batch.model_dump()}
        return json.dumps({"sections": sections, "note": plan.note})

    description = json.dumps(asdict(_rank_device(pick_device(here))))
    decision = json.loads(decided_by_first(here, description, decide))
    return recipe.changed(decision["sections"]), decision["note"]


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
