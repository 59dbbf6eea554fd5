"""Record for a process without torch: each line of stdin is JSON and asks for one thing, each line of stdout answers.

echo '{"pass": {"config": "{\\"model_type\\": \\"gpt2\\"}"}, "s": 1024}' | python -m toolkit.recorder
"""

import json
import os
import sys
import warnings
from typing import Any

import transformers

from toolkit.errors import ToolkitError
from toolkit.estimate.recorded.recording import RankPass
from toolkit.recorder.parameters import record_parameters
from toolkit.recorder.record import record


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The recording, or the parameters of a config, or why there are none."""
    try:
        if "pass" not in question:
            return record_parameters(question["config"], question["trainable"]).encoded()
        return record(RankPass.decoded(question["pass"]), question["s"]).encoded()
    except ToolkitError as error:
        return {"error": str(error)}


def main() -> None:
    """Answer one question a line until stdin ends."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line)), separators=(",", ":")), file=answers, flush=True)


if __name__ == "__main__":
    main()
