"""Train a Hugging Face GPT from a recipe, with DeepSpeed ZeRO, on any number of ranks.

deepspeed --num_gpus 8 recipes/train.py --config gpt2-pretrain --layout z1
accelerate launch --use_deepspeed --num_processes 8 recipes/train.py --config gpt2-pretrain --layout z1
torchrun --nproc_per_node 8 recipes/train.py --config gpt2-pretrain --layout z1
srun --ntasks-per-node 8 python recipes/train.py --config gpt2-pretrain --layout z1
python recipes/train.py --config recipes/demo.yaml train.engine=reference train.steps=20
"""

import gc
import sys

import toolkit  # which imports torch later, when requests to stop are handled
from toolkit.launch.output import quiet, reported_errors
from toolkit.training.arguments import parse_arguments


def main(argv: list[str]) -> None:
    """Read the recipe for the ranks of this launch, and train it."""
    arguments = parse_arguments(argv, description=__doc__ or "")
    job = toolkit.load_job(arguments.config, arguments.overrides, arguments.layout)
    gc.freeze()  # collections, which DeepSpeed asks for as well, skip all that was imported
    quiet(debug=job.recipe.log.level == "debug")
    toolkit.train(job, options=arguments.options)


if __name__ == "__main__":
    with reported_errors():
        main(sys.argv[1:])
