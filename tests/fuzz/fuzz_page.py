"""The section of docs/parity.md about the fuzz, from the results of a run."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from compositions import MOST_OPTIONS, MOST_RANKS, ROOT
from fuzz_results import Result, folder_of, known_results
from odd_models import families

from toolkit.config.strategy import Strategy
from toolkit.models.support import all_families

PAGE = ROOT / "docs" / "parity.md"
BEGIN = "<!-- Compositions at random: written by `python tests/fuzz/fuzz.py page`. -->"
END = "<!-- End of compositions at random. -->"
TRAINED = ("same", "cannot tell", "differs", "failed")
_MOST_REASONS = 25
_MOST_LETTERS = 110
_AXES = {"dp": "dp", "cp": "cp", "cp_ulysses": "cp_ulysses", "tp": "tp", "pp": "pp", "ep": "ep", "ulysses": "Ulysses"}
_FLAGS = {
    "sp": "sequence parallelism",
    "inner": "experts: inner",
    "offload": "optimizer offload",
    "offacts": "activation offload",
    "tiled": "tiled_mlp",
    "recompute": "recompute: full",
    "selective": "recompute: selective",
}

FOUND = """
Found by compositions so far, and fixed, each with a test of its own:

- Models of Bamba, Falcon-H1, Granite hybrid and Nemotron-H could not be trained from a directory: transformers writes
  an infinite `time_step_limit` as an object, which was not read back.
- New models of RoBERTa's kin and of XLM failed in their first step: they compare tokens with a padding token, and a new
  model has none.
- Parameters that no loss depends on (towers for images in a model that trains on text, indexers) decayed with
  DeepSpeed, which gives them zeros as gradients, and not in one process, with DDP or with FSDP. All give zeros now.
- DDP waited for the gradients of such parameters, and FSDP could not shard families that name other modules than their
  decoder layers as indivisible.
- Muon updated adapters as AdamW does where ZeRO-3 replicas shard experts beside them.
- Laguna could not be sharded by `tp`: its layers have other numbers of heads than its config's one number.
- A stage's second backward pass, for sums over routers, failed under sequence parallelism where parameters have no part
  in it.
- With `model.expert_capacity_factor` and sequence parallelism, other ones of equally heavy tokens were dropped.
- ZAYA's routers can choose to skip the experts, which balancing losses could not count.
- MiniMax, XGLM and OpenAI GPT could not be trained with weights in 16 bits: their layers multiply by buffers.
- A stage that has not the head of ModernBERT's decoder failed when its weights were drawn.
- Now refused, where transformers' own code cannot do it: Inkling 2, DBRX and X-MOD in some ways of training in 16
  bits, FSDP with the tied bias of a BERT head, adapters of DeepSeek V4's grouped projections and of PhiMoE's routers,
  parts of Reformer, and DDP around it.
- DBRX died under ZeRO-3 on several ranks: it calls a module for each expert that has tokens, and ranks waited for
  different collectives.
- Falcon failed under ZeRO-3 with tiled MLPs: it adds to an output of which DeepSpeed's hook makes a view.
- DDP on one rank waited for gradients of parameters that no loss depends on.
- LoRA with tiled MLPs under ZeRO-3: the first layer's input has no gradient, and DeepSpeed released its MLP too early.
- GIT in a pipeline with recomputation: transformers has the output of embeddings require a gradient, to which it adds
  in place.
- Context parallelism under ZeRO-0 in bf16 failed: rotary embeddings leave queries in fp32 beside values in bf16.
- LongCat-Flash died under ZeRO-3 on several ranks, as DBRX did: its experts call an activation for each with tokens.
- `dstk compare` refused recipes with a ring exchange, because its baseline has no ranks to exchange with.
- More stages than layers were refused only when the model was built, where ranks have several stages each, and for
  mixtures.
- False alarm: a layout in fp16 skipped its first update, because each of two replicas has twice the gradient of one
  process, and the loss scale was as high as fp16 could bear. Compared runs begin with a lower one, 256 since OLMo 3
  overflowed at 4,096.
- False alarms: PhiMoE's routers draw noise, and the comparison left it on; Reformer cannot be looked at in evaluation.
"""


class NoResultsError(Exception):
    """There are no results of the present code."""


def write_section(code: str, seed: int, path: Path = PAGE) -> Path:
    """Write the section from the results that a state of the code has for a seed. Raises NoResultsError."""
    results = {result.index: result for result in known_results(folder_of(code)) if result.seed == seed}
    if not results:
        raise NoResultsError(f"there are no results of seed {seed} for the code {code}. Run `make fuzz SEED={seed}`.")
    path.write_text(with_section(path.read_text(), section([results[index] for index in sorted(results)])))
    return path


def with_section(page: str, text: str) -> str:
    """The page with another section, which is its last where it had none."""
    before, begin, rest = page.partition(BEGIN)
    after = rest.partition(END)[2] if begin else "\n"
    return f"{before if begin else before.rstrip() + chr(10) * 2}{BEGIN}\n{text.strip()}\n{END}{after}"


def section(results: Sequence[Result]) -> str:
    """The text of the section."""
    verdicts = [verdict for result in results for verdict in result.verdicts]
    kinds = Counter(verdict.verdict for verdict in verdicts)
    states = dict.fromkeys((result.state.commit, result.state.has_changes) for result in results)
    commits = sorted(f"{commit}{' with uncommitted changes' * changed}" for commit, changed in states)
    dates = sorted({result.date for result in results})
    has_trained = [result for result in results if _trained(result)]
    return _SECTION.format(
        seed=results[0].seed,
        first=results[0].index,
        last=results[-1].index,
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
        commits=f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}",
        reruns=_RERUNS if len(commits) > 1 else "",
        versions=results[0].state.versions,
        options=MOST_OPTIONS,
        ranks=MOST_RANKS,
        families=len({result.family for result in results if result.family}),
        compositions=len(results),
        layouts=len(verdicts),
        trained_compositions=len(has_trained),
        trained=sum(kinds[kind] for kind in TRAINED),
        same=kinds["same"],
        cannot_tell=kinds["cannot tell"],
        differs=kinds["differs"],
        failed=kinds["failed"],
        refused=kinds["refused"],
        at_start=kinds["refused at start"],
        bad=kinds["bad refusal"],
        worst="\n".join(_worst(results)),
        refusals="\n".join(_reasons(verdicts, "refused")),
        start_refusals="\n".join(_reasons(verdicts, "refused at start")),
        option_rows="\n".join(_option_rows(has_trained)),
        pairs=_pairs(has_trained),
        axis_rows="\n".join(_axis_rows(has_trained)),
        family_lines=_family_lines(results),
        failures=_failures(results),
        found=FOUND.strip(),
    )


def _trained(result: Result) -> list[Strategy]:
    """The layouts of a composition that were trained."""
    return [Strategy.parse(verdict.layout) for verdict in result.verdicts if verdict.verdict in TRAINED]


def _precision(result: Result) -> str:
    return str(result.options.get("precision", "fp32"))


def _worst(results: Sequence[Result]) -> Iterator[str]:
    for precision in ("fp32", "bf16", "fp16"):
        own = [
            (verdict, result.family or "none")
            for result in results
            if _precision(result) == precision
            for verdict in result.verdicts
            if verdict.verdict == "same"
        ]
        if own:
            names = ("loss", "norm", "weights")
            values = [_spread([getattr(verdict, name) for verdict, _ in own]) for name in names]
            _, family = max(own, key=lambda pair: pair[0].norm or 0.0)
            yield f"| {precision} | {len(own)} | {' | '.join(values)} | {family} |"


def _spread(values: Iterable[float | None]) -> str:
    """The median of what is known and finite, and the largest."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return f"{median(finite):.1e} to {max(finite):.1e}" if finite else "none"


def _reasons(verdicts: Sequence[object], kind: str) -> Iterator[str]:
    counts = Counter(_short(verdict.reason) for verdict in verdicts if verdict.verdict == kind)  # type: ignore[attr-defined]
    for reason, count in counts.most_common(_MOST_REASONS):
        yield f"| {count} | {reason} |"
    rest = counts.total() - sum(count for _, count in counts.most_common(_MOST_REASONS))
    if rest:
        yield f"| {rest} | {len(counts) - _MOST_REASONS} other reasons |"


def _short(reason: str) -> str:
    """A reason on one line of a table, without the numbers and the name of one model."""
    line = " ".join(reason.split()).replace("|", "\\|")
    line = re.sub(r"(?<![\w.-])\d+\b", "N", re.sub(r"the family \S+", "the family", line))
    return line if len(line) <= _MOST_LETTERS else f"{line[:_MOST_LETTERS].rsplit(' ', 1)[0]} …"


def options_of(result: Result) -> tuple[str, ...]:
    """What a composition sets, in words that can be counted: a choice with its value, other fields by name."""
    found = []
    for field, value in result.options.items():
        if field in ("data.source", "data.tokenizer", "optimizer.lr", "train.seed"):
            continue
        is_choice = isinstance(value, str) or field in ("data.seq_len",)
        if field == "train.grad_clip":
            found.append("train.grad_clip: off" if value == 0 else "train.grad_clip: active")
        elif field == "model.router_aux_loss":
            found.append(f"model.router_aux_loss: {value['scope']}")
        elif field == "model.lora":
            found.append("model.lora: DoRA" if value.get("dora") else "model.lora")
        elif field.startswith("batch."):
            found.append("batch sizes")
        else:
            found.append(f"{field}: {value}" if is_choice else field)
    return tuple(sorted(dict.fromkeys(found)))


def _option_rows(results: Sequence[Result]) -> Iterator[str]:
    counts = Counter(option for result in results for option in options_of(result))
    for option, count in sorted(counts.items()):
        yield f"| {option} | {count} |"


def _pairs(results: Sequence[Result]) -> str:
    names = sorted({option for result in results for option in options_of(result)})
    seen = Counter(pair for result in results for pair in combinations(options_of(result), 2))
    possible = [pair for pair in combinations(names, 2) if _may_be_together(*pair)]
    return f"{sum(pair in seen for pair in possible)} of {len(possible)}"


def _may_be_together(one: str, other: str) -> bool:
    """Whether two are not values of the same field."""
    return one.partition(":")[0] != other.partition(":")[0]


def _axis_rows(results: Sequence[Result]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for result in results:
        for layout in _trained(result):
            counts.update(_words(layout))
    for word, count in sorted(counts.items()):
        yield f"| {word} | {count} |"


def _words(layout: Strategy) -> Iterator[str]:
    yield f"engine {layout.engine}" if layout.engine != "deepspeed" else f"ZeRO-{layout.zero_stage}"
    sizes: Mapping[str, int] = {axis: getattr(layout, axis) or 1 for axis in _AXES}
    yield from (f"{_AXES[axis]} {size}" for axis, size in sizes.items() if size > 1)
    yield from (word for flag, word in _FLAGS.items() if getattr(layout, flag))
    if layout.every is not None:
        yield f"recompute: every_{layout.every}"
    if layout.hpz > 1:
        yield "ZeRO++ hpz"
    if layout.schedule is not None:
        yield f"schedule {layout.schedule}"
    split = [axis for axis in ("dp", "cp", "tp", "pp", "ulysses") if sizes[axis] > 1]
    if len(split) > 1:
        yield " x ".join(_AXES[axis] for axis in split)


def _family_lines(results: Sequence[Result]) -> str:
    trained = Counter(result.family for result in results if _trained(result))
    drawn = Counter(result.family for result in results if result.family)
    never = sorted(name for name in drawn if name not in trained)
    sharded = {name for name in trained if all_families()[name].supports("tensor")}
    missing = sorted(name for name in families() if name not in drawn)
    text = f"{len(trained)} families were trained, {len(sharded)} of them can be sharded by tp"
    text += f"; {len(never)} were drawn and always refused" if never else ""
    text += f" ({', '.join(never)})" if never else ""
    text += f". Not drawn, or not run by transformers itself on input_ids: {', '.join(missing)}" if missing else ""
    return text + "."


def _failures(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        for verdict in result.failures:
            command = result.shrunk.get(verdict.layout, result.command)
            lines.append(f"- index {result.index}, `{verdict.layout}`: {verdict.verdict}. `{command}`")
    return "\n".join(lines) if lines else "None."


_RERUNS = " Those that failed were trained again on the later commits, with what they had found fixed."

_SECTION = """\
## Compositions at random

Written by `python tests/fuzz/fuzz.py page` from compositions {first} to {last} of seed {seed}, run on {dates},
{commits}, {versions}, CPU ranks over gloo.{reruns}

The matrix above holds what was thought of. A composition is drawn: a family of `dstk families`, a model of odd sizes
(3 to 5 layers, 6 heads with 2 or 3 key-value heads, vocabularies that are prime), up to {options} options of a recipe
at once, and three layouts on at most {ranks} ranks. It follows from a seed and its index. What `dstk validate` accepts
must train what one process trains, by the code and the bounds of `dstk compare`; what it refuses must be one line for
each problem and exit code 2. A composition that fails is shrunk to the smallest one that still fails, and printed as a
command of `dstk compare`. `make test` trains four of them, with a seed that changes with the version
([how to run more](../CONTRIBUTING.md#fuzz-of-compositions)).

| | |
|---|---|
| compositions | {compositions}, of {families} families |
| compositions of which a layout was trained | {trained_compositions} |
| layouts | {layouts} |
| layouts trained | {trained} |
| … the same as one process | {same} |
| … different as far as growth of rounding explains (`dstk compare` cannot tell) | {cannot_tell} |
| … different | {differs} |
| … failed with an error | {failed} |
| layouts refused by `dstk validate` | {refused} |
| layouts refused when the model was built, before the first step | {at_start} |
| refusals that were not one line with exit code 2 | {bad} |

Relative differences of those that train the same, the median and the largest:

| precision | layouts | loss | gradient norm | all weights | family of the largest norm |
|---|---|---|---|---|---|
{worst}

Each layout is held to four times the spread of reruns of its own baseline that round differently. The largest
differences are of random models that amplify rounding, whose reruns spread as far.

Differences and failures of this run:

{failures}

{found}

### What was trained

{pairs} pairs of options were trained together. {family_lines}

| option | compositions trained |
|---|---|
{option_rows}

| layout | layouts trained |
|---|---|
{axis_rows}

### What was refused

By `dstk validate`, the first reason of each:

| layouts | reason |
|---|---|
{refusals}

When the model was built, for what is known only then, or for what this machine lacks (a GPU, a package):

| layouts | reason |
|---|---|
{start_refusals}
"""
