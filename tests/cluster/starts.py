"""Start each launcher many times on two hosts, and say how each start ended, as a table.

    python tests/cluster/starts.py --starts 20
    python tests/cluster/starts.py --starts 20 --launchers torchrun sbatch

A start is done when every command of it ends with 0 and the losses are those of one process, within 1e-6.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from cluster.hosts import hosts, missing
from cluster.launchers import LAUNCHERS, Start
from cluster.runs import assert_same_training, end_all, train_in_one_process, write_demo
from cluster.slurm import slurm
from cluster.ssh import start_sshd

FIRST_PORT = 30000


def end_of(launcher: str, start: Start, reference: list[dict[str, float]]) -> str:
    """How a start ended."""
    try:
        codes = end_all(LAUNCHERS[launcher](start), timeout=900)
        if any(codes):
            return f"codes {codes}"
        assert_same_training(start.run_dir, reference)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return "done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--layout", default="tp2-pp2-z1")
    parser.add_argument("--per-node", type=int, default=2, help="ranks on each of the two hosts (default: 2)")
    arguments = parser.parse_args()
    if missing():
        sys.exit(missing())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # munge is not root
        recipe = write_demo(folder)
        reference = train_in_one_process(folder, recipe)
        print("| launcher | starts | done | other ends | seconds, median |\n|---|---|---|---|---|")
        with hosts(2, folder / "nodes") as nodes:
            start_sshd(nodes, folder / "ssh")
            with slurm(nodes, folder / "slurm") as environment:
                for launcher in arguments.launchers:
                    ends: Counter[str] = Counter()
                    seconds = []
                    for number in range(arguments.starts):
                        where = folder / f"{launcher.replace(' ', '')}-{number}"
                        where.mkdir()
                        start = Start(
                            nodes=nodes,
                            folder=where,
                            recipe=recipe,
                            layout=arguments.layout,
                            per_node=arguments.per_node,
                            port=FIRST_PORT + number,
                            slurm=environment,
                        )
                        began = time.monotonic()
                        ends[end_of(launcher, start, reference)] += 1
                        seconds.append(time.monotonic() - began)
                    done = ends.pop("done", 0)
                    others = "; ".join(f"{end} ({count})" for end, count in ends.items())
                    row = [f"`{launcher}`", arguments.starts, done, others, f"{statistics.median(seconds):.0f}"]
                    print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
