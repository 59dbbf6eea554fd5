"""ContainerLaunch: a job whose nodes are containers that run `dstk train`, as Kubernetes and SkyPilot start them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from toolkit.dsconfig.build import ConfigJob
from toolkit.errors import ConfigError

RECIPE = "recipe.yaml"
VOLUME_PATH = "/workspace"
"""Mount point of the volume: the working directory, so that relative paths of a recipe are paths of the volume."""
ENVIRONMENT = {"DSTK_CACHE": f"{VOLUME_PATH}/cache"}
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class ContainerLaunch:
    """A job in containers. Raises ConfigError for a name that no pod can have."""

    job: ConfigJob
    name: str
    image: str
    """A container image in which the toolkit is installed."""
    volume: str
    """A volume that all nodes mount: the cache, the run and its checkpoints are there."""
    files: Mapping[str, str]
    """Text of the files that the program reads, by their names: the recipe as `RECIPE`, and a DeepSpeed JSON."""
    arguments: Sequence[str] = ()
    """Layout and overrides."""
    deepspeed_config: str | None = None
    """Which of the files is a DeepSpeed JSON."""
    gpu: str | None = None
    """A GPU of the catalogue."""
    cpus_per_gpu: int = 8
    port: int = 29501

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            reason = "machines are named by it: at most 40 lower-case letters, digits and dashes, from a letter"
            raise ConfigError.of("--run-name", self.name, reason, "choose another")

    def train(self, folder: str) -> list[str]:
        """Return the arguments of `dstk` that are the same on all nodes. `folder`: where its files are."""
        words = ["train", f"{folder}/{RECIPE}", *self.arguments]
        if self.deepspeed_config is not None:
            words += ["--deepspeed-config", f"{folder}/{self.deepspeed_config}"]
        if self.job.recipe.run_dir is None:
            words.append(f"run_dir=runs/{self.name}")
        return [*words, "--resume", "auto"]


class _Dumper(yaml.SafeDumper):
    """Write texts of several lines as they are read, and every value where it stands."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(document: Mapping[str, Any]) -> str:
    """Return a document as YAML, in the order of its keys."""
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text
