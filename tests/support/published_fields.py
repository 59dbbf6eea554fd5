"""Fields of Kubernetes and SkyPilot with their types, for what launch files may say.

Written after JobSet's `config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml` of release 0.12 and `get_task_schema`,
`get_resources_schema` of SkyPilot 0.14. Unknown fields are errors there, or are dropped without a word.
"""

from collections.abc import Iterator
from typing import Any

EACH = "*"
"""Any name: the fields of a map."""
_TEXTS = {EACH: str}
_CONTAINER = {
    "name": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [{"name": str, "value": str}],
    "ports": [{"containerPort": int, "name": str, "protocol": str}],
    "resources": {"requests": {EACH: (str, int)}, "limits": {EACH: (str, int)}},
    "volumeMounts": [{"name": str, "mountPath": str, "subPath": str, "readOnly": bool}],
}
_VOLUME = {
    "name": str,
    "configMap": {"name": str, "defaultMode": int, "optional": bool},
    "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
    "emptyDir": {"medium": str, "sizeLimit": (str, int)},
}
_POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "containers": [_CONTAINER],
    "volumes": [_VOLUME],
    "nodeSelector": _TEXTS,
    "hostname": str,
    "subdomain": str,
}
_JOB = {
    "completionMode": str,
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules": [
            {
                "action": str,
                "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
                "onPodConditions": [{"type": str, "status": str}],
            }
        ]
    },
    "template": {"metadata": {"labels": _TEXTS, "annotations": _TEXTS}, "spec": _POD},
}
JOB_SET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": _TEXTS, "annotations": _TEXTS},
    "spec": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": str,
            "rules": [
                {
                    "name": str,
                    "action": str,
                    "onJobFailureReasons": [str],
                    "onJobFailureMessagePatterns": [str],
                    "targetReplicatedJobs": [str],
                }
            ],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "groupName": str, "template": {"spec": _JOB}}],
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}
CONFIG_MAP = {"apiVersion": str, "kind": str, "metadata": {"name": str}, "data": _TEXTS, "immutable": bool}
SKYPILOT_TASK = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {
        "infra": str,
        "accelerators": str,
        "cpus": (str, int, float),
        "memory": (str, int, float),
        "use_spot": bool,
        "image_id": str,
        "job_recovery": {"strategy": str, "max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
    },
    "file_mounts": _TEXTS,
    "volumes": _TEXTS,
    "envs": _TEXTS,
    "setup": str,
    "run": str,
}


def misspelled(value: Any, schema: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that the schema does not have, or has with another type."""
    if isinstance(schema, dict) and isinstance(value, dict):
        for name, item in value.items():
            if name in schema or EACH in schema:
                yield from misspelled(item, schema.get(name, schema.get(EACH)), f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(schema, list) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from misspelled(item, schema[0], f"{path}[{index}]")
    elif isinstance(schema, (dict, list)) or not isinstance(value, schema) or (value is True and schema is int):
        yield path
