"""SkyPilot: a job as a task for `sky jobs launch`, which finds machines in clouds and starts it again on others.

Fields and variables: https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

import shlex
from typing import Any

from toolkit.dsconfig.container_launch import ENVIRONMENT, VOLUME_PATH, ContainerLaunch, dump_yaml
from toolkit.errors import ConfigError

SAVED = 75
MAX_RESTARTS = 3
_WITH_MEMORY = ("A100-SXM-80GB", "A100-PCIe-80GB", "V100-SXM-32GB", "V100-PCIe-32GB")
"""GPUs that SkyPilot tells from others of the chip by their memory."""


def accelerator(gpu: str) -> str:
    """Return SkyPilot's name of a GPU of the catalogue: `A100-80GB` for A100-SXM-80GB, `H100` for H100-SXM-80GB."""
    words = gpu.split("-")
    return f"{words[0]}-{words[-1]}" if gpu in _WITH_MEMORY else words[0]


def task(launch: ContainerLaunch) -> str:
    """Return the YAML of the task. Raises ConfigError where no GPU is named: SkyPilot asks for GPUs by name."""
    job = launch.job
    resources: dict[str, Any] = {"image_id": f"docker:{launch.image}"}
    environment = dict(ENVIRONMENT)
    if job.device == "cpu":
        resources["cpus"] = f"{launch.cpus_per_gpu * job.gpus_per_node}+"
        environment["DS_ACCELERATOR"] = "cpu"
    elif launch.gpu is None:
        raise ConfigError("--launcher skypilot without --gpu: SkyPilot asks for GPUs by name. Add --gpu NAME.")
    else:
        resources["accelerators"] = f"{accelerator(launch.gpu)}:{job.gpus_per_node}"
    resources["job_recovery"] = {"max_restarts_on_errors": MAX_RESTARTS, "recover_on_exit_codes": [SAVED]}
    document = {
        "name": launch.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "volumes": {VOLUME_PATH: launch.volume},
        "envs": environment,
        "setup": "dstk --version\n",
        "run": _run(launch),
    }
    return dump_yaml(document)


def _run(launch: ContainerLaunch) -> str:
    """The shell script that every node runs."""
    folder = f"/tmp/{launch.name}-files"
    lines = ["set -eu", f"mkdir -p {folder}"]
    for name, text in launch.files.items():
        end = f"END_OF_{name.upper().replace('.', '_')}"
        while end in text:
            end += "_"
        lines += [f"cat > {folder}/{name} <<'{end}'", text.removesuffix("\n"), end]
    lines.append(f"cd {VOLUME_PATH}")
    lines.append(f"exec dstk {shlex.join(launch.train(folder))} \\\n    {_ranks(launch)}")
    return "\n".join(lines) + "\n"


def _ranks(launch: ContainerLaunch) -> str:
    nproc = str(launch.job.gpus_per_node) if launch.job.device == "cpu" else '"$SKYPILOT_NUM_GPUS_PER_NODE"'
    if launch.job.nodes == 1:
        return f"--nproc {nproc}"
    return (
        f'--nproc {nproc} --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" \\\n'
        f'    --master-addr "$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" --master-port {launch.port}'
    )
