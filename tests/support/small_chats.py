"""A small tokenizer with a chat template, and a corpus of conversations of very unequal lengths."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<s>", "</s>"),
)
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_TEXT = "one two three four five six seven eight hello there what is the sum of these numbers"
_WORDS = _TEXT.split()


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Train a byte-level BPE with some merges and the special tokens of many templates. Its offsets are trimmed."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([_TEXT, "### Instruction:\n\n### Response:\n\n"] * 9, trainer)
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant by turns, after a system message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*first, *({"role": roles[n % 2], "content": content} for n, content in enumerate(contents))]


def write_chats(path: Path, count: int = 200) -> Path:
    """Write conversations of one to four exchanges, most of them short and some longer than any sample."""
    rng = random.Random(11)

    def words() -> str:
        return " ".join(rng.choices(_WORDS, k=rng.choice((1, 2, 3, 25))))

    chats = (turns(*(words() for _ in range(2 * rng.randint(1, 4)))) for _ in range(count))
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path
