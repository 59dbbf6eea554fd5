"""A small tokenizer with a chat template, which of its tokens are trained on, and conversations of unequal lengths."""

import json
import random
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from toolkit.config.data_section import DroppedText, TrainOn
from toolkit.data.tokens.conversation_encoder import ConversationEncoder
from toolkit.data.tokens.stop_tokens import generation_stops

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<s>", "</s>"),
)
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_TEXT = "one two three four five six seven eight hello there what is the sum of these numbers"
WORDS = _TEXT.split()


def write_tokenizer(
    folder: Path,
    template: str | None = CHATML,
    *,
    eos: str = "</s>",
    special: tuple[str, ...] = (),
    stops: tuple[str, ...] = (),
) -> Path:
    """Train a byte-level BPE with some merges and the special tokens of many templates. Its offsets are trimmed.

    `stops`: tokens for a generation_config.json beside it.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([_TEXT, "### Instruction:\n\n### Response:\n\n"] * 9, trainer)
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    bpe.add_special_tokens([eos, *special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if stops:
        ids = tokenizer.convert_tokens_to_ids(list(stops))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def marked(tokenizer: PreTrainedTokenizerFast, ids: Iterable[int], trained: Iterable[int]) -> str:
    """The text of tokens, what is trained on between « and »."""
    runs = groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1] > 0)
    texts = [(is_trained, tokenizer.decode([token for token, _ in run])) for is_trained, run in runs]
    return "".join(f"«{text}»" if is_trained else text for is_trained, text in texts)


def encoded(
    folder: Path,
    chat: dict[str, Any] | list[dict[str, str]],
    train_on: TrainOn = "assistant",
    dropped_text: DroppedText = "refuse",
) -> str:
    r"""What is trained on of a chat with the tokenizer of `folder`, as `marked` writes it; \f is between documents."""
    chat = {"messages": chat} if isinstance(chat, list) else chat
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = ConversationEncoder(
        folder,
        "<u2",
        train_on,
        after=(tokenizer.eos_token_id,),
        stops=generation_stops(str(folder)),
        dropped_text=dropped_text,
    )
    documents = encoder.encode(json.dumps(chat))
    found = [(np.frombuffer(document.ids, "<u2").tolist(), document.trained.tolist()) for document in documents]
    return "\f".join(marked(tokenizer, ids, trained) for ids, trained in found)


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant by turns, after a system message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*first, *({"role": roles[n % 2], "content": content} for n, content in enumerate(contents))]


def write_chats(path: Path, count: int = 200) -> Path:
    """Write conversations of one to four exchanges, most of them short and some longer than any sample."""
    rng = random.Random(11)

    def words() -> str:
        return " ".join(rng.choices(WORDS, k=rng.choice((1, 2, 3, 25))))

    chats = (turns(*(words() for _ in range(2 * rng.randint(1, 4)))) for _ in range(count))
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path
