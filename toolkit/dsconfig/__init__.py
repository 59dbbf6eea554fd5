"""DeepSpeed configs: built from a recipe, and checked against one."""

from toolkit.dsconfig.build import Device, build
from toolkit.dsconfig.merge import merge_user_config, read_user_config

__all__ = ["Device", "build", "merge_user_config", "read_user_config"]
