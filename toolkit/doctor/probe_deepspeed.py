"""What DeepSpeed says about itself and its compiled ops, as a line of JSON. Run in a process of its own.

python -m toolkit.doctor.probe_deepspeed
"""

import json
from typing import Any

from toolkit.doctor.facts import MARK


def facts() -> dict[str, Any]:
    """The version, the accelerator, and which ops are built or can be."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    ops = {}
    for name, builder in ALL_OPS.items():
        try:
            compatible = bool(builder.is_compatible(verbose=False))
        except Exception:  # an op that cannot even say so
            compatible = False
        ops[name] = {"built": bool(installed_ops.get(name, False)), "can_be_built": compatible}
    return {"version": deepspeed.__version__, "accelerator": get_accelerator()._name, "ops": ops}


if __name__ == "__main__":
    print(MARK + json.dumps(facts()))
