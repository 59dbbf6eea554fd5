"""ConfigJob: everything one generated config follows from, and the config."""

from dataclasses import dataclass
from functools import cached_property

from toolkit.batch import Batch
from toolkit.dsconfig.build import Config, Device, build
from toolkit.dsconfig.options import PLAIN, ConfigOptions
from toolkit.errors import LayoutError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class ConfigJob:
    """A recipe on a layout on machines. `config` raises ConfigError for options that cannot be honoured."""

    recipe: Recipe
    layout: Layout
    batch: Batch
    shape: ModelShape
    nodes: int = 1
    device: Device = "cuda"
    options: ConfigOptions = PLAIN

    def __post_init__(self) -> None:
        if self.layout.world_size % self.nodes:
            raise LayoutError(
                f"{self.layout.world_size} ranks on {self.nodes} nodes: every node starts the same number of ranks. "
                "Choose a number of nodes that divides the ranks."
            )

    @property
    def gpus_per_node(self) -> int:
        """Ranks of one node."""
        return self.layout.world_size // self.nodes

    @cached_property
    def config(self) -> Config:
        """The DeepSpeed JSON as a dict."""
        return build(
            self.recipe,
            self.layout,
            self.batch,
            hidden_size=self.shape.hidden,
            device=self.device,
            options=self.options,
            nodes=self.nodes,
        )
