"""Train a Hugging Face GPT from a recipe, with DeepSpeed ZeRO, on any number of ranks.

deepspeed --num_gpus 8 recipes/train.py --config recipes/gpt2/z1.yaml
accelerate launch --use_deepspeed --num_processes 8 recipes/train.py --config recipes/gpt2/z1.yaml
torchrun --nproc_per_node 8 recipes/train.py --config recipes/gpt2/z1.yaml
srun --ntasks-per-node 8 python recipes/train.py --config recipes/gpt2/z1.yaml
python recipes/train.py --config recipes/demo.yaml train.engine=reference train.steps=20
"""

import sys
from dataclasses import replace
from pathlib import Path

from toolkit import recipe_file
from toolkit.report.loss_plot import plot_loss
from toolkit.train.arguments import parse_arguments
from toolkit.train.checkpointing import Checkpointer
from toolkit.train.console import make_progress, show_banner, show_summary
from toolkit.train.data.tokens import prepare
from toolkit.train.engines.factory import create_engine
from toolkit.train.feed import Feed
from toolkit.train.launch import (
    RankEnvironment,
    check_same_everywhere,
    pick_device,
    process_group,
    quiet,
    reported_errors,
)
from toolkit.train.loop import fit
from toolkit.train.preemption import Preemption
from toolkit.train.preflight import check_model, check_vocabulary, deepspeed_config, find_shape
from toolkit.train.resume import resume, run_of
from toolkit.train.run_directory import RunDirectory
from toolkit.train.trackers import Trackers


def main(argv: list[str]) -> None:
    """Check everything before the ranks meet and before anything is written; then train, and leave a model."""
    arguments = parse_arguments(argv, description=__doc__ or "")
    trust = arguments.trust_remote_code
    here = RankEnvironment.detect()
    first = here.rank == 0

    recipe = recipe_file.load(arguments.config, arguments.overrides, world_size=here.world_size)
    quiet(debug=recipe.log.level == "debug")
    device = pick_device(here)
    layout = recipe.layout(here.world_size)
    batch = recipe.resolve_batch(layout)
    config = check_model(recipe, device, trust_remote_code=trust)
    ds_config = deepspeed_config(recipe, layout, batch, config, device, arguments.deepspeed_config)
    earlier = run_of(arguments.resume, recipe) if arguments.resume else None
    run = RunDirectory.choose(
        recipe, name=Path(arguments.config).stem, is_writer=first, overwrite=arguments.overwrite, goes_on_in=earlier
    )

    corpus = prepare(recipe.data, progress=first and recipe.log.level != "warning")
    check_vocabulary(recipe, config, corpus)
    tokenizer = corpus.tokenizer()
    feed = Feed.open(recipe, layout, batch, corpus, rank=here.rank)
    progress = make_progress(recipe, layout, device, find_shape(config), first=first)

    with process_group(here, device, hang_timeout_seconds=recipe.train.hang_timeout) as watchdog:
        feed = replace(feed, mark=watchdog.mark)
        check_same_everywhere(recipe_file.dump(recipe) + corpus.contents, device)
        resumed = resume(arguments.resume, recipe, strict=arguments.strict) if arguments.resume else None
        if resumed is not None:
            resumed.check(recipe, corpus)
        engine = create_engine(recipe, layout, batch, device, ds_config, eos_id=corpus.eos_id, trust_remote_code=trust)
        engine.mark = watchdog.mark
        checkpointer = Checkpointer(
            recipe=recipe, layout=layout, batch=batch, engine=engine, tokenizer=tokenizer, corpus=corpus
        )
        if resumed is not None:
            checkpointer.restore(resumed.saved, resumed.state)
        show_banner(progress, recipe, layout, batch, engine, corpus, len(feed.train), run, device, resumed)
        after = None if resumed is None else resumed.state
        with Preemption() as preemption:
            run.open(recipe, ds_config, device, goes_on_after=0 if after is None else after.step)
            trackers = Trackers.start(recipe, run.path, enabled=first)
            history = fit(recipe, engine, feed, run, progress, trackers, checkpointer, preemption, after=after)

        watchdog.mark("finish")
        run.save_model("model", engine, tokenizer)
        if first:
            losses, held_out = run.curve()
            plot_loss(
                run.path / "loss.png",
                losses,
                title=f"{recipe.model.name_or_path}, {recipe.strategy(layout)}",
                held_out=held_out,
                unigram_entropy=corpus.unigram_entropy,
                entropy_rate=corpus.loss_floor(recipe.data.packing),
            )
        trackers.finish()
        run.close()
    show_summary(progress, recipe, history, corpus, run)


if __name__ == "__main__":
    with reported_errors():
        main(sys.argv[1:])
