"""Facts -> checks, topic by topic."""

from toolkit.doctor import compilers, devices, resources, variables, versions
from toolkit.doctor.check import Check
from toolkit.doctor.facts import Facts


def examine(facts: Facts) -> list[Check]:
    """Everything that was looked at, in the order of the page."""
    topics = (versions, devices, compilers, resources, variables)
    return [check for topic in topics for check in topic.checks(facts)]
