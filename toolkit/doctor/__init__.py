"""Check this machine for training: gather facts, then examine them; every problem comes with a fix."""

from dataclasses import replace

from toolkit.doctor import devices, resources, software
from toolkit.doctor.check import CheckState, MachineCheck
from toolkit.doctor.collect import gather
from toolkit.doctor.facts import MachineFacts

__all__ = ["CheckState", "MachineCheck", "MachineFacts", "examine", "gather"]
_TOPICS = {
    "versions": software.versions,
    "GPUs and links": devices.checks,
    "compilers and ops": software.compilers,
    "memory, disks, limits": resources.resources,
    "environment": resources.variables,
}
"""Checks of each topic, in the order of the output."""


def examine(facts: MachineFacts) -> list[MachineCheck]:
    """Return all checks in the order of the output."""
    return [replace(check, topic=topic) for topic, checks in _TOPICS.items() for check in checks(facts)]
