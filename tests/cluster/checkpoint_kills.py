"""kill -9 of a rank at a random moment of a save, while every rank is slowed down at random.

    python tests/cluster/checkpoint_kills.py --draws 200

Afterwards the newest checkpoint must be complete, and no older than the last one whose `save` returned.
tests/checkpoint/test_save_ranks.py runs a few draws.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from killed_saves import kill_in_a_save


def main() -> None:
    parser = argparse.ArgumentParser(description="kill -9 of a rank inside a save")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from toolkit.launch.local_ranks import run_ranks

    bad, interrupted = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.draws):
            problem, was_interrupted = kill_in_a_save(run_ranks, Path(folder), seed)
            bad += [problem] if problem else []
            interrupted += was_interrupted
    end = f"{options.draws} kills, {interrupted} of them inside a save: {len(bad)} unusable newest checkpoints"
    print("\n".join([*bad, end]))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
