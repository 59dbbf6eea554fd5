"""Draw docs/images/schedules.svg, which docs/parallelism.md shows: schedules of four ranks and eight micro-batches.

python docs/generate_schedules.py
"""

from pathlib import Path

from toolkit.config.pipeline_schedules import KINDS, schedule_of
from toolkit.config.simulate_schedule import ScheduleCosts, simulate
from toolkit.report.schedule_picture import schedule_picture

PICTURE = Path(__file__).parent / "images" / "schedules.svg"


def picture() -> str:
    """What the file holds."""
    schedules = [schedule_of(kind, pp=4, micro_batches=8) for kind in KINDS]
    return schedule_picture([simulate(schedule, ScheduleCosts.relative(schedule)) for schedule in schedules])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
