"""Stand-ins for tests of everything above the model: a scripted denoiser, a byte tokenizer, a tiny configuration.

They run the same loop, rules, tokenizer code and engine as a real checkpoint; only the forward pass is a Python
function, so a test can say exactly what the model sees and predicts.

Example:
    engine, _ = scripted_engine(answering(encode_bytes("Paris") + [END]))
    assert engine.generate("x").text == "Paris"

Source: ours; the byte-to-character table is GPT-2's, as `tokenizers` expects it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dlmrt.decode.engine import Engine
from dlmrt.decode.text import TextCodec
from dlmrt.models.config import DiffusionConfig, ModelConfig, ResidualConfig, RopeConfig
from dlmrt.program.nodes import Buffer, Kernel, Node, Program, While
from dlmrt.program.plan import Plan
from dlmrt.types import Bool, Float32, Int32

# Ids of `byte_codec`: a byte is its own id, special tokens follow.
MASK, START, END, END_OF_TEXT, THINK, END_THINK = range(256, 262)
SPECIALS = ("<|mask|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
VOCAB_SIZE = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """What a script may know beside the canvas."""

    context_S: Int32  # committed ids
    num_prompt: int  # length of the committed prompt: what was extended before the first forward
    request_idx: int  # requests served before this one


Script = Callable[[Int32, Int32, int, RequestView], Float32]


@dataclass
class ScriptedDenoiser:
    """Implements `dlmrt.types.Denoiser` with `script(canvas ids, positions, step, view) -> logits [L, V]`.

    `step` counts the forwards since the context last changed. Whatever the loop hands over is kept, over all requests.
    """

    script: Script
    vocab_size: int = VOCAB_SIZE
    has_residual: bool = False
    name: str = "scripted"
    dtype: str = "float32"
    extended: list[Int32] = field(default_factory=list)  # ids of every `extend`
    forwarded: list[Int32] = field(default_factory=list)  # ids of every `forward`
    residuals: list[Float32 | None] = field(default_factory=list)  # residual of every `forward`
    wheres: list[Bool | None] = field(default_factory=list)  # rows that received it
    num_requests: int = 0

    def __post_init__(self) -> None:
        self._context: list[int] = []
        self._num_prompt: int | None = None
        self._step = 0

    def reset(self) -> None:
        """Forget the committed context; a new request begins."""
        self._context, self._num_prompt, self._step = [], None, 0
        self.num_requests += 1

    @property
    def context_length(self) -> int:
        """Committed tokens."""
        return len(self._context)

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens."""
        self._context, self._step = self._context[:length], 0

    def extend(self, ids_S: Int32) -> None:
        """Append final ids."""
        self.extended.append(ids_S.copy())
        self._context += ids_S.tolist()
        self._step = 0

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """What the script says."""
        if self._num_prompt is None:
            self._num_prompt = len(self._context)
        self.forwarded.append(canvas_L.copy())
        self.residuals.append(residual_LD)
        self.wheres.append(where_L)
        view = RequestView(
            context_S=np.array(self._context, dtype=np.int32), num_prompt=self._num_prompt,
            request_idx=self.num_requests - 1,
        )  # fmt: skip
        positions_L = np.arange(len(canvas_L), dtype=np.int32) + len(self._context)
        self._step += 1
        return np.asarray(self.script(canvas_L.copy(), positions_L, self._step - 1, view), dtype=np.float32)

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """The distribution itself: an identity table makes the residual readable."""
        return probs_LV.copy()


def peaked(
    answer: Sequence[int], offsets_L: Int32, *, confidence: float | Float32 = 0.99, vocab_size: int = VOCAB_SIZE,
    fill: int = END_OF_TEXT,
) -> Float32:  # fmt: skip
    """Logits [L, V] that give `answer[offset]` (`fill` past its end) the probability `confidence`, the rest evenly."""
    tokens = [answer[offset] if 0 <= offset < len(answer) else fill for offset in offsets_L.tolist()]
    confidences = np.broadcast_to(np.asarray(confidence, dtype=np.float64), (len(tokens),))
    logits_LV = np.zeros((len(tokens), vocab_size), dtype=np.float32)
    logits_LV[np.arange(len(tokens)), tokens] = [math.log(p / (1 - p) * (vocab_size - 1)) for p in confidences]
    return logits_LV


def answering(answer: Sequence[int], *, confidence: float = 0.99, vocab_size: int = VOCAB_SIZE) -> Script:
    """A script that is sure of `answer` from the end of the prompt on, whatever the canvas holds."""
    return lambda canvas, positions, step, view: peaked(
        answer, positions - view.num_prompt, confidence=confidence, vocab_size=vocab_size
    )


def encode_bytes(text: str) -> list[int]:
    """Ids of `text` under `byte_codec`."""
    return list(text.encode())


def byte_codec(*, template: str | None = CHAT_TEMPLATE) -> TextCodec:
    """A codec whose ids 0..255 are bytes and whose special tokens have the ids of this module's constants."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return TextCodec(tokenizer, template=template)


def tiny_config(
    *, residual: ResidualConfig | None = None, diffusion: dict[str, Any] | None = None, **fields: Any
) -> ModelConfig:
    """A two-layer model over the byte vocabulary with canvas 8 and mask noise; `fields` replace fields of ModelConfig.

    Args:
        diffusion: fields of DiffusionConfig to replace, e.g. ``{"noise": "uniform", "mask_token_id": None}``.
    """
    section: dict[str, Any] = {"canvas_length": 8, "noise": "mask", "mask_token_id": MASK} | (diffusion or {})
    if section["noise"] == "uniform":
        section["mask_token_id"] = None
    values: dict[str, Any] = {
        "architecture": "Qwen3ForCausalLM", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope": RopeConfig(), "tie_word_embeddings": True, "eos_token_ids": (END, END_OF_TEXT),
        "pad_token_id": END_OF_TEXT, "bos_token_id": None, "dtype": "float32",
        "diffusion": DiffusionConfig(**section, residual=residual or ResidualConfig()),
    }  # fmt: skip
    return ModelConfig(**(values | fields))


def scripted_engine(
    script: Script, *, config: ModelConfig | None = None, generation_defaults: dict[str, Any] | None = None,
    has_residual: bool = False,
) -> tuple[Engine, ScriptedDenoiser]:  # fmt: skip
    """An engine over a ScriptedDenoiser and the byte tokenizer, and that denoiser."""
    config = config or tiny_config()
    denoiser = ScriptedDenoiser(script, vocab_size=config.vocab_size, has_residual=has_residual)
    return Engine(denoiser, config, byte_codec(), generation_defaults), denoiser


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and that the system gives to no outgoing connection before somebody listens."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def interpret_kernels() -> None:
    """Let Triton run kernels in its interpreter, on a CPU; call it before any kernel is imported.

    bfloat16 is wrong there (products, sums and rounding), so what runs in it runs in float32.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        """Bounds of `range` are arrays of one number, which numpy 2.4 no longer turns into an int by itself."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def assert_reads_see_own_writes(program: Program, placement: Plan) -> None:
    """Execute a placement, every loop twice: the bytes that a node reads are still those of the buffer it reads."""
    owner: dict[int, Buffer] = {}

    def span(buffer: Buffer) -> range:
        first = placement.offsets[buffer]
        return range(first // 64, -(-(first + max(buffer.num_bytes, 1)) // 64))

    def run(body: Sequence[Node]) -> None:
        for node in body:
            if not isinstance(node, Kernel):
                for _ in range(2 if isinstance(node, While) else 1):
                    run(node.body)
                continue
            for buffer in node.inputs.values():
                if buffer.kind == "scratch":
                    assert all(owner.get(at) is buffer for at in span(buffer)), f"{node.op} reads {buffer.name}"
            for buffer in node.outputs.values():
                if buffer.kind == "scratch":
                    owner.update(dict.fromkeys(span(buffer), buffer))

    run(program.body)
