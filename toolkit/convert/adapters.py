"""LoRA's adapters on disk: which model they are beside, and both merged into one, tensor by tensor."""

import math
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.names import ADAPTER_CONFIG, MODEL, checkpoint_error
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.convert.loaded_model import load_model
from toolkit.errors import RunError
from toolkit.files import printable, read_json_object
from toolkit.parallel.adapter_names import PREFIX

_FOREIGN = ("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "lora_bias", "target_parameters")
"""Features of peft that no run here has: merging such adapters is left to peft."""


def has_adapters(folder: Path) -> bool:
    """Whether a directory holds adapters in place of a model."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises CheckpointError."""
    try:
        config = read_json_object(folder / ADAPTER_CONFIG, follow=True)
        if config.get("peft_type") != "LORA":
            raise ValueError(f"its peft_type is {config.get('peft_type')}, not LORA")
        if not isinstance(config.get("base_model_name_or_path"), str):
            raise ValueError("it has no base_model_name_or_path")
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({printable(str(error))}). Name another directory."
        raise checkpoint_error(folder / ADAPTER_CONFIG, problem) from None
    return config


def base_of(folder: Path) -> Path:
    """The directory of the model beside the adapters; that of a run which was moved is beside them.

    Raises CheckpointError where there is none.
    """
    named = str(read_adapter_config(folder)["base_model_name_or_path"])
    for place in (Path(named), folder.resolve().parent / "base"):
        if (place / "config.json").is_file():
            return place
    from transformers.utils import cached_file

    try:
        config = cached_file(named, "config.json")
    except (OSError, ValueError):
        config = None
    if config is None:
        problem = f"the model that its adapters are beside, {printable(named)}, is neither a directory nor readable"
        raise checkpoint_error(folder, f"{problem}. Correct base_model_name_or_path in {ADAPTER_CONFIG}.")
    return Path(config).parent


def check_peft(purpose: str) -> None:
    """Raise RunError where peft is not installed, which `purpose` needs."""
    if find_spec("peft") is None:
        install = "pip install '.[lora]'"
        raise RunError(f"peft is not installed, which {purpose} needs. Install it: {install}.")


def load_adapted(folder: Path, base: Path, **options: Any) -> Any:
    """Load adapters beside the model in `base`, as a PeftModel. `options`: of that model's from_pretrained.

    Raises RunError without peft, and CheckpointError where the base lacks weights.
    """
    check_peft("loading adapters")
    from peft import PeftModel

    model = load_model(base, **options)
    with warnings.catch_warnings():
        # peft asks the model for a property that transformers has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return PeftModel.from_pretrained(model, str(folder))


class MergedWeights:
    """The weights of `base` with the adapters in `folder` added to them. Raises CheckpointError."""

    def __init__(self, folder: Path, base: CheckpointReader) -> None:
        self.base = base
        self._adapters = CheckpointReader(folder)
        config = read_adapter_config(folder)
        self._config = config
        foreign = next((name for name in _FOREIGN if config.get(name)), None)
        if foreign is None and config.get("bias", "none") != "none":
            foreign = "bias"
        if foreign is not None:
            raise checkpoint_error(
                folder, f"its {ADAPTER_CONFIG} has {foreign}. Merge it with peft's merge_and_unload."
            )
        divisor = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
        self._scale = config["lora_alpha"] / divisor
        names = [name for name in self._adapters.specs[MODEL] if name.endswith(".lora_A.weight")]
        self._path_of = {self._stored(name): name.removesuffix(".lora_A.weight") for name in names}

    def _stored(self, name: str) -> str:
        """The base's name of the weight that an adapter is beside: files may omit the first parts of a name."""
        weight = f"{name.removeprefix(PREFIX).removesuffix('.lora_A.weight')}.weight"
        stored = self.base.specs[MODEL]
        shorter = weight
        while shorter not in stored and "." in shorter.removesuffix(".weight"):
            shorter = shorter.partition(".")[2]
        if shorter not in stored:
            problem = f"it has no {weight}, which the adapters in {self._adapters.path} are beside"
            raise checkpoint_error(self.base.path, f"{problem}. Merge them with peft's merge_and_unload.")
        return shorter

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the merged model: as it is stored, or in fp32 where there is an adapter."""
        weight = self.base.tensor(MODEL, name).clone()
        path = self._path_of.get(name)
        if path is None:
            return weight
        part: Callable[[str], torch.Tensor] = lambda kind: self._adapters.tensor(  # noqa: E731
            MODEL, f"{path}.{kind}", dtype=torch.float32
        ).clone()
        is_input_major = bool(self._config.get("fan_in_fan_out"))
        merged = weight.float().T if is_input_major else weight.float()  # [o, i]
        merged = merged + float(self._scale) * (part("lora_B.weight") @ part("lora_A.weight"))
        if self._config.get("use_dora"):
            magnitude = part("lora_magnitude_vector")
            merged = merged * (magnitude / torch.linalg.norm(merged, dim=1)).unsqueeze(1)
        result: torch.Tensor = (merged.T if is_input_major else merged).contiguous()
        return result
