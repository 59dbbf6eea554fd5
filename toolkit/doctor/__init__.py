"""What this machine has and lacks for training: facts are gathered, then judged; every problem comes with its mend."""

from toolkit.doctor.check import Check, State
from toolkit.doctor.examine import examine
from toolkit.doctor.facts import Facts
from toolkit.doctor.gather import gather

__all__ = ["Check", "Facts", "State", "examine", "gather"]
