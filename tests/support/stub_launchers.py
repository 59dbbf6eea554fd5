"""Launch scripts with stubs in place of the launchers: what would be started, and with which arguments."""

import os
import subprocess
import sys
from pathlib import Path

_RECORD = '#!/usr/bin/env bash\nprintf "%s\\0" "$0" "$@" > "$RECORD"\n'


def recorded(script: Path, *arguments: str, folder: Path, cwd: Path) -> list[str]:
    """Run a script from `cwd`; return the launcher that it starts (by name) and its arguments."""
    stubs = folder / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    for name in ("deepspeed", "torchrun", "accelerate", "srun"):
        (stubs / name).write_text(_RECORD)
    (stubs / "scontrol").write_text("#!/usr/bin/env bash\necho n1\n")
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    environment = {
        "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RECORD": str(folder / "words"),
    }
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "8"}
    subprocess.run(["bash", str(script), *arguments], cwd=cwd, env=environment, check=True, timeout=60)
    launcher, *words = (folder / "words").read_text().rstrip("\0").split("\0")
    return [Path(launcher).name, *words]
