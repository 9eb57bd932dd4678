"""Every operation that may stand in a program, as data: operands, types and shapes.

Notation: ``name:type[dims]``, `?` marks an input that may be left out, `->` parts inputs from outputs. An output with
the name of an input and no type of its own is that input, updated in place. A letter stands for one size throughout its
line, a product as `N*H` for the product of two; `[]` is a scalar. `act` is the type of activations, `weight` any format
of weights, `kv` the cache's type, any other word a type of `ITEM_BYTES`.

Legend: T rows, D model width, F MLP width, N query heads, G key/value heads, H head width, V vocabulary, W words of one
bit an id, C positions of the cache, P prompt or packed columns, L canvas slots, E experts, K experts of a row, S steps
of a block, B blocks.

Source: ours; the model's operations are those of dlmrt.ops.spec, the loop's the numbered steps of dlmrt.decode.loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

MODEL_OPS = {
    "embed": "table:weight[V,D] ids:int32[T] -> x:act[T,D]",
    # x += alpha * adapter(z) on the rows of `where`
    "residual_mix": (
        "x:act[T,D] z:float32[T,D] where?:bool[T] norm:weight[D] gate:weight[F,D] up:weight[F,D] down:weight[D,F] -> x"
    ),
    # the same in parts, for one rank: x += alpha * delta on the rows of `where`
    "mix": "x:act[T,D] delta:act[T,D] where?:bool[T] -> x",
    "add": "x:act[T,D] delta:act[T,D] -> y:act[T,D]",
    "scale": "x:act[T,D] factor:weight[O] -> y:act[T,D]",
    "rms_norm": "x:act[T,D] weight?:weight[D] -> y:act[T,D]",
    "linear": "x:act[T,D] weight:weight[F,D] -> y:act[T,F]",
    "qkv": (
        "x:act[T,D] wq:weight[N*H,D] wk:weight[G*H,D] wv?:weight[G*H,D] q_norm:weight[H] k_norm:weight[H] "
        "positions:int32[T] -> q:act[T,N,H] k:act[T,G,H] v:act[T,G,H]"
    ),
    "qkv_biased": (
        "x:act[T,D] wq:weight[N*H,D] wk:weight[G*H,D] wv:weight[G*H,D] bq:weight[N*H] bk:weight[G*H] bv:weight[G*H] "
        "positions:int32[T] -> q:act[T,N,H] k:act[T,G,H] v:act[T,G,H]"
    ),
    "qkv_packed": (
        "x:act[T,D] weight:weight[P,D] q_norm:weight[H] k_norm:weight[H] positions:int32[T] -> q:act[T,N,H] "
        "k:act[T,G,H] v:act[T,G,H]"
    ),
    # keys and values of the rows, at their positions
    "kv_store": "k:act[T,G,H] v:act[T,G,H] positions:int32[T] cache:kv[C,2,G,H] -> cache",
    # first position that a row sees through attribute `window`; is_shared: the rows count as one position
    "window_start": "positions:int32[T] -> first:int32[T]",
    # row t over positions [first[t], visible[t]) of the cache, `first` left out: 0
    "attention": "q:act[T,N,H] cache:kv[C,2,G,H] visible:int32[T] first?:int32[T] -> y:act[T,N*H]",
    "gated_mlp": "x:act[T,D] gate:weight[F,D] up:weight[F,D] down:weight[D,F] -> y:act[T,D]",
    # experts and their weights, K a row
    "route_sigmoid": "x:act[T,D] weight:weight[E,D] bias:weight[E] -> experts:int32[T,K] weights:float32[T,K]",
    "route_softmax": (
        "x:act[T,D] scale:weight[D] weight:weight[E,D] expert_scale:weight[E] -> experts:int32[T,K] "
        "weights:float32[T,K]"
    ),
    "moe": (
        "x:act[T,D] experts:int32[T,K] weights:float32[T,K] gate:weight[E,F,D] up:weight[E,F,D] "
        "down:weight[E,D,F] -> y:act[T,D]"
    ),
    "soft_cap": "logits:act[T,V] -> y:act[T,V]",
    "soft_embedding": "probs:float32[T,V] table:weight[V,D] -> z:float32[T,D]",
    # logit_shift 1: the final hidden states of committed rows, kept by position; slot 0 reads the one before
    # `context`; without `hidden` the others read what is kept of the canvas
    "hidden_store": "hidden:act[T,D] positions:int32[T] cache:act[C,D] -> cache",
    "shift": "hidden?:act[T,D] cache:act[C,D] context:int32[] -> y:act[T,D]",
    # a result that outlives the run
    "output": "x:act[T,D] -> y:float32[T,D]",
}

HEAD_OPS = {
    # steps 5: what sampling.predict computes, per row; draws only where is_drawn. Attributes is_greedy,
    # is_filtered.
    "predict": (
        "logits:act[T,V] banned:uint32[W] step_temperature:float32[] is_drawn?:bool[T] seed?:uint64[] "
        "block_idx?:int32[] step?:int32[] top_k?:int64[] top_p?:float64[] min_p?:float32[] -> argmax:int32[T] "
        "argmax_confidence:float32[T] token:int32[T] confidence:float32[T] entropy:float32[T] "
        "log_sum_exp:float32[T] is_finite_row:bool[T] is_finite:int32[]"
    ),
    # id of highest tempered logit among those that are not banned
    "best_other": "logits:act[T,V] banned:uint32[W] step_temperature:float32[] -> argmax:int32[T]",
    # the tempered, unfiltered distribution
    "probabilities": (
        "logits:act[T,V] banned:uint32[W] step_temperature:float32[] log_sum_exp:float32[T] -> probs:float32[T,V]"
    ),
}

LOOP_OPS = {
    # 1 prefill: the first num_prefill ids of the prompt in chunks (attribute `chunk`) that end where a block of
    # `align` rows does; visibility by `block`
    "start_request": (
        "num_prompt:int32[] num_prefill:int32[] cancel:int32[] -> context:int32[] num_prefill_forwards:int32[] "
        "more_prefill:int32[] more_blocks:int32[] block_idx:int32[] num_pinned:int32[] num_answer:int64[] "
        "end_reason:int32[]"
    ),
    "prefill_chunk": (
        "prompt:int32[P] context:int32[] num_prefill:int32[] -> chunk_rows:int32[] ids:int32[T] "
        "positions:int32[T] visible:int32[T]"
    ),
    "finish_chunk": (
        "chunk_rows:int32[] num_prefill:int32[] cancel:int32[] context:int32[] num_prefill_forwards:int32[] -> "
        "context num_prefill_forwards more_prefill:int32[]"
    ),
    # 2 start canvas: pinned prompt part, noise elsewhere; counters of the block at 0. 3: more_steps = not
    # cancel.
    "start_block": (
        "prompt:int32[P] num_prompt:int32[] num_prefill:int32[] num_pinned:int32[] context:int32[] "
        "block_idx:int32[] cancel:int32[] "
        "allowed?:int32[V] num_allowed?:int32[] noise_key?:uint64[] end_reason:int32[] -> canvas:int32[L] "
        "answer:int32[L] is_open:bool[L] is_free:bool[L] positions:int32[L] visible:int32[L] "
        "commit_visible:int32[L] step:int32[] num_full_steps:int32[] num_repeats:int32[] num_settled:int32[] "
        "has_residual:int32[] is_done:int32[] more_steps:int32[] end_reason"
    ),
    # 2 behind shifted logits, rule sub_blocks: slot 0 takes the argmax of its row unless it is pinned; a row that is
    # not finite ends the block
    "check_first": "num_pinned:int32[] more_steps:int32[] -> is_first_open:int32[]",
    "decide_first": (
        "first_argmax:int32[1] first_is_finite:int32[] canvas:int32[L] is_open:bool[L] more_steps:int32[] "
        "end_reason:int32[] -> canvas is_open is_finite_row:bool[L] more_steps end_reason"
    ),
    # what the step consumes, kept for its record; the temperature of the step
    "start_step": (
        "canvas:int32[L] is_open:bool[L] step:int32[] temperature:float64[] t_min?:float64[] t_max?:float64[] "
        "max_steps:int32[] -> before:int32[L] was_open:bool[L] step_temperature:float32[]"
    ),
    # 4 and 10 of a canvas whose rows see only those before them: from the first slot whose id is not the one that
    # its keys, values and hidden state are known for, up to attribute `num_rows`
    "changed_rows": (
        "ids:int32[L] positions:int32[L] visible:int32[L] step:int32[] known_ids:int32[L] -> known_ids "
        "num_changed:int32[] row_ids:int32[T] row_positions:int32[T] row_visible:int32[T]"
    ),
    # 6 commit, one operation a rule
    "commit_threshold": (
        "argmax:int32[L] argmax_confidence:float32[L] token:int32[L] confidence:float32[L] was_open:bool[L] "
        "is_free:bool[L] threshold:float32[] min_commit:int32[] max_steps:int32[] edit_threshold?:float32[] "
        "max_post_edit_steps?:int32[] canvas:int32[L] answer:int32[L] is_open:bool[L] step:int32[] "
        "num_full_steps:int32[] -> canvas answer is_open step num_full_steps committed:bool[L] changed:bool[L] "
        "num_edits:int32[] is_done:int32[]"
    ),
    "commit_steps": (
        "token:int32[L] confidence:float32[L] was_open:bool[L] max_steps:int32[] canvas:int32[L] answer:int32[L] "
        "is_open:bool[L] step:int32[] -> canvas answer is_open step committed:bool[L] changed:bool[L] "
        "num_edits:int32[] is_done:int32[]"
    ),
    "commit_sub_blocks": (
        "token:int32[L] confidence:float32[L] was_open:bool[L] is_free:bool[L] threshold:float32[] "
        "min_commit:int32[] sub_block_length:int32[] max_steps:int32[] canvas:int32[L] answer:int32[L] is_open:bool[L] "
        "step:int32[] -> canvas answer is_open step committed:bool[L] changed:bool[L] num_edits:int32[] "
        "is_done:int32[]"
    ),
    # rule joint_threshold_indel in two parts. What each slot wants; with `needs_other` slots of `is_other` want the
    # best id outside `other_banned` instead (best_other). `seen` holds the canvases of the block's steps, `tried` the
    # ids that each slot was given. Then deletions and splits.
    "propose_edits": (
        "argmax:int32[L] argmax_confidence:float32[L] token:int32[L] confidence:float32[L] was_open:bool[L] "
        "is_free:bool[L] banned:uint32[W] threshold:float32[] edit_threshold:float32[] max_post_edit_steps:int32[] "
        "max_steps:int32[] canvas:int32[L] step:int32[] num_full_steps:int32[] is_original:bool[L] seen:int32[S,L] "
        "tried:uint32[L,W] -> num_full_steps is_original seen tried wanted:int32[L] committed:bool[L] "
        "is_other:bool[L] other_banned:uint32[W] needs_other:int32[] num_edits:int32[] is_done:int32[]"
    ),
    "apply_edits": (
        "wanted:int32[L] other:int32[L] committed:bool[L] is_other:bool[L] is_free:bool[L] canvas:int32[L] "
        "is_original:bool[L] tried:uint32[L,W] step:int32[] -> canvas is_original tried step answer:int32[L] "
        "is_open:bool[L] changed:bool[L]"
    ),
    "commit_entropy_bound": (
        "argmax:int32[L] token:int32[L] entropy:float32[L] is_free:bool[L] entropy_bound:float64[] "
        "stop_entropy:float64[] stability_threshold:int32[] max_steps:int32[] canvas:int32[L] answer:int32[L] "
        "is_open:bool[L] step:int32[] num_repeats:int32[] -> canvas answer is_open step num_repeats "
        "committed:bool[L] changed:bool[L] num_edits:int32[] is_done:int32[]"
    ),
    # 7 settle: end_reason; is_continued = another step of this block follows; is_urgent = not, or the host
    # wants every step
    "settle": (
        "answer:int32[L] is_open:bool[L] is_done:int32[] eos:uint32[W] stop:uint32[W] max_tokens:int64[] "
        "wants_steps:int32[] num_settled:int32[] num_answer:int64[] end_reason:int32[] -> num_settled num_answer "
        "end_reason is_continued:int32[] is_urgent:int32[]"
    ),
    # 8 renoise the open slots
    "renoise": (
        "is_open:bool[L] step:int32[] block_idx:int32[] allowed?:int32[V] num_allowed?:int32[] "
        "noise_key?:uint64[] canvas:int32[L] -> canvas"
    ),
    # 5, 8 rows of a recorded run instead of draws and noise; attribute `num_steps` is its S
    "take_given": "given:int32[B,S,L] block_idx:int32[] step:int32[] where:bool[L] values:int32[L] -> values",
    # to attribute `value`
    "set_flag": "-> flag:int32[]",
    # 3 cancel? before the next forward
    "finish_step": (
        "is_done:int32[] is_finite:int32[] cancel:int32[] end_reason:int32[] -> more_steps:int32[] end_reason"
    ),
    # 10 commit forward, unless the answer has ended
    "close_block": "end_reason:int32[] -> needs_commit:int32[]",
    "commit_rows": "context:int32[] -> context",
    "next_block": "end_reason:int32[] block_idx:int32[] -> block_idx num_pinned:int32[] more_blocks:int32[]",
}  # fmt: skip

RANK_OPS = {
    # of several ranks: the sum of what each has, in their order; rank 0's flag on all of them. Attributes num_ranks and
    # terms, the type in which they travel
    "sum_ranks": "x:act[T,D] -> y:act[T,D]",
    "agree": "flag:int32[] -> agreed:int32[]",
}

SIGNATURES: dict[str, str] = MODEL_OPS | HEAD_OPS | LOOP_OPS | RANK_OPS


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One input or output of a signature."""

    name: str
    dtype: str | None  # None: an output that is the input of this name
    dims: tuple[str, ...] = ()
    is_optional: bool = False


_OPERAND = re.compile(r"(\w+)(\?)?(?::(\w+)\[([\w,*]*)\])?")


@cache
def signature(op: str) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Inputs and outputs of `op`."""
    inputs, outputs = SIGNATURES[op].split("->")
    return _operands(inputs), _operands(outputs)


def _operands(text: str) -> tuple[Operand, ...]:
    found = []
    for word in text.split():
        match = _OPERAND.fullmatch(word)
        assert match is not None, word
        name, optional, dtype, dims = match.groups()
        found.append(
            Operand(
                name=name, dtype=dtype, dims=tuple(dims.split(",")) if dims else (), is_optional=optional is not None
            )
        )
    return tuple(found)
