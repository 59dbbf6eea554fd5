"""The YAML for `accelerate launch --config_file`, beside the DeepSpeed JSON that it names."""

from typing import Any

import yaml

from toolkit.dsconfig.job import ConfigJob
from toolkit.errors import ConfigError


def accelerate_yaml(job: ConfigJob, *, config_file: str, main_address: str, main_port: int) -> str:
    """The YAML of the first node. Raises ConfigError for a layout that accelerate cannot run by itself.

    With `deepspeed_config_file`, accelerate takes stage, offload, clipping and precision from the JSON and refuses them
    here.
    """
    if job.layout.pp > 1:
        raise ConfigError(
            f"layout {job.layout} for accelerate: it has no pipeline. Set pp=1, or launch this toolkit's train.py."
        )
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_config_file": config_file,
            # Every node runs the same line; pdsh would need a hostfile and ssh.
            "deepspeed_multinode_launcher": "standard",
            # Weights are built in shards, so that a model larger than a GPU can be loaded at all.
            "zero3_init_flag": job.layout.zero_stage == 3,
        },
        "distributed_type": "DEEPSPEED",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_process_ip": main_address if job.nodes > 1 else None,
        "main_process_port": main_port,
        "main_training_function": "main",
        "num_machines": job.nodes,
        "num_processes": job.layout.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    written = {key: value for key, value in config.items() if value is not None}
    text: str = yaml.safe_dump(written, sort_keys=False)
    return text
