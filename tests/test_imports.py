"""Which modules import torch: only those named here, so that every other command and tool answers at once."""

import json
import pkgutil
import subprocess
import sys

import toolkit

HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "datasets")
WITH_TORCH = (
    *(
        "toolkit.calibrate",
        "toolkit.checkpoint",
        "toolkit.convert",
        "toolkit.data",
        "toolkit.engines",
        "toolkit.model_init",
    ),
    *("toolkit.parallel", "toolkit.parity.run", "toolkit.recorder", "toolkit.training"),
    *("toolkit.launch.environment", "toolkit.launch.health.heartbeat_store", "toolkit.launch.health.watchdog"),
    *("toolkit.launch.local_ranks", "toolkit.launch.process_group"),
)
"""Packages and modules that need it. Everything else in toolkit/ must not import it, whatever is added."""
SCRIPTS = ("toolkit.__main__", "toolkit.doctor.probe")
"""Run as programs, never imported."""

IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imported_with(names: list[str]) -> set[str]:
    """The modules of a fresh process that has imported `names`."""
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


MODULES = [module.name for module in pkgutil.walk_packages(toolkit.__path__, "toolkit.")]


def test_everything_but_the_named_packages_imports_without_torch() -> None:
    names = [name for name in MODULES if not within(name, WITH_TORCH) and name not in SCRIPTS]
    claimed = (
        "cli",
        "config",
        "models",
        "dsconfig",
        "lint",
        "estimate",
        "planner",
        "parity",
        "report",
        "doctor",
        "launch",
    )
    assert {name.split(".")[1] for name in names if "." in name} >= set(claimed)
    assert not imported_with(names) & set(HEAVY)


def test_every_named_exception_exists() -> None:
    assert set(MODULES) >= {*WITH_TORCH, *SCRIPTS}
