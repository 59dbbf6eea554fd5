"""Kubernetes: a job as a JobSet, with a ConfigMap that holds its files.

Schema: https://github.com/kubernetes-sigs/jobset, `jobset.x-k8s.io/v1alpha2`, as of release 0.10. Each pod is a node
of the job. JobSet gives pods host names, so that ranks meet at the first pod, and starts all again when one fails.
"""

from typing import Any

from toolkit.dsconfig.container_launch import ENVIRONMENT, VOLUME_PATH, ContainerLaunch, dump_yaml

GRACE_SECONDS = 150
"""Time from SIGTERM to SIGKILL: the two minutes that `dstk train` gives ranks to save, and half a minute to exit."""
MAX_RESTARTS = 10
BAD_INPUT = 2
SAVED = 75
_PODS = "node"
_FILES = "/etc/dstk"


def jobset(launch: ContainerLaunch) -> str:
    """Return the YAML for `kubectl apply`."""
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _config_map(launch)},
        "data": dict(launch.files),
    }
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": launch.name},
        "spec": {
            # Host names resolve before a pod is ready: ranks wait for each other at start-up.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": launch.name},
            "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": _restart_rules()},
            "replicatedJobs": [{"name": _PODS, "replicas": 1, "template": {"spec": _job(launch)}}],
        },
    }
    return f"{dump_yaml(config_map)}---\n{dump_yaml(job_set)}"


def _config_map(launch: ContainerLaunch) -> str:
    return f"{launch.name}-files"


def _restart_rules() -> list[dict[str, Any]]:
    """Bad input ends the job; a run that saved, or lost a pod to preemption, restarts without being counted."""
    reasons = ["PodFailurePolicy"]
    return [
        {
            "name": "badInput",
            "action": "FailJobSet",
            "onJobFailureReasons": reasons,
            "onJobFailureMessagePatterns": [f"exit code {BAD_INPUT} "],
        },
        {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": reasons},
    ]


def _job(launch: ContainerLaunch) -> dict[str, Any]:
    exit_codes = {"containerName": "train", "operator": "In", "values": [BAD_INPUT, SAVED]}
    return {
        "completionMode": "Indexed",
        "completions": launch.job.nodes,
        "parallelism": launch.job.nodes,
        # One failed pod fails the job: its peers cannot train without it.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": exit_codes},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(launch)},
    }


def _pod(launch: ContainerLaunch) -> dict[str, Any]:
    mounts = {"files": _FILES, "work": VOLUME_PATH, "shared-memory": "/dev/shm"}
    volumes = [
        {"name": "files", "configMap": {"name": _config_map(launch)}},
        {"name": "work", "persistentVolumeClaim": {"claimName": launch.volume}},
        # NCCL and data loaders share memory; a container has 64 MiB of it by default.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    container = {
        "name": "train",
        "image": launch.image,
        "command": ["dstk"],
        "args": _arguments(launch),
        "workingDir": VOLUME_PATH,
        "env": [{"name": name, "value": value} for name, value in _environment(launch).items()],
        "resources": _resources(launch),
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }


def _arguments(launch: ContainerLaunch) -> list[str]:
    """The arguments of `dstk`, in which Kubernetes replaces `$(NAME)` by a variable and `$$` by `$`."""
    words = [word.replace("$(", "$$(") for word in launch.train(_FILES)]
    words += ["--nproc", str(launch.job.gpus_per_node)]
    if launch.job.nodes > 1:
        words += ["--nnodes", str(launch.job.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        words += ["--master-addr", f"{launch.name}-{_PODS}-0-0.{launch.name}", "--master-port", str(launch.port)]
    return words


def _environment(launch: ContainerLaunch) -> dict[str, str]:
    return ENVIRONMENT | ({"DS_ACCELERATOR": "cpu"} if launch.job.device == "cpu" else {})


def _resources(launch: ContainerLaunch) -> dict[str, Any]:
    cores = {"cpu": str(launch.cpus_per_gpu * launch.job.gpus_per_node)}
    if launch.job.device == "cpu":
        return {"requests": cores}
    plugin = "amd.com/gpu" if (launch.gpu or "").startswith("MI") else "nvidia.com/gpu"
    return {"requests": cores, "limits": {plugin: launch.job.gpus_per_node}}
