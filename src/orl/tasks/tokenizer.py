"""Small byte-level BPE tokenizer trained on task text, and the files that make it a Hugging Face tokenizer.

All 256 bytes are in the alphabet, so any text round-trips. Digits stand alone, which keeps arithmetic aligned. Runs of
capitals are left out of the text that the merges are learnt from: no token joins two capitals, and in the spelling
tasks, which are written in capitals, a letter is a token. The four special tokens have fixed ids.

User text must be encoded with `tokenizer.encode_special_tokens = True`: then a literal "<|mask|>" in it becomes
ordinary byte pieces. The attribute is not stored in `tokenizer.json`, so every reader of the file sets it.

**Source:** ours, on huggingface/tokenizers; template after ChatML, without a default system prompt.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from orl.tasks.types import Problem

PAD_TOKEN, START_TOKEN, END_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN, MASK_TOKEN)  # ids 0, 1, 2, 3
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(problems: Iterable[Problem], *, vocab_size: int = 2048) -> Tokenizer:
    """Train the merges on prompts and responses; the result encodes special-token text as ordinary text.

    Args:
        problems: Training problems, read once; a few thousand over all tasks are enough.
        vocab_size: Number of ids, special tokens and bytes included; fewer come out when the text has no more merges.

    Raises:
        ValueError: `vocab_size` leaves no room for the special tokens and the 256 bytes.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}; use at least {MIN_VOCAB_SIZE} (special tokens and bytes)")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_merge_text(problems), trainer=trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into a folder, made when missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": END_TOKEN,
        "mask_token": MASK_TOKEN,
        "additional_special_tokens": [START_TOKEN],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _merge_text(problems: Iterable[Problem]) -> Iterator[str]:
    # Every capital gets its form with a space before it, or the first letter of a word would be one or two tokens.
    yield from [" " + " ".join(string.ascii_uppercase)] * 2
    for problem in problems:
        for text in (f"user\n{problem.prompt}", f"assistant\n{problem.response}"):
            yield re.sub(r"[A-Z]{2,}", "", text)
