"""Bad inputs as data: a command line, the kernel of the one line that it must print, and the files that make it bad.

Every row starts from the same small folder (`test_bad_inputs.py` makes it): `r.yaml` trains `text.txt`, `hf/` is a tiny
GPT-2 in Hugging Face format, `run/` a run with a checkpoint, `ds.json` a DeepSpeed config. The first word of a command
line is a command of `dstk`, or `train.py` for recipes/train.py.
"""
# ruff: noqa: E501 - a table reads in rows

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet


@dataclass(frozen=True)
class Special:
    """A link to `target`, a named pipe, a socket, a directory, an empty file of `size` bytes, or nothing."""

    kind: str
    target: str = ""
    size: int = 0


Content = bytes | str | Callable[[bytes], bytes] | Special
"""What a path holds instead: new content, a change of the old content, or something that is no regular file."""
PIPE, SOCKET, FOLDER, GONE = Special("pipe"), Special("socket"), Special("folder"), Special("gone")


def link(target: str) -> Special:
    return Special("link", target=target)


def sparse(size: int) -> Special:
    return Special("sparse", size=size)


MANY_DIGITS = "9" * 6000
HUGE_MODEL = json.dumps(
    {"model_type": "llama", "num_hidden_layers": 10000, "num_attention_heads": 32}
    | dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 2147483616)
)
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BAD_CHATS = (
    ('{"text": "a"}', "a.jsonl:1: there is no messages or conversations"),
    ('{"messages": []}', "a.jsonl:1: messages is empty"),
    ('{"messages": "a"}', "a.jsonl:1: messages is a str"),
    ('{"conversations": {"from": "gpt"}}', "a.jsonl:1: conversations is a dict"),
    ('{"messages": ["a"]}', "messages[0] is a str"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "no turn is the assistant's"),
    ('{"messages": [{"role": "robot", "content": "a"}]}', "messages[0] has the role 'robot'"),
    ('{"messages": [{"content": "a"}]}', "messages[0] has the role None"),
    ('{"messages": [{"role": ["user"], "content": "a"}]}', "messages[0] has the role ['user']"),
    ('{"messages": [{"role": "assistant"}]}', "the content of messages[0] is a NoneType"),
    (
        '{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}',
        "the content of messages[0] is a list",
    ),
    ('{"conversations": [{"from": "human", "value": 3}]}', "the content of conversations[0] is an int"),
    ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "half a surrogate pair"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "system": 3}', "the content of system is an int"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "tools": "{"}', "tools is not JSON"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "tools": [3]}', "tools is not a list of objects"),
    ('["a"]', "a JSON list"),
)
"""Lines of a file of chats, and what is said of them."""
BAD_PROMPTS = (
    ('{"completion": "a"}', "a.jsonl:1: there is no prompt"),
    ('{"prompt": "a"}', "a.jsonl:1: there is no completion"),
    ('{"prompt": "a", "completion": null}', "there is no completion"),
    ('{"prompt": [{"role": "user", "content": "a"}], "completion": "a"}', "prompt is a list"),
)
BAD_PAIRS = (
    ('{"prompt": "a", "rejected": "b"}', "a.jsonl:1: there is no chosen"),
    ('{"prompt": "a", "chosen": "b"}', "a.jsonl:1: there is no rejected"),
    ('{"prompt": "a", "chosen": "b", "rejected": null}', "there is no rejected"),
    ('{"prompt": "a", "chosen": 3, "rejected": "b"}', "chosen is an int"),
    ('{"prompt": "a", "chosen": [], "rejected": []}', "chosen is empty"),
    ('{"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}', "not both texts"),
    ('{"prompt": "a", "chosen": " ", "rejected": "b"}', "chosen is empty: it has no answer"),
    ('{"prompt": "a", "chosen": "b", "rejected": ""}', "rejected is empty: it has no answer"),
    ('{"chosen": "b", "rejected": "c"}', "there is no prompt for chosen and rejected"),
    ('{"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}', "prompt and completion are not"),
    ('{"input": "a", "question": "b", "chosen": "c", "rejected": "d"}', "the prompt may be input or question"),
    ('{"prompt": "a", "chosen": ["b"], "rejected": ["c"]}', "chosen[0] is a str"),
    ('{"prompt": "a", "chosen": "b\\ud800", "rejected": "c"}', "half a surrogate pair"),
    ('["a", "b"]', "a JSON list"),
)
"""Lines of a file of pairs, and what is said of them."""
BAD_LABELS = (
    ('{"prompt": "a", "label": true}', "a.jsonl:1: there is no completion"),
    ('{"completion": "a", "label": true}', "a.jsonl:1: there is no prompt"),
    ('{"prompt": "a", "completion": "b"}', "a.jsonl:1: there is no label"),
    ('{"prompt": "a", "completion": "b", "label": "good"}', "label is 'good'"),
    ('{"prompt": "a", "completion": "b", "label": 2}', "label is 2"),
    ('{"prompt": "a", "completion": " ", "label": false}', "completion is empty"),
)
"""Lines of a file of completions with labels, and what is said of them."""
BAD_OBJECTIVES = (
    ("name=dop", "Did you mean dpo?"),
    ("name=kto", "its rows are pairs without a label"),
    ("name=dpo data.format=unpaired", "its rows have one completion and a label"),
    ("name=dpo data.format=chat", "its rows have nothing to compare"),
    ("name=dpo train.objective.beta=0", "train.objective.beta: 0 is out of range"),
    ("name=dpo train.objective.beta=nan", 'train.objective.beta: "nan" is a string'),
    ("name=dpo train.objective.label_smoothing=0.5", "train.objective.label_smoothing: 0.5 is out of range"),
    ("name=ipo train.objective.label_smoothing=0.1", "label_smoothing has no effect"),
    ("name=dpo train.objective.gamma=1.0", "gamma has no effect"),
    ("name=orpo train.objective.reference=online", "reference has no effect"),
    ("name=kto data.format=unpaired train.objective.reference=none", "its rewards are log-ratios to a reference"),
    ("name=kto data.format=unpaired train.eval_every=1", "its loss depends on a mean over the global batch"),
    ("name=kto data.format=unpaired train.objective.desirable_weight=-1", "desirable_weight: -1 is out of range"),
    ("name=dpo train.objective.reference=./gone", "reference=./gone: there is no such directory"),
    ("name=dpo train.objective.reference=onlin", "Did you mean online?"),
    ("name=dpo train.objective.reference=./folder", "it has no config.json"),
    ("name=dpo train.objective.reference=s3://bucket/model", "models are read from directories"),
    ("name=dpo train.objective.refrence=online", "Did you mean reference?"),
    ("name=dpo data.overlong=split", "a pair is compared as a whole"),
    ("name=dpo 'data.sources=[{path: a.jsonl, weight: 1}]' data.source=null", "a mixture of preference data"),
)
"""Fields of an objective, and what is said of them."""
BAD_DISTILLATIONS = (
    ("teacher=./gone", "train.distill.teacher=./gone: there is no such directory"),
    ("teacher=./folder", "it has no config.json"),
    ("teacher=text.txt", "there is no such directory"),
    ("teacher=https://host/model", "models are read from directories"),
    ("teacher=./hf train.distill.top_k=0", "train.distill.top_k: 0 is out of range"),
    ("teacher=./hf train.distill.top_k=258", "the model has a vocabulary of 257"),
    ("teacher=./hf train.distill.temperature=0", "train.distill.temperature: 0 is out of range"),
    ("teacher=./hf train.distill.weight=1.5", "train.distill.weight: 1.5 is out of range"),
    ("teacher=./hf train.distill.divergence=revers", "Did you mean reverse?"),
    ("top_k=4", "train.distill.teacher"),
    (
        "teacher=./hf data.source=a.jsonl data.tokenizer=./hf data.format=preference train.objective.name=dpo",
        "not which of two is better",
    ),
)
"""Fields of a distillation, and what is said of them."""


def text_parquet() -> bytes:
    """A table of texts."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), file)
    return file.getvalue()


TEXT_PARQUET = text_parquet()


def fields(**changes: Any) -> Callable[[bytes], bytes]:
    """A JSON object with other fields."""
    return lambda old: json.dumps(json.loads(old) | changes).encode()


def text(old: str, new: str) -> Callable[[bytes], bytes]:
    """A text with one place replaced."""

    def change(content: bytes) -> bytes:
        assert content.decode().count(old) == 1, old
        return content.decode().replace(old, new).encode()

    return change


def begun(count: int) -> Callable[[bytes], bytes]:
    """Only the first bytes: a copy that broke off."""
    return lambda old: old[:count]


def header(**tensors: Any) -> bytes:
    """A safetensors file of this header and nothing else."""
    encoded = json.dumps(tensors).encode()
    return len(encoded).to_bytes(8, "little") + encoded


def weight(name: str, value: float) -> Callable[[bytes], bytes]:
    """A safetensors file in which the last value of a tensor is another."""

    def change(old: bytes) -> bytes:
        from safetensors.torch import load, save

        tensors = load(old)
        tensors[name].view(-1)[-1] = value
        return save(tensors, metadata={"format": "pt"})

    return change


class Bad(NamedTuple):
    """A command line, a part of what it says, and the files it meets."""

    command: str
    says: str
    files: Mapping[str, Content] = {}


LLAMA = text(
    "name_or_path: gpt2-tiny\n  overrides: {n_embd: 8, n_layer: 1, n_head: 2, n_positions: 64, vocab_size: 257}",
    "name_or_path: llama-tiny",
)
DEEP_JSON = '{"a": ' * 100_000 + "1" + "}" * 100_000
DEEP_LIST = "[" * 100_000 + "]" * 100_000
LONG = "n" * 5000
MARK = "open('executed', 'w').close()\n"
EVIL = {
    "hf/config.json": fields(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
    "hf/evil.py": MARK,
}
TRUSTED = {
    "hf/config.json": fields(
        model_type="mine", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    ),
}
PRETRAINED = (
    "train.py --config r.yaml model.init=pretrained model.name_or_path=./hf model.overrides={} data.tokenizer=./hf"
)
PAIRS = "data r.yaml data.source=a.jsonl data.format=preference train.objective.name=dpo data.tokenizer=./hf"
LABELS = "data r.yaml data.source=a.jsonl data.format=unpaired train.objective.name=kto data.tokenizer=./hf"
ASK_TEACHER = "train.py --config r.yaml data.tokenizer=./hf train.distill.top_k=4 train.distill.teacher=./hf"
OTHER_REFERENCE = "train.py --config r.yaml data.source=a.jsonl data.format=preference train.objective.name=dpo data.tokenizer=./hf data.eval_fraction=0 train.objective.reference=./hf"
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
PICKLE = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0etouch executed\x85R."

# fmt: off
RECIPES = [
    Bad("validate", "Missing argument"),
    Bad("validate gone.yaml", "gone.yaml: there is no such file"),
    Bad("validate ''", "name is empty"),
    Bad("validate r.yaml parallel=atuo", "auto or a section"),
    Bad("validate empty.yaml", "the file is empty", {"empty.yaml": ""}),
    Bad("validate folder", "no *.yaml", {"folder": FOLDER}),
    Bad("validate zero.yaml", "not a regular file", {"zero.yaml": link("/dev/zero")}),
    Bad("validate /dev/zero", "not a regular file"),
    Bad("validate /dev/null", "not a regular file"),
    Bad("validate pipe.yaml", "not a regular file", {"pipe.yaml": PIPE}),
    Bad("validate socket.yaml", "cannot be read", {"socket.yaml": SOCKET}),
    Bad("validate loop.yaml", "symbolic links", {"loop.yaml": link("loop.yaml")}),
    Bad("validate big.yaml", "larger than 1 MiB", {"big.yaml": sparse(1 << 33)}),
    Bad("validate binary.yaml", "is not allowed in YAML", {"binary.yaml": bytes(range(32)) * 8}),
    Bad("validate latin.yaml", "not UTF-8", {"latin.yaml": "precision: é".encode("latin-1")}),
    Bad("validate deep.yaml", "nested deeper than 32", {"deep.yaml": DEEP_LIST}),
    Bad("validate deep.yaml", "nested deeper than 32", {"deep.yaml": DEEP_JSON}),
    Bad("validate deep.yaml", "nested deeper than 32", {"deep.yaml": "- " * 100_000}),
    Bad("validate bomb.yaml", "anchors", {"bomb.yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"}),
    Bad("validate tag.yaml", "!!python/object/apply:os.system", {"tag.yaml": "!!python/object/apply:os.system ['touch executed']\n"}),
    Bad("validate tag.yaml", "!!python/name:os.system", {"tag.yaml": "!!python/name:os.system 1\n"}),
    Bad("validate merge.yaml", "merge keys", {"merge.yaml": "<<: {model: {name_or_path: gpt2}}\n"}),
    Bad("validate two.yaml", "second document", {"two.yaml": "a: 1\n---\nb: 2\n"}),
    Bad(f"validate {LONG}.yaml", "File name too long"),
    Bad("validate 'new\nline.yaml'", "there is no such file"),
    Bad("validate r.yaml --world-size 0", "0 is not in the range"),
    Bad("validate d.yaml --world-size 3", "batch.global_batch_size"),
    Bad("validate r.yaml --world-size 1e3", "'1e3' is not a whole number"),
    Bad("validate r.yaml --world-size 2147483648", "2147483648 is not in the range 1 to 2147483647"),
    Bad(f"validate r.yaml --world-size {MANY_DIGITS}", "9999999999…9999999999 (6000 characters) is not in the range 1 to 2147483647"),
    Bad("validate d.yaml --world-size 2147483647", "batch.global_batch_size"),
    Bad("validate train.steps=3", "no recipe is given"),
]
OVERRIDES = [
    Bad("validate gone.yaml train.steps=3", "there is no such file"),
    Bad("validate r.yaml train.steps=", "nothing follows the ="),
    Bad("validate r.yaml =3", "section.key=value"),
    Bad("validate r.yaml train..steps=3", "section.key=value"),
    Bad("validate r.yaml train.steps=abc", 'train.steps: "abc" is a string'),
    Bad("validate r.yaml train.steps=-0", "train.steps: -0 is out of range"),
    Bad("validate r.yaml train.steps=1e400", "train.steps: 1e400"),
    Bad("validate r.yaml train.steps=1e3", "Write 1000"),
    Bad("validate r.yaml train.steps=nan", 'train.steps: "nan" is a string'),
    Bad("validate r.yaml train.steps=.nan", "train.steps: .nan is a number"),
    Bad("validate r.yaml train.steps=2147483648", "train.steps: 2147483648 is out of range; a whole number from 1 to 2147483647 is allowed"),
    Bad(f"validate r.yaml train.steps={MANY_DIGITS}", "train.steps: 9999999999999999999999999…9999999999 is out of range; a whole number from 1 to 2147483647"),
    Bad(f"validate r.yaml train.steps=-{MANY_DIGITS}", "train.steps: -999999999999999999999999…9999999999 is out of range; a whole number ≥ 1"),
    Bad(f"validate r.yaml optimizer.lr={MANY_DIGITS}", "9999999999 is not a finite number"),
    Bad("validate r.yaml train.seed=9223372036854775808", "a whole number from 0 to 9223372036854775807"),
    Bad("validate r.yaml model.lora.r=9223372036854775808", "model.lora.r: 9223372036854775808 is out of range"),
    Bad("validate r.yaml model.overrides.bos_token_id=9223372036854775807", "model.overrides.bos_token_id: 9223372036854775807 is out of range"),
    Bad("validate r.yaml model.overrides.eos_token_id=[1,-99999999999]", "model.overrides.eos_token_id[1]: -99999999999 is out of range"),
    Bad("validate r.yaml model.overrides.rope_theta=3580165449", "Write 3580165449.0 if it counts nothing"),
    Bad(f"validate r.yaml model.overrides.vocab_size={MANY_DIGITS}", "model.overrides.vocab_size: 9999999999999999999999999…9999999999 is out of range; whole numbers from -2147483647 to 2147483647"),
    Bad("validate r.yaml train.steps=0x10", 'train.steps: "0x10" is a string'),
    Bad("validate r.yaml train.steps=1_0.5", "train.steps: 1_0.5 is a number"),
    Bad("validate r.yaml train.steps=[3]", "train.steps: a list is given"),
    Bad("validate r.yaml train.seed=-1", "train.seed: -1 is out of range"),
    Bad("validate r.yaml train.stepz=3", "Did you mean steps?"),
    Bad("validate r.yaml trian.steps=3", "trian is not a field. Did you mean train?"),
    Bad("validate r.yaml optimizer.lr=0", "optimizer.lr: 0 is out of range"),
    Bad("validate r.yaml optimizer.lr=-0.0", "optimizer.lr: -0.0 is out of range"),
    Bad("validate r.yaml optimizer.lr=1e400", "optimizer.lr: 1e400 is not a finite number"),
    Bad("validate r.yaml optimizer.lr=inf", 'optimizer.lr: "inf" is a string'),
    Bad("validate r.yaml optimizer.betas=[0.9]", "a list of 2 numbers"),
    Bad("validate r.yaml optimizer.betas=[0.9,1.0]", "optimizer.betas[1]"),
    Bad("validate r.yaml precision=FP16", "Did you mean fp16?"),
    Bad("validate r.yaml precision=fp16", "precision=fp16 with train.engine=reference"),
    Bad("validate r.yaml 'precision=$(touch executed)'", "precision"),
    Bad("validate r.yaml 'precision=`touch executed`'", "precision"),
    Bad("validate r.yaml 'precision={0.__class__}'", "precision"),
    Bad("validate r.yaml 'precision=%s%n%x'", "not YAML"),
    Bad("validate r.yaml 'train.steps=!!python/object/apply:os.system [touch executed]'", "is not allowed"),
    Bad("validate r.yaml 'train.steps=*a'", "anchors"),
    Bad("validate r.yaml 'train.steps=3\n---\n4'", "second document"),
    Bad("validate r.yaml 'model.name_or_path=\"a\\nb\"'", "model.name_or_path"),
    Bad("validate r.yaml 'run_dir=\"\\e[31mred\"'", "run_dir"),
    Bad(f"validate r.yaml run_dir={LONG}", "run_dir="),
    Bad(f"validate r.yaml data.source={LONG}", "data.source="),
    Bad(f"validate r.yaml data.cache_dir={LONG}", "data.cache_dir="),
    Bad(f"validate r.yaml data.tokenizer={LONG}", "data.tokenizer="),
    Bad(f"validate r.yaml model.name_or_path=./{LONG}", "model.name_or_path="),
    Bad("validate r.yaml run_dir=loop/x", "run_dir=", {"loop": link("loop")}),
    Bad("validate r.yaml 'run_dir=$HOME/run'", "run_dir=$HOME/run: variables of the environment are not replaced here"),
    Bad("validate r.yaml 'data.cache_dir=${SCRATCH}/cache'", "data.cache_dir=${SCRATCH}/cache: variables of the environment"),
    Bad("validate r.yaml 'run_dir=runs/try #2'", '"#2" is a comment in YAML, which would be left out'),
    Bad("validate r.yaml 'train.steps=3 # three'", '"# three" is a comment in YAML'),
    Bad("validate r.yaml model.trust_remote_code=true", "--trust-remote-code"),
    Bad("validate r.yaml log.report_to=wandb", "Write [wandb]"),
    Bad("validate r.yaml parallel.zero_stage=4", "from 0 to 3"),
    Bad("validate d.yaml parallel.zero_stage=0 parallel.offload_optimizer=cpu", "only a sharded optimizer"),
    Bad("validate r.yaml parallel.recompute=every_1", "one of none, selective, full, every_2"),
    Bad("validate r.yaml parallel.offload_activations=true", "only the engine deepspeed offloads"),
    Bad("validate moe.yaml parallel.tiled_mlp=true", "experts choose tokens of a whole micro-batch"),
    Bad("validate d.yaml parallel.tiled_mlp=true parallel.tp=2 parallel.sequence_parallel=true", "in another order than tiles have"),
    Bad("validate d.yaml parallel.tiled_mlp=true train.compile=true", "in the place of the weights"),
    Bad("validate d.yaml parallel.tiled_mlp=true train.engine=ddp parallel.zero_stage=0", "only the engine deepspeed tiles"),
    Bad("validate d.yaml parallel.offload_activations=cpu", "parallel.offload_activations"),
    Bad("compare --recipe d.yaml --against fsdp-offacts", "fsdp has no offacts"),
    Bad("compare --recipe d.yaml --against every9", "every2 to every8 recompute a part of the layers"),
    Bad("compare --recipe d.yaml --against every2-selective", "recompute is for whole layers"),
    Bad("memory --model gpt2 --layout dp8 --framework megatron --recompute every_2", "its profile recomputes all layers alike"),
    Bad("validate d.yaml parallel.offload_optimizer=disk", "parallel.offload_optimizer"),
    Bad("validate d.yaml parallel.zero_stage=3 parallel.offload_optimizer=nvme", "where the drive is mounted"),
    Bad("validate d.yaml parallel.zero_stage=2 parallel.offload_optimizer=nvme parallel.nvme_path=.", "silently keep"),
    Bad("validate d.yaml parallel.zero_stage=3 parallel.offload_params=nvme 'parallel.nvme_path=\"a\\nb\"'", "nvme_path"),
    Bad(f"validate d.yaml parallel.nvme_path={LONG}", "nvme_path="),
    Bad("validate r.yaml parallel.offload_optimizer=nvme", "only the engine deepspeed offloads"),
    Bad("validate d.yaml 'parallel={auto: true, hpz: 2, zero_stage: 3}'", "a plan tries no layout with it"),
    Bad(
        "validate d.yaml model.name_or_path=mixtral-8x7b model.overrides={} "
        "'parallel={ep: 2, zero_stage: 3, offload_params: nvme, nvme_path: .}'",
        "experts that ep shards stay in memory",
    ),
    Bad(
        "validate d.yaml train.compile=true 'parallel={zero_stage: 3, offload_params: nvme, nvme_path: .}'",
        "more weights at once than there are buffers",
    ),
    Bad("validate d.yaml parallel.hpz=0", "parallel.hpz"),
    Bad("validate d.yaml parallel.hpz=2 parallel.zero_stage=1", "part of ZeRO-3"),
    Bad("validate d.yaml parallel.hpz=3 parallel.dp=4 parallel.zero_stage=3", "hpz to a divisor of 4"),
    Bad("validate d.yaml parallel.hpz=2 parallel.tp=2 parallel.zero_stage=3", "as if all of them"),
    Bad("validate d.yaml parallel.quantized_weights=true parallel.zero_stage=2", "part of ZeRO-3"),
    Bad("validate d.yaml parallel.quantized_gradients=3 parallel.zero_stage=3", "parallel.quantized_gradients"),
    Bad("config d.yaml parallel.zero_stage=3 parallel.quantized_gradients=true", "only between nodes"),
    Bad(
        "train d.yaml --nproc 1 parallel.zero_stage=3 parallel.offload_optimizer=nvme parallel.nvme_path=gone",
        "no such directory",
    ),
    Bad("train d.yaml --nproc 1 parallel.zero_stage=3 parallel.quantized_weights=true", "kernels of a GPU"),
    Bad("compare --recipe d.yaml --against trainer:pp2", "'pp2' is unknown after trainer:"),
    Bad("compare --recipe d.yaml --against trainer:ddp precision=bf16", "the Trainer is compared in fp32"),
    Bad("train d.yaml --layout trainer:ddp", "neither an entry of the recipe's layouts nor a layout"),
    Bad("compare --recipe d.yaml --against z3-hpz3-dp4", "a divisor of 4"),
    Bad("validate r.yaml parallel.tp=2", "parallel.tp=2 with train.engine=reference"),
    Bad("validate r.yaml data.seq_len=65", "64 positions"),
    Bad("validate r.yaml data.tokenizer=bpe-400", "vocabulary of 257"),
    Bad("validate r.yaml train.steps=2 schedule.warmup_steps=3", "the schedule is longer than the run"),
]
CONTRADICTIONS = [
    Bad("validate r.yaml train.eval_every=0", "Set train.eval_samples=null", {"r.yaml": text("steps: 2", "steps: 2\n  eval_every: 1\n  eval_samples: 4")}),
    Bad("validate r.yaml train.spike_sigmas=0", "Set train.spike_window=null", {"r.yaml": text("run_dir: out", "  spike_sigmas: 6\n  spike_window: 32\ncheckpoint:\n  every: 1\nrun_dir: out")}),
    Bad("validate r.yaml checkpoint.every=0", "Set checkpoint.keep=null", {"r.yaml": text("run_dir: out", "checkpoint:\n  every: 1\n  keep: 4\nrun_dir: out")}),
    Bad("validate r.yaml optimizer.name=sgd", "Set optimizer.betas=null", {"r.yaml": text("lr: 1e-3", "lr: 1e-3\n  betas: [0.8, 0.9]")}),
    Bad("validate r.yaml schedule.name=constant", "Set schedule.warmup_steps=null", {"r.yaml": text("run_dir: out", "schedule:\n  warmup_steps: 1\nrun_dir: out")}),
    Bad("validate r.yaml data.packing=padded", "Set data.document_masking=null", {"r.yaml": text("seq_len: 32", "seq_len: 32\n  document_masking: true")}),
    Bad("validate r.yaml data.eval_fraction=0", "or train.eval_every=0", {"r.yaml": text("steps: 2", "steps: 2\n  eval_every: 1")}),
    Bad("validate r.yaml train.on_nonfinite=stop", "Set train.max_incidents=null", {"r.yaml": text("steps: 2", "steps: 2\n  on_nonfinite: skip\n  max_incidents: 9")}),
]
MODEL_OVERRIDES = [
    Bad("validate r.yaml model.overrides.n_layr=1", "Did you mean n_layer?"),
    Bad("validate r.yaml model.overrides.num_hidden_layer=1", "Did you mean num_hidden_layers?"),
    Bad("validate r.yaml model.overrides.hidden_sise=1", "Did you mean hidden_size?"),
    Bad("validate r.yaml model.overrides.n_layer=two", "n_layer='two'"),
    Bad("validate r.yaml model.overrides.n_layer=-1", "n_layer=-1"),
    Bad("validate r.yaml model.overrides.n_head=3", "heads"),
    Bad("validate r.yaml model.overrides=3", "a mapping is allowed"),
    Bad("validate r.yaml model.overrides.rope_parameters.rope_thet=1e6", "Did you mean rope_theta?", {"r.yaml": LLAMA}),
    Bad("validate r.yaml model.overrides.rope_theta=1e6", "Did you mean rope_parameters?", {"r.yaml": LLAMA}),
    Bad("validate r.yaml model.overrides.rope_parameters=1e6", "not a mapping", {"r.yaml": LLAMA}),
    Bad("validate r.yaml 'model.overrides.rope_parameters={rope_type: lineer, factor: 2}'", "Did you mean linear?", {"r.yaml": LLAMA}),
    Bad("validate r.yaml 'model.overrides.rope_parameters={rope_type: linear, factor: 2, low_freq_factor: 1}'", "rope_type linear has no such key", {"r.yaml": LLAMA}),
    Bad("validate r.yaml 'model.overrides.rope_parameters={rope_type: [1]}'", "rope_type", {"r.yaml": LLAMA}),
    Bad("validate r.yaml 'model.overrides.rope_parameters={sliding: {rope_theta: 1e4}}'", "no layer of this model has such a type", {"r.yaml": LLAMA}),
    Bad("train.py --config r.yaml model.overrides.activation_function=nope", "transformers cannot build it"),
    Bad("train.py --config r.yaml model.overrides.resid_pdrop=high", "cannot take them"),
    Bad("train.py --config r.yaml model.overrides.initializer_range=[1]", "cannot take them"),
]
MODELS = [
    Bad("validate r.yaml model.name_or_path=gpt3", "Did you mean"),
    Bad("validate r.yaml model.name_or_path=text.txt", "is not a directory"),
    Bad("validate r.yaml model.name_or_path=/dev/zero", "is not a directory"),
    Bad("validate r.yaml model.name_or_path=./gone", "is not a directory"),
    Bad("validate r.yaml model.name_or_path=./folder", "has no config.json", {"folder": FOLDER}),
    Bad("validate r.yaml model.name_or_path=./hf", "JSON", {"hf/config.json": "{"}),
    Bad("validate r.yaml model.name_or_path=./hf", "not a JSON object", {"hf/config.json": "[1]"}),
    Bad("validate r.yaml model.name_or_path=./hf", "JSON", {"hf/config.json": ""}),
    Bad("validate r.yaml model.name_or_path=./hf", "nested too deeply", {"hf/config.json": DEEP_JSON}),
    Bad("validate r.yaml model.name_or_path=./hf", "thousands of digits", {"hf/config.json": '{"n_layer": ' + "9" * 6000 + "}"}),
    Bad("validate r.yaml model.name_or_path=./hf", "not UTF-8", {"hf/config.json": b"\xff\xfe\x00"}),
    Bad("validate r.yaml model.name_or_path=./hf", "not a regular file", {"hf/config.json": link("/dev/zero")}),
    Bad("validate r.yaml model.name_or_path=./hf", "not a regular file", {"hf/config.json": PIPE}),
    Bad("validate r.yaml model.name_or_path=./hf", "config.json", {"hf/config.json": FOLDER}),
    Bad("validate r.yaml model.name_or_path=./hf", "larger than", {"hf/config.json": sparse(1 << 33)}),
    Bad("validate r.yaml model.name_or_path=./hf", "symbolic links", {"hf/config.json": link("config.json")}),
    Bad("validate r.yaml model.name_or_path=./hf model.overrides={}", "n_layer", {"hf/config.json": fields(n_layer="x")}),
    Bad("validate r.yaml model.name_or_path=./hf model.overrides={}", "n_embd", {"hf/config.json": fields(n_embd=0)}),
    Bad("validate r.yaml model.name_or_path=./hf model.overrides={}", "n_head", {"hf/config.json": fields(n_head=True)}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={}", "model_type", {"hf/config.json": fields(model_type=["gpt2"])}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={}", "model_type", {"hf/config.json": fields(model_type=None)}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={}", "initializer_range", {"hf/config.json": fields(initializer_range="x")}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={}", "--trust-remote-code", EVIL),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "evil.py", TRUSTED),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "invalid syntax", TRUSTED | {"hf/evil.py": "def Config(:\n"}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "has no attribute 'Config'", TRUSTED | {"hf/evil.py": ""}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "broken on import", TRUSTED | {"hf/evil.py": "raise RuntimeError('broken on import')\n"}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "division by zero", TRUSTED | {"hf/evil.py": "1 / 0\n"}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "no_such_module", TRUSTED | {"hf/evil.py": "import no_such_module\n"}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "UnicodeDecodeError", TRUSTED | {"hf/evil.py": b"\xff\xfe\x00"}),
    Bad("train.py --config r.yaml model.name_or_path=./hf model.overrides={} --trust-remote-code", "__init__ fails", TRUSTED | {"hf/evil.py": "from transformers import GPT2Config, GPT2LMHeadModel\nclass Config(GPT2Config):\n    model_type = 'mine'\nclass Model(GPT2LMHeadModel):\n    config_class = Config\n    def __init__(self, config):\n        raise AttributeError('__init__ fails\\nin two lines')\n"}),
]
WEIGHTS = [
    Bad(PRETRAINED, "transformer.wte.weight has values that are not finite", {"hf/model.safetensors": weight("transformer.wte.weight", float("nan"))}),
    Bad(PRETRAINED, "transformer.ln_f.bias has values that are not finite", {"hf/model.safetensors": weight("transformer.ln_f.bias", float("inf"))}),
    Bad(PRETRAINED, "transformer.h.0.mlp.c_fc.weight has values that are not finite", {"hf/model.safetensors": weight("transformer.h.0.mlp.c_fc.weight", float("-inf"))}),
    Bad(PRETRAINED, "no safetensors weights", {"hf/model.safetensors": GONE}),
    Bad(PRETRAINED, "model.safetensors", {"hf/model.safetensors": ""}),
    Bad(PRETRAINED, "model.safetensors", {"hf/model.safetensors": begun(200)}),
    Bad(PRETRAINED, "model.safetensors", {"hf/model.safetensors": b"\xff" * 64}),
    Bad(PRETRAINED, "model.safetensors", {"hf/model.safetensors": (200_000).to_bytes(8, "little") + DEEP_LIST.encode()}),
    Bad(PRETRAINED, "it has no weights for", {"hf/model.safetensors": header()}),
    Bad(PRETRAINED, "model.safetensors", {"hf/model.safetensors": header(a={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]})}),
    Bad(PRETRAINED, "safetensors", {"hf/model.safetensors": link("/dev/zero")}),
    Bad(PRETRAINED, "safetensors", {"hf/model.safetensors": PIPE}),
    Bad(PRETRAINED, "safetensors", {"hf/model.safetensors": FOLDER}),
    Bad(PRETRAINED, "index.json", {"hf/model.safetensors": GONE, "hf/model.safetensors.index.json": "{"}),
    Bad(PRETRAINED, "weight_map", {"hf/model.safetensors": GONE, "hf/model.safetensors.index.json": "{}"}),
    Bad(PRETRAINED, "nested too deeply", {"hf/model.safetensors": GONE, "hf/model.safetensors.index.json": DEEP_JSON}),
    Bad(PRETRAINED, "not a safetensors file beside it", {"hf/model.safetensors": GONE, "hf/model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../etc/passwd"}})}),
    Bad(PRETRAINED, "is missing", {"hf/model.safetensors": GONE, "hf/model.safetensors.index.json": json.dumps({"weight_map": {"a": "part.safetensors"}})}),
    Bad(PRETRAINED + " model.overrides.n_embd=16", "but the config makes it"),
    Bad("validate r.yaml model.init=pretrained data.tokenizer=./hf", "a shape has no weights"),
    Bad("validate r.yaml model.load_in_4bit=true model.lora={}", "only published weights"),
    Bad("validate r.yaml model.router_aux_loss={}", "name_or_path=gpt2-tiny: the model has no experts"),
    Bad("validate r.yaml model.router_z_loss=0.001", "the model has no experts"),
    Bad("validate r.yaml model.router_bias_update=0.001", "the model has no experts"),
    Bad("validate r.yaml model.router_z_loss=-1", "model.router_z_loss"),
    Bad("validate r.yaml model.expert_capacity_factor=0", "model.expert_capacity_factor"),
    Bad("validate r.yaml model.expert_capacity_factor=1.25", "the model has no experts"),
    Bad("validate moe.yaml parallel.dp=3 parallel.ep=3 batch.global_batch_size=6", "8 experts cannot be shared equally by 3 ranks"),
    Bad("validate moe.yaml parallel.dp=16 parallel.ep=16 batch.global_batch_size=32", "8 experts cannot be shared equally by 16 ranks"),
    Bad("validate moe.yaml parallel.dp=4 parallel.ep=4 parallel.tp=2 parallel.experts=inner", "ep hands out whole experts"),
    Bad("validate moe.yaml parallel.ep=0", "parallel.ep: 0 is out of range"),
    Bad("validate moe.yaml parallel.experts=outer", "one of whole, inner is allowed"),
    Bad("validate d.yaml parallel.dp=2 parallel.ep=2", "the family gpt2 does not support it (it has no experts)"),
    Bad("validate d.yaml parallel.tp=2 parallel.experts=inner", "the family gpt2 does not support it (it has no experts)"),
    Bad("validate moe.yaml parallel.dp=2 parallel.ep=2 train.engine=ddp parallel.zero_stage=0", "only the engine deepspeed shards experts"),
    Bad("validate d.yaml model.float8=rowwise", "float8 is for models in bf16"),
    Bad("validate d.yaml model.kernels=liger", "were tested for exaone4, gemma"),
    Bad("train d.yaml model.kernels=liger model.name_or_path=llama-tiny model.overrides={}", "run on CUDA, and this run is on cpu"),
    Bad("validate d.yaml model.float8=e4m3", "one of rowwise, tensorwise"),
    Bad("validate d.yaml train.compile=true train.engine=reference", "the reference stays plain PyTorch"),
    Bad("config r.yaml --layout dp4-ep8-z1", "groups of ep replicas shard the experts"),
    Bad("train r.yaml --layout dp4-ep2-ep2-z1 --nproc 4", "ep is given twice"),
    Bad("plan --model gpt2 --gpus 8xH100 --layout dp8-ep2-z1 --seq 1024 --global-batch 64", "the family gpt2 does not support it"),
    Bad("validate moe.yaml model.name_or_path=hf parallel.dp=2 parallel.ep=2", "do not use transformers' experts interface", {"hf/config.json": '{"model_type": "dbrx", "vocab_size": 320}'}),
    Bad("validate r.yaml model.router_aux_loss.scope=batch", "micro_batch"),
    Bad("validate r.yaml model.router_aux_loss.coefficient=-1", "model.router_aux_loss.coefficient"),
    Bad("validate r.yaml model.init=pretrained model.name_or_path=./hf", "the ids of another tokenizer"),
]
TEXTS = [
    Bad("train.py --config r.yaml data.source=gone.txt", "gone.txt"),
    Bad("train.py --config r.yaml data.source=/dev/zero", "not a regular file"),
    Bad("train.py --config r.yaml data.source=pipe.txt", "not a regular file", {"pipe.txt": PIPE}),
    Bad("train.py --config r.yaml data.source=socket.txt", "not a regular file", {"socket.txt": SOCKET}),
    Bad("train.py --config r.yaml data.source=folder", "no text, JSONL or Parquet file", {"folder": FOLDER}),
    Bad("train.py --config r.yaml 'data.source=\"*.nothing\"'", "no file matches"),
    Bad("train.py --config r.yaml data.source=loop.txt", "loop.txt", {"loop.txt": link("loop.txt")}),
    Bad("train.py --config r.yaml data.source=text.txt", "text.txt", {"text.txt": ""}),
    Bad("train.py --config r.yaml data.source=text.txt", "not UTF-8", {"text.txt": b"abc\xff" * 999}),
    Bad("train.py --config r.yaml data.source=a.jsonl", "a.jsonl:1", {"a.jsonl": "{\n"}),
    Bad("train.py --config r.yaml data.source=a.jsonl", "a.jsonl:2", {"a.jsonl": '{"text": "a"}\n[1]\n'}),
    Bad("train.py --config r.yaml data.source=a.jsonl", "data.text_field=text: a.jsonl:1 has no such field. Set data.text_field=body.", {"a.jsonl": '{"body": "a"}\n'}),
    Bad("train.py --config r.yaml data.source=a.jsonl", "data.text_field=text: it is an int", {"a.jsonl": '{"text": 3}\n'}),
    Bad("train.py --config r.yaml data.source=a.jsonl", "nested too deeply", {"a.jsonl": DEEP_JSON + "\n"}),
    Bad("train.py --config r.yaml data.source=a.jsonl", "a number too long", {"a.jsonl": '{"text": ' + "9" * 6000 + "}\n"}),
    Bad("train.py --config r.yaml data.source=a.jsonl.gz", "a.jsonl.gz", {"a.jsonl.gz": "not gzip"}),
    Bad("train.py --config r.yaml data.source=a.jsonl.zst", "a.jsonl.zst", {"a.jsonl.zst": "not zstandard"}),
    Bad("train.py --config r.yaml data.source=a.parquet", "not a readable Parquet file", {"a.parquet": "not Parquet"}),
    Bad("train.py --config r.yaml data.source=saved", "load_from_disk failed", {"saved/state.json": "{", "saved/dataset_info.json": "{"}),
    Bad("train.py --config r.yaml data.tokenizer=bpe-256", "at least 257 entries"),
    Bad("train.py --config r.yaml data.tokenizer=./folder", "no tokenizer files", {"folder": FOLDER}),
    *(Bad(f"data r.yaml data.source=a.jsonl data.format=chat data.tokenizer=./hf --show {number}", says, {"a.jsonl": row + "\n", "hf/chat_template.jinja": CHATML}) for number, (row, says) in enumerate(BAD_CHATS)),
    *(Bad(f"data r.yaml data.source=a.jsonl data.format=prompt_completion data.tokenizer=./hf --show {number}", says, {"a.jsonl": row + "\n"}) for number, (row, says) in enumerate(BAD_PROMPTS)),
    Bad("data r.yaml data.source=a.jsonl data.format=chat data.tokenizer=./hf", "tokenizer=./hf with format=chat: the tokenizer has no chat template", {"a.jsonl": '{"messages": []}'}),
    Bad("data r.yaml data.source=a.jsonl data.format=pretokenized", "the ids are those of another tokenizer", {"a.jsonl": '{"input_ids": [1]}'}),
    Bad("tokenize r.yaml --format megatron", "--format megatron and --output PREFIX need each other"),
    Bad("tokenize r.yaml --format megatron -o r.yaml/x", "r.yaml cannot be written"),
    Bad("tokenize r.yaml --format megatron -o m", "m.idx: it exists", {"m.idx": "a"}),
    Bad("data r.yaml data.source=m", "the ids of a dataset of Megatron-LM are those of another tokenizer", {"m.idx": "a", "m.bin": "a"}),
    Bad("data r.yaml data.source=m.bin data.tokenizer=./hf", "m.idx: No such file", {"m.bin": "a"}),
    Bad("data r.yaml data.source=m data.tokenizer=./hf", "m.idx: it is not the index of a dataset of Megatron-LM", {"m.idx": "a" * 99, "m.bin": "a"}),
    Bad("data r.yaml data.source=m data.tokenizer=./hf data.format=chat", "it holds ids, and this format needs rows", {"m.idx": "a"}),
    Bad("data r.yaml data.source=m data.tokenizer=./hf data.text_field=c", "text_field has no effect", {"m.idx": "a"}),
    Bad("data r.yaml data.source=text.txt data.format=pretokenized data.tokenizer=./hf", "this format needs rows with fields"),
    Bad("data r.yaml data.source=a.jsonl data.format=pretokenized data.tokenizer=./hf", "a.jsonl:1: input_ids has a float in it", {"a.jsonl": '{"input_ids": [1.5]}'}),
    Bad("data r.yaml data.source=a.parquet data.format=pretokenized data.tokenizer=./hf", "a.parquet: there is no input_ids", {"a.parquet": TEXT_PARQUET}),
    Bad("data r.yaml data.source=a.jsonl data.format=pretokenized data.tokenizer=./hf data.eval_fraction=0 data.seq_len=2", "its labels leave tokens out", {"a.jsonl": '{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}'}),
    Bad("data r.yaml data.source=a.jsonl data.format=chat", "a BPE trained here has no chat template", {"a.jsonl": '{"messages": []}'}),
    Bad("data r.yaml data.source=text.txt data.format=chat data.tokenizer=./hf", "this format needs rows with fields"),
    Bad("data r.yaml data.source=folder data.format=chat data.tokenizer=./hf", "needs rows with fields", {"folder/a.txt": "a"}),
    Bad("data r.yaml data.source=a.parquet data.format=chat data.tokenizer=./hf", "there is no messages or conversations", {"a.parquet": TEXT_PARQUET, "hf/chat_template.jinja": CHATML}),
    Bad("data r.yaml data.source=a.jsonl data.format=chat data.tokenizer=./hf data.eval_fraction=0 data.seq_len=2", "has a token to train on in its first 3 tokens", {"a.jsonl": '{"messages": [{"role": "assistant", "content": "a"}]}\n', "hf/chat_template.jinja": CHATML}),
    Bad("data gone.yaml", "gone.yaml"),
    Bad("data r.yaml --show -1", "-1 is not in the range"),
    Bad(f"data r.yaml --show {MANY_DIGITS}", "is not in the range 0 to 2147483647"),
    Bad("data r.yaml data.tokenizer=bpe-99999999999", "a tokenizer has 2147483647 entries at most"),
    Bad(f"tokenize r.yaml --shard 1/{MANY_DIGITS}", "is not a shard"),
    Bad("data r.yaml data.train_on=all", "train_on has no effect"),
    Bad("data r.yaml data.dropped_text=allow", "dropped_text has no effect"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[]'", "data.sources is empty"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt}]'", "data.sources[0] has no share of the run"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{weight: 1}]'", "data.sources[0].path is missing"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[text.txt]'", "data.sources[0]: \"text.txt\" is a string"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, weight: 0}]'", "the weights sum to 0"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, weight: -1}]'", "data.sources[0].weight: -1 is out of range"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, weight: .nan}]'", "is not a finite number"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, epochs: .inf}]'", "is not a finite number"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, epochs: 0}]'", "data.sources[0].epochs: 0 is out of range"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, weight: 1, epochs: 2}]'", "these say the same thing in two ways"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, weight: 1}, {path: hf/text.txt, weight: 1}]'", "data.sources[1].name=text.txt: data.sources[0] has the same name"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, weight: 1, wieght: 2}]'", "Did you mean weight?"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, weight: 1, split: test}]'", "data.sources[0].split=test with path=text.txt: split has no effect"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: gone.txt, weight: 1}]'", "data.sources[0].path=gone.txt: there is no such file"),
    Bad("train.py --config r.yaml data.source=null data.eval_fraction=0 'data.sources=[{path: text.txt, tokens: 1e12}, {path: r.yaml, weight: 1}]'", "data.sources[0].tokens=1000000000000: the source has"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, tokens: 31}]'", "data.sources[0].tokens=31: this is less than one sample"),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: text.txt, epochs: 1}]'", "Set train.steps="),
    Bad("train.py --config r.yaml data.source=null data.eval_fraction=0 'data.sources=[{path: text.txt, epochs: 1}, {path: r.yaml, weight: 1}]'", "no sample is left for the others"),
    Bad("train.py --config r.yaml 'data.sources=[{path: text.txt, weight: 1}]'", "data.source=text.txt: data.sources is given too"),
    Bad("train.py --config r.yaml 'data.validation=[{path: text.txt}]'", "data.validation has no effect"),
    Bad("train.py --config r.yaml train.eval_every=1 data.validation=[]", "data.validation is empty"),
    Bad("train.py --config r.yaml train.eval_every=1 data.eval_fraction=0.2 'data.validation=[{path: text.txt}]'", "eval_fraction has no effect"),
    Bad("train.py --config r.yaml train.eval_every=1 'data.validation=[{path: gone.txt}]'", "data.validation[0].path=gone.txt: there is no such file"),
    Bad("data r.yaml data.overlong=drop", "overlong has no effect"),
    Bad("data r.yaml data.format=jsonl", "data.format"),
    Bad("train.py --config r.yaml data.source=a.jsonl data.format=chat data.tokenizer=./hf", "a.jsonl:2: messages is empty", {"a.jsonl": '{"messages": [{"role": "assistant", "content": "a"}]}\n{"messages": []}\n', "hf/chat_template.jinja": CHATML}),
    Bad("train.py --config r.yaml data.tokenizer=./hf", "could not be loaded", {"hf/tokenizer.json": "{"}),
    Bad("train.py --config r.yaml data.tokenizer=./hf", "could not be loaded", {"hf/tokenizer.json": DEEP_JSON}),
    Bad("train.py --config r.yaml data.tokenizer=./hf", "data.tokenizer=./hf", {"hf/tokenizer.json": PIPE}),
    Bad("train.py --config r.yaml data.tokenizer=./hf", "data.tokenizer=./hf", {"hf/tokenizer.json": link("/dev/zero")}),
]
TRAIN = [
    Bad("train.py", "--config"),
    Bad("train.py --config", "--config"),
    Bad("train.py --config r.yaml --nonsense", "--nonsense"),
    Bad("train.py --config r.yaml --local_rank x", "--local_rank"),
    Bad("train.py --config r.yaml surplus", "section.key=value"),
    Bad("train.py --config r.yaml parallel.dp=2", "Set train.engine=null, or parallel.dp=1"),
    Bad("train.py --config d.yaml parallel.dp=2", "needs 2 ranks"),
    Bad("train.py --config r.yaml train.engine=deepspeed batch.micro_batch_size=3", "batch.global_batch_size"),
    Bad("train.py --config r.yaml run_dir=text.txt", "not a directory"),
    Bad("train.py --config r.yaml run_dir=text.txt/below", "run_dir=text.txt/below"),
    Bad("train.py --config r.yaml run_dir=/dev/null", "not a directory"),
    Bad("train.py --config r.yaml data.source=d run_dir=d", "run_dir=d: it is in data.source=d", {"d/a.txt": "a"}),
    Bad("train.py --config r.yaml data.source=. run_dir=null", "run_dir=runs/r: it is in data.source=."),
    Bad("train.py --config r.yaml data.source=null 'data.sources=[{path: d, weight: 1}]' run_dir=d/out", "run_dir=d/out: it is in data.sources[0].path=d", {"d/a.txt": "a"}),
    Bad("train.py --config r.yaml run_dir=/proc/nothing", "run_dir=/proc/nothing"),
    Bad("train.py --config r.yaml run_dir=run", "already holds a run"),
    Bad("train.py --config r.yaml run_dir=hf", "holds model", {"hf/model/config.json": "{}"}),
    Bad(f"train.py --config r.yaml run_dir={LONG}", "File name too long"),
    Bad("train.py --config r.yaml log.report_to=[tensorbord]", "Did you mean tensorboard"),
    Bad("train.py --config r.yaml --deepspeed_config ds.json", "takes no DeepSpeed config"),
    Bad("train.py --config d.yaml --deepspeed_config gone.json", "gone.json: cannot be read"),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "JSON", {"ds.json": "{"}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "nested too deeply", {"ds.json": DEEP_JSON}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "thousands of digits", {"ds.json": '{"a": ' + "9" * 6000 + "}"}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "not a JSON object", {"ds.json": "[]"}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "given twice", {"ds.json": '{"a": 1, "a": 2}'}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "NaN", {"ds.json": '{"a": NaN}'}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "not a regular file", {"ds.json": PIPE}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "not a regular file", {"ds.json": link("/dev/zero")}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "train_batch_size", {"ds.json": '{"train_batch_size": 3}'}),
    Bad("train.py --config d.yaml --deepspeed_config ds.json", "zero_optimization", {"ds.json": '{"zero_optimization": 3}'}),
    Bad("train.py --config r.yaml --resume gone", "gone"),
    Bad("train.py --config r.yaml --resume text.txt", "text.txt"),
    Bad("train.py --config r.yaml --resume hf", "hf"),
    Bad(f"train.py --config r.yaml --resume {LONG}", "File name too long"),
    Bad("train.py --config r.yaml --resume run", "damaged", {"run/step-00000002/manifest.json": "{"}),
    Bad("train.py --config r.yaml --resume run", "damaged", {"run/step-00000002/manifest.json": DEEP_JSON}),
    Bad("train.py --config r.yaml --resume run", "damaged", {"run/step-00000002/trainer_state.json": DEEP_JSON}),
    Bad("train", "Missing argument"),
    Bad("train gone.yaml", "there is no such file"),
    Bad("train r.yaml --nproc 0", "0 is not in the range"),
    Bad("train r.yaml --nproc many", "'many' is not a whole number"),
    Bad("train r.yaml --nproc 4097", "4097 is not in the range 1 to 4096"),
    Bad(f"train r.yaml --restarts {MANY_DIGITS}", "is not in the range 0 to 2147483647"),
    Bad("train r.yaml --nproc 3", "train.engine=reference"),
    Bad("train r.yaml --strict", "--strict without --resume"),
    Bad("train r.yaml run_dir=null --resume auto", "--resume auto without a run_dir"),
    Bad("train r.yaml --restarts -1", "-1 is not in the range"),
    Bad("train r.yaml --json", "--json without --rehearse"),
    Bad("train r.yaml --rehearse --resume auto", "--resume with --rehearse"),
    Bad("train r.yaml --rehearse --restarts 2", "--restarts with --rehearse"),
    Bad("train r.yaml --rehearse", "train.engine=reference"),
    Bad("train d.yaml --rehearse precision=fp16", "precision=fp16"),
    Bad("train d.yaml --rehearse --layout dp2-pp2-z2", "a DeepSpeed pipeline allows zero_stage 0 or 1"),
    Bad("train r.yaml --resum auto", "Did you mean '--resume'"),
    Bad("demo --nproc 0", "0 is not in the range"),
    Bad("demo --chat one --dpo two", "a demo teaches one thing"),
]
SAMPLE = [
    Bad("sample", "Missing argument"),
    Bad("sample gone", "gone"),
    Bad("sample text.txt", "text.txt"),
    Bad("sample hf --chat --prompt Hi", "no chat template"),
    Bad("sample hf --tokens 0", "0 is not in the range"),
    Bad("sample hf --temperature -1", "-1"),
    Bad("sample hf --temperature nan", "nan"),
    Bad("sample hf --temperature inf", "inf"),
    Bad("sample hf --seed -1", "-1 is not in the range"),
    Bad(f"sample hf --tokens {MANY_DIGITS}", "is not in the range 1 to 2147483647"),
    Bad("sample hf --seed 99999999999999999999", "99999999999999999999"),
    Bad("sample hf", "hf", {"hf/model.safetensors": begun(100)}),
    Bad("sample hf", "hf", {"hf/config.json": DEEP_JSON}),
    Bad("sample hf", "but by config.json it has [", {"hf/config.json": fields(n_embd=16)}),
    Bad("sample hf", "missing weights: transformer.h.1.attn.c_attn.bias and 11 others", {"hf/config.json": fields(n_layer=2)}),
    Bad("sample hf", "transformers cannot load it", TRUSTED | {"hf/evil.py": MARK}),
    Bad("sample hf", "transformers cannot load it", {"hf/tokenizer.json": "{"}),
    Bad(f"sample {LONG}", "File name too long"),
]
PREFERENCES = [
    *(Bad(f"{PAIRS} --show {number}", says, {"a.jsonl": row + "\n"}) for number, (row, says) in enumerate(BAD_PAIRS)),
    *(Bad(f"{LABELS} --show {number}", says, {"a.jsonl": row + "\n"}) for number, (row, says) in enumerate(BAD_LABELS)),
    *(Bad(f"validate r.yaml data.source=a.jsonl data.tokenizer=./hf data.format=preference train.objective.{changes}", says, {"folder": FOLDER}) for changes, says in BAD_OBJECTIVES),
    Bad(f"{PAIRS} data.source=text.txt", "this format needs rows with fields"),
    Bad(PAIRS, "the tokenizer has no chat template", {"a.jsonl": '{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}'}),
    Bad(OTHER_REFERENCE, "train.objective.reference=./hf: no safetensors weights could be read", {"a.jsonl": 8 * PAIR, "hf/model.safetensors": GONE}),
    Bad(OTHER_REFERENCE, "train.objective.reference=./hf: it has no transformer.wte.weight", {"a.jsonl": 8 * PAIR, "hf/model.safetensors": header()}),
]
DISTILLATIONS = [
    *(Bad(f"validate r.yaml train.distill.{changes}", says, {"folder": FOLDER}) for changes, says in BAD_DISTILLATIONS),
    Bad(ASK_TEACHER, "train.distill.teacher=./hf: no safetensors weights could be read", {"hf/model.safetensors": GONE}),
    Bad(ASK_TEACHER, "train.distill.teacher=./hf: transformer.wte.weight has values that are not finite", {"hf/model.safetensors": weight("transformer.wte.weight", float("nan"))}),
    Bad(ASK_TEACHER, "train.distill.teacher=./hf: it has no weights for", {"hf/model.safetensors": header()}),
    Bad(ASK_TEACHER, "with train.distill.teacher=./hf: the model has 16 positions. Set data.seq_len", {"hf/config.json": fields(n_positions=16)}),
    Bad(ASK_TEACHER, "with train.distill.teacher=./hf: its ids go up to 256", {"hf/config.json": fields(vocab_size=64)}),
    Bad(ASK_TEACHER, "train.distill.teacher=./hf: transformer.wte.weight is stored as [257, 8]", {"hf/config.json": fields(n_embd=16)}),
    Bad(f"{ASK_TEACHER} model.overrides.vocab_size=300 train.distill.top_k=300", "top_k=300 with teacher=./hf: the teacher has a vocabulary of 257. Set"),
    Bad(ASK_TEACHER, "train.distill.teacher=./hf: its own code or config fails", {"hf/config.json": fields(model_type="nothing")}),
]
CHECKPOINTS = [
    Bad("checkpoint lst", "Did you mean list?"),
    Bad("checkpoint list", "Missing argument"),
    Bad("checkpoint list gone", "gone"),
    Bad("checkpoint list text.txt", "text.txt"),
    Bad("checkpoint list hf", "hf"),
    Bad(f"checkpoint list {LONG}", "File name too long"),
    Bad("checkpoint list 'a\nb'", "a\\nb"),
    Bad("checkpoint verify gone", "gone"),
    Bad("checkpoint verify /dev/null", "/dev/null"),
    Bad("checkpoint verify run", "manifest.json", {"run/step-00000002/manifest.json": "{"}),
    Bad("checkpoint verify run", "manifest.json", {"run/step-00000002/manifest.json": DEEP_JSON}),
    Bad("checkpoint verify run", "manifest.json", {"run/step-00000002/manifest.json": PIPE}),
    Bad("checkpoint verify run", "config.json", {"run/step-00000002/config.json": "{} "}),
    Bad("checkpoint verify run", "trainer_state.json", {"run/step-00000002/trainer_state.json": GONE}),
    Bad("checkpoint inspect gone", "gone"),
    Bad("checkpoint inspect run", "damaged", {"run/step-00000002/manifest.json": "[]"}),
    Bad("checkpoint inspect hf", "hf", {"hf/model.safetensors": begun(100)}),
    Bad("checkpoint inspect hf", "hf", {"hf/model.safetensors": (200_000).to_bytes(8, "little") + DEEP_LIST.encode()}),
    Bad("export gone -o out", "gone"),
    Bad("export run", "Missing option"),
    Bad("export run -o hf", "not empty"),
    Bad("export run -o text.txt", "not a directory"),
    Bad("export run -o text.txt/below", "text.txt/below"),
    Bad(f"export hf -o {LONG}", "File name too long"),
    Bad("export run -o out --dtype int8", "int8"),
    Bad("export hf -o out --max-shard-size 0", "0"),
    Bad("export hf -o out --max-shard-size nan", "nan"),
    Bad("export hf -o out --max-shard-size 5XB", "5XB"),
    Bad("export hf -o out", "config.json", {"hf/config.json": DEEP_JSON}),
    Bad("recipe --from-trainer gone.json", "gone.json"),
    Bad("recipe --from-trainer text.txt", "text.txt"),
    Bad("recipe --from-trainer a.json --model hf --gpus 1 data.source=text.txt data.seq_len=8", "train.steps=N", {"a.json": '{"seed": 1}'}),
    Bad("recipe --from-trainer a.json steps", "steps is not a field", {"a.json": "{}"}),
    Bad("recipe --from-trainer a.bin", "a.bin: not the arguments", {"a.bin": "PK"}),
    Bad("import gone -o out", "gone"),
    Bad("import text.txt -o out", "text.txt"),
    Bad("import folder -o out", "folder", {"folder": FOLDER}),
    Bad("import hf -o run", "not empty"),
    Bad("import hf -o out train.steps=3", "without --recipe"),
    Bad("import hf -o out --recipe r.yaml --model hf", "--model with --recipe"),
    Bad("import hf -o out --recipe gone.yaml", "gone.yaml"),
    Bad("import hf -o out", "hf", {"hf/model.safetensors": begun(100)}),
    Bad("import hf -o out", "config.json", {"hf/config.json": DEEP_JSON}),
    Bad("import m.gguf -o out", "m.gguf", {"m.gguf": "not GGUF"}),
    Bad("import m.gguf -o out", "m.gguf", {"m.gguf": PIPE}),
    Bad("import old -o out", "old", {"old/pytorch_model.bin": PICKLE, "old/config.json": "{}"}),
    Bad("import old -o out --model hf", "old", {"old/latest": "global_step1", "old/global_step1/mp_rank_00_model_states.pt": PICKLE}),
    Bad("import old -o out", "old", {"old/latest": "../../etc"}),
    Bad("import hf -o out", "auto_map", EVIL),
]
CONFIGS = [
    Bad("plan", "Missing option '--gpus'"),
    Bad("plan --gpus 8xH100 --seq 512", "Missing option '--model'"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512", "Missing option '--global-batch'"),
    Bad("plan --recipe r.yaml --model gpt2 --gpus 8xH100", "the recipe says what is trained"),
    Bad("plan --recipe r.yaml --gpus 8xH100 --precision fp32", "--precision"),
    Bad("plan --recipe gpt2-pretrain --gpus 8xT4", "T4 has no units for it"),
    Bad("plan --recipe nope.yaml --gpus 8xH100", "nope.yaml"),
    Bad("plan --model gpt2 --gpus 8xH1000 --seq 512 --global-batch 64", "Did you mean"),
    Bad("plan --model gpt2 --gpus H100 --seq 512 --global-batch 64", "64xH100"),
    Bad("plan --model gpt2 --gpus 0xH100 --seq 512 --global-batch 64", "64xH100"),
    Bad("plan --model gpt3 --gpus 8xH100 --seq 512 --global-batch 64", "gpt3"),
    Bad("plan --model mixtral-8x7b --gpus 12xH100 --seq 512 --global-batch 12 --layout ep3", "8 experts"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --layout ep2", "no experts"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --report text.txt", "text.txt: not a folder"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --report hf", "not part of a report"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --write text.txt", "text.txt: cannot be written"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --overwrite", "--write DIR"),
    Bad("plan --model gpt2 --gpus 61xH100 --seq 512 --global-batch 64", "--gpus 61"),
    Bad("plan --model gpt2 --gpus 1024xH100 --seq 512 --global-batch 3", "--global-batch 3"),
    Bad("plan --model gpt2 --gpus 8xV100 --seq 512 --global-batch 64", "--precision"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --seq 2000", "1024 positions"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --precision fp8", "no units"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --layout tp5", "tp=5"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --layout tp8", "12 attention heads"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --layout ddp", "ddp"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --layout '$(touch executed)'", "unknown"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --layout dp8 --micro 3", "is not a multiple"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --micro 3", "--layout"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --imbalance 1.5", "gpt2 has no experts"),
    Bad("plan --model mixtral-8x7b --gpus 8xA100 --seq 512 --global-batch 64 --imbalance 0.5", "0.5 is not in the range"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --tokens 0", "--tokens"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --cluster gone.yaml", "gone.yaml"),
    Bad("plan --model gpt2 --gpus 8xA100 --seq 512 --global-batch 64 --cluster pipe", "pipe", {"pipe": PIPE}),
    Bad("plan --model gpt2 --gpus 99999999999xH100 --seq 512 --global-batch 64", "99999999999 GPUs are out of range; from 1 to 2147483647 are counted. Write 64xH100"),
    Bad(f"plan --model gpt2 --gpus {MANY_DIGITS}xH100 --seq 512 --global-batch 64", "9999999999 GPUs are out of range"),
    Bad(f"plan --model gpt2 --gpus 8xH100 --seq {MANY_DIGITS} --global-batch 64", "(6000 characters) is not in the range 1 to 2147483647"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 99999999999", "99999999999 is not in the range 1 to 2147483647"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --layout dp999999999999", "dp999999999999 is out of range; sizes up to 2147483647 are counted"),
    Bad(f"plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --why dp8-m{MANY_DIGITS}", "9999999999 is out of range; sizes up to 2147483647 are counted"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --tokens 1e99", "1e+99 is not in the range"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --tokens 1e12 --price 1e99", "1e+99 is not in the range"),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --cluster c.yaml", "gpus_per_node=99999999999: it is a whole number, at most 2147483647", {"c.yaml": "gpus_per_node: 99999999999"}),
    Bad("plan --model gpt2 --gpus 8xH100 --seq 512 --global-batch 64 --cluster c.yaml", "it is a number above 0, at most 1e+18", {"c.yaml": "link_bytes_per_second: 1.0e+99"}),
    Bad("plan --model ./huge --gpus 8xH100 --seq 512 --global-batch 64", "some 3.2e+23 weights, and up to 1e+15 are counted", {"huge/config.json": HUGE_MODEL}),
    Bad("memory --model ./huge --layout dp8-z3", "some 3.2e+23 weights, and up to 1e+15 are counted", {"huge/config.json": HUGE_MODEL}),
    Bad("memory --model ./moe --layout dp8-z3", "num_local_experts is a whole number up to 65536", {"moe/config.json": '{"model_type": "mixtral", "num_local_experts": 2147483647}'}),
    Bad("memory --model gpt2 --layout dp1 --seq 999999999999999999999", "999999999999999999999 is not in the range 1 to 2147483647"),
    Bad("memory --model llama-3-8b --layout dp999999999999", "dp999999999999 is out of range; sizes up to 2147483647 are counted"),
    Bad("memory --model llama-3-8b --layout dp8-z3-every99999999999", "every99999999999 is out of range"),
    Bad("memory --model llama-3-8b --layout dp9999999-tp9999999-pp999", "99899980020000999 ranks are out of range; at most 2147483647 are counted"),
    Bad("memory --model llama-3-8b --layout dp8-z3 --micro 2147483647 --accumulation 2147483647", "36893488113059364872 samples of a step are out of range; up to 2147483647 are counted"),
    Bad("memory --recipe d.yaml --world-size 2 --micro 2147483647 --accumulation 9", "4294967294 is out of range"),
    Bad("memory --model llama-3-8b --layout dp8 --imbalance 1e99", "llama-3-8b has no experts"),
    Bad("memory --model gpt2 --layout dp8 --framework megatron:virtual_stages=99999999999", "less than or equal to 2147483647"),
    Bad("memory --model gpt2 --layout dp8 --trainer --trainable lora:r=99999999999", "r is from 1 to 2147483647"),
    Bad(f"lint ds.json --gpus {MANY_DIGITS}", "(6000 characters) is not in the range 1 to 2147483647"),
    Bad(f"lint ds.json --gpus 8 --layout dp{MANY_DIGITS}", "9999999999 is out of range"),
    Bad(f"config --model gpt2 --layout dp{MANY_DIGITS}", "9999999999 is out of range"),
    Bad("schedule --pp 99999999999 --micro-batches 8", "99999999999 is not in the range 1 to 4096"),
    Bad("doctor --timeout 1e300", "1e+300 is not in the range"),
    Bad("memory", "--model"),
    Bad("memory --model mixtral-8x7b --layout dp8-ep8-z1 --imbalance 0.5", "0.5 is not in the range"),
    Bad("memory --model mixtral-8x7b --layout dp8-ep8-z1 --imbalance 9", "8 or less"),
    Bad("memory --model mixtral-8x7b --layout dp3-ep3-z1", "8 experts"),
    Bad("memory --model gpt2 --layout dp2-ep2-z1", "no experts"),
    Bad("memory --model gpt3 --layout dp1", "gpt3"),
    Bad("memory --model gpt2 --layout dp0", "dp"),
    Bad("memory --model gpt2 --layout tp99999999", "tp=99999999"),
    Bad("memory --model gpt2 --layout tp5", "tp=5"),
    Bad("memory --model gpt2 --layout dp1-dp2", "given twice"),
    Bad("memory --model gpt2 --layout '$(touch executed)'", "is not a part of a layout"),
    Bad("memory --model gpt2 --layout dp1 --seq 0", "0 is not in the range"),
    Bad("memory --model gpt2 --layout dp1 --seq 2000", "1024 positions"),
    Bad("memory --model gpt2 --layout dp1 --gpu H1000", "H1000"),
    Bad("memory --model gpt2 --layout dp1 --sweep zero,zero", "named twice"),
    Bad("memory --model gpt2 --layout dp1 --plot text.txt/below.png", "below.png"),
    Bad("memory --model gpt2 --layout dp1 --plot out.exe", "out.exe"),
    Bad("memory --model config.json --layout dp1", "nested too deeply", {"config.json": DEEP_JSON}),
    Bad("memory --model config.json --layout dp1", "is not a directory", {"config.json": link("/dev/zero")}),
    Bad("memory --model pipe --layout dp1", "pipe", {"pipe": PIPE}),
    Bad(f"memory --model {LONG} --layout dp1", "File name too long"),
    Bad("memory --recipe r.yaml --model gpt2", "--model"),
    Bad("memory --recipe gone.yaml", "gone.yaml"),
    Bad("schedule", "Missing option '--pp'"),
    Bad("schedule --pp 4", "Missing option '--micro-batches'"),
    Bad("schedule --pp 0 --micro-batches 8", "0 is not in the range"),
    Bad("schedule --pp 4 --micro-batches 8 --kind zb", "is not one of"),
    Bad("schedule --pp 4 --micro-batches 8 --virtual-stages 2", "or --kind interleaved"),
    Bad("schedule --pp 4 --micro-batches 8 --kind interleaved --virtual-stages 1", "or --kind 1f1b"),
    Bad("schedule --pp 4 --micro-batches 8 --kind zb-v --virtual-stages 3", "zb-v has 2 on a rank"),
    Bad("schedule --pp 4096 --micro-batches 65536", "operations"),
    Bad("schedule --pp 4 --micro-batches 8 --max-pending-weights 2", "only zb-h1 and zb-v have weight gradients that"),
    Bad("schedule --pp 4 --micro-batches 8 --kind zb-v --max-pending-weights 0", "0 is not in the range"),
    Bad("schedule --pp 4 --micro-batches 8 --backward 0", "is not in the range"),
    Bad("schedule --pp 4 --micro-batches 8 --comm nan", "not a finite number"),
    Bad("schedule --pp 4 --micro-batches 8 --kind gpipe --blocking", "1f1b only"),
    Bad("schedule --pp 2 --micro-batches 8 --stage-times 1,nan", "numbers above 0"),
    Bad("schedule --pp 2 --micro-batches 8 --stage-times 1,0", "numbers above 0"),
    Bad("schedule --pp 2 --micro-batches 8 --stage-times ,", "numbers above 0"),
    Bad("schedule --pp 2 --micro-batches 8 --stage-times 1,1,1", "3 of 2 ranks"),
    Bad("schedule --pp 2 --micro-batches 8 --svg out.png", "ends in .svg"),
    Bad("schedule --pp 2 --micro-batches 8 --svg gone/out.svg", "gone/out.svg"),
    Bad("schedule --pp 2 --micro-batches 8 --svg pipe.svg", "pipe.svg", {"pipe.svg": PIPE}),
    Bad("config", "must be given"),
    Bad("config gone.yaml", "gone.yaml"),
    Bad("config d.yaml --lr nan", "nan"),
    Bad("config d.yaml --lr inf", "inf"),
    Bad("config d.yaml --weight-decay nan", "nan"),
    Bad("config d.yaml --betas 0.9 1", "1"),
    Bad("config d.yaml --format all", "--output DIR"),
    Bad("config d.yaml --explain --format accelerate", "--explain"),
    Bad("config d.yaml --output text.txt", "text.txt"),
    Bad("config d.yaml --output text.txt/below", "text.txt/below"),
    Bad(f"config d.yaml --output {LONG}", "File name too long"),
    Bad("config d.yaml --world-size 3 --nodes 2 --gpus-per-node 2", "--world-size 3: "),
    Bad("config d.yaml --host a --host b", "2 host names for 1 nodes"),
    Bad("config d.yaml --launcher slurm --host '$(touch executed)' --world-size 2 --nodes 2", "1 host names for 2 nodes"),
    Bad("config d.yaml --port 80", "80 is not in the range"),
    Bad("config d.yaml --steps 2147483648", "2147483648 is not in the range 1 to 2147483647"),
    Bad(f"config d.yaml --global-batch {MANY_DIGITS}", "is not in the range 1 to 2147483647"),
    Bad("config d.yaml --script \"'unclosed\"", "--script"),
    Bad("config d.yaml --network-gbit nan --gpu H100-SXM-80GB", "nan"),
    Bad("config d.yaml gone.yaml", "are 2 recipes"),
    Bad("config train.steps=3", "overrides a recipe"),
    Bad("config --model gpt2 --layout dp2 --global-batch 3 --micro 1", "batch.global_batch_size"),
    Bad("config r.yaml", "takes no DeepSpeed config"),
    Bad("config --model gpt2 --layout dp1 --global-batch 8 --micro 1 --lr nan", "nan"),
    Bad("lint", "Name a file"),
    Bad("lint gone.json", "gone.json"),
    Bad("lint ds.json", "cannot be read", {"ds.json": PIPE}),
    Bad("lint ds.json", "cannot be read", {"ds.json": link("/dev/zero")}),
    Bad("lint ds.json", "ds.json", {"ds.json": DEEP_JSON}),
    Bad("lint ds.json", "ds.json", {"ds.json": "{"}),
    Bad("lint ds.json", "ds.json", {"ds.json": ""}),
    Bad("lint ds.json", "ds.json", {"ds.json": b"\xff\xff"}),
    Bad("lint acc.yaml", "acc.yaml", {"acc.yaml": "!!python/object/apply:os.system ['touch executed']\n"}),
    Bad("lint folder", "no *.json", {"folder": FOLDER}),
    Bad("lint ds.json --gpus 0", "0 is not in the range"),
    Bad(f"lint ds.json --gpu-memory {MANY_DIGITS}GB", "is not a size"),
    Bad("lint ds.json --layout xx", "xx"),
    Bad("lint ds.json --model gpt3", "gpt3"),
    Bad("lint ds.json --gpu-memory -5GB", "-5GB"),
    Bad("lint ds.json --deepspeed abc", "abc"),
    Bad("lint ds.json --ignore no-such-rule", "NO-SUCH-RULE"),
    Bad("lint ds.json --recipe gone.yaml", "gone.yaml"),
    Bad("lint ds.json --trainer-args gone.json", "gone.json"),
    Bad(f"lint {LONG}.json", "File name too long"),
]
REPORTS = [
    Bad("compare", "nothing to compare"),
    Bad("compare run", "only one run"),
    Bad("compare run gone", "gone"),
    Bad("compare run text.txt", "text.txt"),
    Bad("compare run hf", "hf"),
    Bad("compare run bad.jsonl", "bad.jsonl", {"bad.jsonl": DEEP_JSON + "\n"}),
    Bad("compare run bad.jsonl", "bad.jsonl", {"bad.jsonl": '{"step": "x"}\n'}),
    Bad("compare run bad.jsonl", "bad.jsonl", {"bad.jsonl": ""}),
    Bad("compare run bad.jsonl", "bad.jsonl", {"bad.jsonl": PIPE}),
    Bad("compare run bad.jsonl", "bad.jsonl", {"bad.jsonl": link("/dev/zero")}),
    Bad("compare run bad.jsonl", "bad.jsonl", {"bad.jsonl": b"\xff\xfe\n"}),
    Bad("compare run run --tolerance nan", "nan"),
    Bad("compare run run --tolerance -1", "-1"),
    Bad("compare run run --steps 5", "--steps"),
    Bad("compare run run --report text.txt", "text.txt"),
    Bad("compare --recipe r.yaml", "--against"),
    Bad("compare --recipe r.yaml --against z9", "z9"),
    Bad("compare --recipe r.yaml --against ''", "strateg"),
    Bad("compare --recipe r.yaml --against tp2-tp4", "given twice"),
    Bad("compare --recipe r.yaml --against '$(touch executed)'", "strateg"),
    Bad("compare --recipe gone.yaml --against z1", "gone.yaml"),
    Bad("compare --against z1", "--recipe"),
    Bad("compare --recipe r.yaml --against z1 --steps 1", "1 is not in the range"),
    Bad(f"compare --recipe r.yaml --against z1 --steps {MANY_DIGITS}", "is not in the range 2 to 2147483647"),
    Bad("report", "Missing argument"),
    Bad("report gone", "gone"),
    Bad("report text.txt", "text.txt:1"),
    Bad("report hf", "no metrics.jsonl"),
    Bad("report run run", "-o DIR"),
    Bad("report run -o text.txt", "text.txt"),
    Bad("report run -o hf", "hf"),
    Bad("report run --gpu H1000", "H1000"),
    Bad("report bad.jsonl", "bad.jsonl", {"bad.jsonl": DEEP_JSON + "\n"}),
    Bad("report bad.jsonl", "bad.jsonl", {"bad.jsonl": PIPE}),
    Bad("report bad.jsonl", "bad.jsonl", {"bad.jsonl": link("/dev/zero")}),
    Bad("report bad.jsonl", "bad.jsonl", {"bad.jsonl": '{"step": 1, "loss": "x"}\n'}),
    Bad(f"report {LONG}", "File name too long"),
    Bad("calibrate surplus", "surplus"),
    Bad("calibrate --output .", "is a directory"),
    Bad("plan --model gpt2 --gpus 2xcpu --seq 8 --global-batch 2 --cluster c.json", "not a calibration file of", {"c.json": "{}"}),
    Bad("doctor --timeout 0", "0 is not in the range"),
    Bad("doctor surplus", "surplus"),
    Bad("families gpt3", "gpt3"),
    Bad("ls no-such-recipe", "no-such-recipe"),
    Bad("ls --task nothing", "nothing"),
    Bad("cat r.yaml", "r.yaml: not a recipe of the gallery"),
    Bad(f"cat {LONG}", "not a recipe of the gallery"),
    Bad("cp demo gone/here.yaml", "gone/here.yaml"),
    Bad("cp demo r.yaml", "r.yaml: this file exists"),
    Bad("validate r.yaml --layout ''", "--layout"),
    Bad("train r.yaml --layout 8xH100", "the recipe lists none"),
    Bad("train.py --config r.yaml --layout z4", "ZeRO has the stages"),
    Bad("schema surplus", "surplus"),
    Bad("trian r.yaml", "Did you mean train?"),
    Bad("--nonsense", "--nonsense"),
]
# fmt: on
BAD_INPUTS = [
    *(*RECIPES, *OVERRIDES, *CONTRADICTIONS, *MODEL_OVERRIDES, *MODELS, *WEIGHTS, *TEXTS, *TRAIN, *SAMPLE),
    *(*CHECKPOINTS, *CONFIGS, *REPORTS, *PREFERENCES, *DISTILLATIONS),
]
