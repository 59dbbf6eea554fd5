"""Writes toolkit/estimate/recorded/recordings.zip: what models of the catalogue keep, recorded from their code.

    make recordings                                   # an hour on one core; what is there already is not made again
    python docs/generate_recordings.py llama-3-8b     # some models: several of these can run side by side
    python docs/generate_recordings.py --zip          # write the file from what is there

Each model has a file in build/recordings. The settings are those that are asked for most: kernels of a GPU in bf16, by
sdpa where the family has it. All others are recorded on first use.
"""

import argparse
import json
import os
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import transformers

from toolkit.config.layout import Layout, Recompute
from toolkit.errors import ToolkitError
from toolkit.estimate.computation import Attention, Computation
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.recorded.recording import SAMPLES, RankPass, StagePart, config_text, model_key
from toolkit.estimate.recorded.recordings import SHIPPED, versions
from toolkit.models.config_fields import text_config
from toolkit.models.shape import find_config, names
from toolkit.models.support import attention_kinds, find
from toolkit.recorder.parameters import record_parameters
from toolkit.recorder.record import record

FOLDER = Path(__file__).parents[1] / "build" / "recordings"
RANKS = (1, 2, 4, 8)
RECOMPUTATIONS: tuple[Recompute, ...] = ("none", "full")
EXPERT_RANKS = tuple(product((1, 2), (2, 4, 8)))
"""tp and ep, of mixtures of experts."""
Kind = Literal["whole", "experts", "blocks", "sequence parallel", "stages"]
KINDS: tuple[Kind, ...] = ("whole", "experts", "blocks", "stages", "sequence parallel")
"""The settings that are asked for most come first."""


def main() -> None:
    """Record what is not there yet, and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--zip", action="store_true", help="record nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not options.zip:
        for kind in KINDS:
            for name in options.models or filter(has_an_estimate, names()):
                add(name, kind)
    if not options.models:
        pack()


def has_an_estimate(name: str) -> bool:
    """Whether its family can be recorded."""
    support = find(str(text_config(find_config(name) or {}).get("model_type")))
    return support is not None and support.pipeline_refusal is None


def add(name: str, kind: Kind) -> None:
    """Record the settings of one kind that the model's file lacks."""
    config = find_config(name) or {}
    text = config_text(config)
    path = FOLDER / f"{model_key(text)}.json"
    content = json.loads(path.read_text()) if path.exists() else shipped(path.name)
    if content.get("versions") != versions():
        content = {"recordings": {}, "versions": versions()}
    known, window = content["recordings"], config.get("sliding_window") or config.get("attention_chunk_size")
    lengths = (1, window) if window and window <= config.get("max_position_embeddings", window) else (1,)
    started, added = time.monotonic(), 0
    if "parameters" not in content:
        content["parameters"] = record_parameters(text).encoded()
        added += 1
    experts = any(one.is_experts for one in ModelParameters.decoded(content["parameters"]).parameters())
    for rank_pass in (
        ()
        if kind == "experts" and not experts
        else passes(text, "sdpa" if "sdpa" in attention_kinds(config["model_type"]) else "eager", kind)
    ):
        if rank_pass.key in known:
            continue
        try:
            has_masks = rank_pass.computation.attention != "blocks"
            known[rank_pass.key] = [record(rank_pass, s).encoded() for s in (lengths if has_masks else lengths[:1])]
        except ToolkitError as error:
            known[rank_pass.key] = []  # for instance more ranks than heads
            print(f"{name}, {rank_pass.key}: {error}", file=sys.stderr)
        added += 1
    if added:
        temporary = path.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(json.dumps(content, separators=(",", ":")))
        temporary.replace(path)
        print(f"{name}, {kind}: {added} in {time.monotonic() - started:.0f} s", flush=True)


def passes(config: str, attention: Attention, kind: Kind) -> Iterator[RankPass]:
    """The settings of one kind."""
    in_blocks = Computation(attention="blocks")
    if kind == "blocks":
        for tp, recompute, samples in product(RANKS, RECOMPUTATIONS, SAMPLES):
            layout = Layout(tp=tp, recompute=recompute)
            yield RankPass(config=config, layout=layout, computation=in_blocks, samples=samples)
        return
    computation = Computation(attention=attention)
    if kind == "experts":
        for (tp, ep), recompute in product(EXPERT_RANKS, RECOMPUTATIONS):
            layout = Layout(dp=ep, ep=ep, tp=tp, recompute=recompute)
            yield RankPass(config=config, layout=layout, computation=computation)
            for samples in SAMPLES:
                yield RankPass(config=config, layout=layout, computation=in_blocks, samples=samples)
        return
    parallel = kind == "sequence parallel"
    stages: tuple[StagePart, ...] = () if kind == "whole" else ("first", "middle", "last")
    parts: tuple[StagePart, ...] = stages if kind == "stages" else ("whole", *stages)
    recomputations = (*RECOMPUTATIONS, "selective") if kind == "whole" else RECOMPUTATIONS
    for tp, recompute, part, samples in product(RANKS[parallel:], recomputations, parts, SAMPLES):
        layout = Layout(tp=tp, sequence_parallel=parallel, recompute=recompute)
        yield RankPass(config=config, layout=layout, computation=computation, part=part, samples=samples)


def shipped(name: str) -> dict[str, Any]:
    """What is shipped for a model; empty where nothing is."""
    try:
        with zipfile.ZipFile(SHIPPED) as archive:
            content: dict[str, Any] = json.loads(archive.read(name))
    except (FileNotFoundError, KeyError):
        return {}
    return content


def pack() -> None:
    """Write the file, the same bytes for the same content. What was not recorded here stays as it was shipped."""
    with zipfile.ZipFile(SHIPPED) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    for path in FOLDER.glob("*.json"):
        content = json.loads(path.read_text())
        content["recordings"] = {key: known for key, known in content["recordings"].items() if known}
        texts[path.name] = json.dumps(content, separators=(",", ":"))
    with zipfile.ZipFile(SHIPPED, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in sorted(texts.items()):
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    print(f"{SHIPPED.name}: {SHIPPED.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
