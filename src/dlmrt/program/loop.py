"""The denoising loop as a program: the numbered steps of `dlmrt.decode.loop`, recorded once, run without Python.

What a request may change lives in scalars and states that the host fills before the run: the prompt, lengths, limits,
thresholds, keys of the random streams, sets of ids as bits. What is fixed per program is in `LoopOptions`: it decides
which kernels there are. The host learns what happened from records that the program appends to a ring: one for the
prefill, one a step, one a block.

A step whose logits are not finite decides nothing: the block closes with the end reason `NON_FINITE` and the rows at
fault.

Source: ours; steps as in dlmrt.decode.loop, which is what it must equal token for token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlmrt.models.config import ModelConfig
from dlmrt.program.forwards import Formats, ModelParts
from dlmrt.program.nodes import Buffer, Kernel, Program, Rows, Value, maximum, walk
from dlmrt.program.record import URGENT, Recorder
from dlmrt.program.shard import Shard, make_recorder

# Values of the scalar `end_reason`, in the order of their index; 0: the answer goes on.
END_REASONS = ("", "eos", "stop_token", "max_tokens", "cancelled", "non_finite")

RECORD_KINDS = ("prefill", "step", "block", "end")  # values of a record's first word

# Commit rules that a program can run, with the scalars that each one reads.
RULE_SCALARS: dict[str, dict[str, str]] = {
    "threshold": {"threshold": "float32", "min_commit": "int32"},
    "joint_threshold": {
        "threshold": "float32", "min_commit": "int32", "edit_threshold": "float32", "max_post_edit_steps": "int32",
    },
    "entropy_bound": {"entropy_bound": "float64", "stop_entropy": "float64", "stability_threshold": "int32"},
    "joint_threshold_indel": {
        "threshold": "float32", "edit_threshold": "float32", "max_post_edit_steps": "int32",
    },
    "steps": {},
    "sub_blocks": {"threshold": "float32", "min_commit": "int32", "sub_block_length": "int32"},
}  # fmt: skip

MAX_HISTORY = 4096  # steps of one block that a program remembers at most


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What one loop program is recorded for; requests that differ in other settings share it."""

    canvas_length: int
    prefill_chunk: int  # rows of one prefill forward at most
    commit_rule: str
    is_greedy: bool = True
    is_filtered: bool = False  # top-k, top-p or min-p in use
    use_residual: bool = False
    keeps_residual: bool = False  # step records carry the residual that the next step consumes
    num_given: tuple[int, int] = (0, 0)  # blocks, and steps of each, whose draws and noise are inputs
    num_remembered: int = 0  # joint_threshold_indel: steps of a block whose canvases are kept


def record_loop(
    config: ModelConfig, formats: Formats, options: LoopOptions, *, capacity: int, drops_rows: bool = False,
    shard: Shard | None = None,
) -> Program:  # fmt: skip
    """The whole loop for one request in a context of `capacity` positions.

    Args:
        drops_rows: rows whose results are known are left out of canvas and commit forwards, where `can_drop_rows`.
        shard: one rank's part, of whose heads `config` is; every rank decides the same, a cancel is rank 0's.
    """
    recorder = make_recorder("loop", shard, cache=formats.cache)
    return _Loop(recorder, config, formats, options, capacity, drops_rows=drops_rows, shard=shard).record()


def can_drop_rows(config: ModelConfig, options: LoopOptions) -> bool:
    """Whether a canvas row stays what it was while no id up to it changes, and what it predicts can be read later.

    So it is where slots see only slots before them, no residual enters, the rows of a block share no experts, and
    logits are shifted: final hidden states are then kept by position, and nobody reads that of the last slot.
    """
    diffusion = config.diffusion
    assert diffusion is not None
    is_causal = diffusion.in_block_attention == "causal" and diffusion.logit_shift == 1
    return is_causal and options.canvas_length > 1 and not options.use_residual and config.moe is None


class _Loop:
    """Buffers of the loop by name, and its parts in order."""

    def __init__(
        self, recorder: Recorder, config: ModelConfig, formats: Formats, options: LoopOptions, capacity: int,
        *, drops_rows: bool, shard: Shard | None,
    ) -> None:  # fmt: skip
        self.r, self.config, self.options, self.shard = recorder, config, options, shard
        self.model = ModelParts(recorder, config, formats, capacity=capacity, shard=shard)
        self.diffusion = self.model.diffusion
        length, words = options.canvas_length, -(-config.vocab_size // 32)
        self.buffers: dict[str, Buffer] = {"prompt": recorder.state("prompt", "int32", (capacity,))}
        for name in ("eos", "stop", "banned"):
            self.buffers[name] = recorder.state(name, "uint32", (words,))
        for name in ("canvas", "before", "answer", "positions", "visible", "commit_visible", "argmax", "token"):
            self.buffers[name] = recorder.state(name, "int32", (length,))
        for name in ("argmax_confidence", "confidence", "entropy", "log_sum_exp"):
            self.buffers[name] = recorder.state(name, "float32", (length,))
        for name in ("is_open", "was_open", "is_free", "committed", "changed", "is_finite_row"):
            self.buffers[name] = recorder.state(name, "bool", (length,))
        self.ring = recorder.state("ring", "uint8", (0,))
        if self.diffusion.noise == "uniform":
            self.buffers["allowed"] = recorder.state("allowed", "int32", (config.vocab_size,))
            self._scalars({"num_allowed": "int32", "noise_key": "uint64"})
        self._scalars(
            dict.fromkeys(("num_prompt", "num_prefill", "cancel", "wants_steps", "max_steps"), "int32")
            | {"max_tokens": "int64", "temperature": "float64"} | RULE_SCALARS[options.commit_rule]
        )  # fmt: skip
        self.host_cancel = self.buffers["cancel"]
        if shard is not None:
            self.buffers["cancel"] = recorder.scalar("agreed_cancel")
        if options.commit_rule == "entropy_bound":
            self._scalars({"t_min": "float64", "t_max": "float64"})
        if not options.is_greedy:
            self._scalars({"seed": "uint64"})
        if options.is_filtered:
            self._scalars({"top_k": "int64", "top_p": "float64", "min_p": "float32"})
        self._scalars(
            dict.fromkeys(
                ("context", "num_prefill_forwards", "more_prefill", "more_blocks", "block_idx", "num_pinned",
                 "end_reason", "step", "num_full_steps", "num_repeats", "num_settled", "has_residual", "is_done",
                 "more_steps", "num_edits", "is_finite", "is_continued", "is_urgent", "needs_commit"), "int32",
            ) | {"num_answer": "int64", "step_temperature": "float32"}
        )  # fmt: skip
        self.drops_rows = drops_rows and can_drop_rows(config, options)
        if self.drops_rows:
            self._scalars({"num_changed": "int32"})
            rows = Rows(symbol="T", maximum=length, count=self.buffers["num_changed"])
            self.buffers["known_ids"] = recorder.state("known_ids", "int32", (length,))
            for name in ("row_ids", "row_positions", "row_visible"):
                self.buffers[name] = recorder.state(name, "int32", (rows,))
        self.decides_first = (
            options.commit_rule == "sub_blocks" and bool(self.diffusion.logit_shift) and options.canvas_length > 1
        )
        if self.decides_first:
            self._first_buffers()
        if options.commit_rule == "joint_threshold_indel":
            self._edit_buffers(words)
        if options.num_given[0]:
            assert self.diffusion.noise == "uniform" and options.commit_rule == "entropy_bound"
            for name in ("given_tokens", "given_noise"):
                self.buffers[name] = recorder.state(name, "int32", (*options.num_given, length))
        self.residual: Buffer | None = None
        if options.use_residual:
            shape = (length, config.hidden_size)
            self.residual = recorder.state("residual", "float32", shape, present=self.buffers["has_residual"])

    def _first_buffers(self) -> None:
        """What the prediction of slot 0 alone leaves."""
        self._scalars({"is_first_open": "int32", "first_is_finite": "int32"})
        for name in ("argmax", "token"):
            self.buffers[f"first_{name}"] = self.r.state(f"first_{name}", "int32", (1,))
        for name in ("argmax_confidence", "confidence", "entropy", "log_sum_exp"):
            self.buffers[f"first_{name}"] = self.r.state(f"first_{name}", "float32", (1,))
        self.buffers["first_is_finite_row"] = self.r.state("first_is_finite_row", "bool", (1,))

    def _edit_buffers(self, words: int) -> None:
        """The history of a block whose text moves."""
        length, steps = self.options.canvas_length, self.options.num_remembered
        self._scalars({"needs_other": "int32"})
        for name in ("wanted", "other"):
            self.buffers[name] = self.r.state(name, "int32", (length,))
        for name in ("is_original", "is_other"):
            self.buffers[name] = self.r.state(name, "bool", (length,))
        self.buffers["other_banned"] = self.r.state("other_banned", "uint32", (words,))
        self.buffers["seen"] = self.r.state("seen", "int32", (steps, length))
        self.buffers["tried"] = self.r.state("tried", "uint32", (length, words))

    def record(self) -> Program:
        """All of it."""
        self._prefill()
        with self.r.while_(self.buffers["more_blocks"]):
            self._start_block()
            with self.r.while_(self.buffers["more_steps"]):
                self._step()
            self._close_block()
        self.r.publish("end", self.ring, {})
        return self.r.finish()

    def _prefill(self) -> None:
        """Step 1."""
        b, r = self.buffers, self.r
        self._agree()
        self._call("start_request")
        rows = Rows(symbol="T", maximum=self.options.prefill_chunk, count=r.scalar("chunk_rows"))
        b["chunk_rows"] = rows.count
        ids, positions, visible = (
            r.state(f"prefill.{name}", "int32", (rows,)) for name in ("ids", "positions", "visible")
        )
        with r.while_(b["more_prefill"]):
            is_aligned = self.diffusion.context_attention == "block_causal"
            align = self.options.canvas_length if is_aligned else 1
            constants: dict[str, Value] = {"chunk": self.options.prefill_chunk, "align": align} | self._visibility()
            self._call("prefill_chunk", constants, outputs={"ids": ids, "positions": positions, "visible": visible})
            self.model.extend(ids, positions, visible)
            self._agree()
            self._call("finish_chunk")
        r.publish("prefill", self.ring, self._some("context", "num_prefill_forwards"))

    def _start_block(self) -> None:
        """Steps 2 and 3."""
        in_block: dict[str, Value] = {"in_block": self.diffusion.in_block_attention}
        self._agree()
        self._call("start_block", self._noise() | self._visibility() | in_block)
        self._take_given("noise", "canvas", where="is_open")
        if self.decides_first:
            self._decide_first_slot()

    def _decide_first_slot(self) -> None:
        """Step 2 behind shifted logits."""
        b, r = self.buffers, self.r
        self._call("check_first")
        with r.if_(b["is_first_open"]):
            self._call("start_step", {"is_schedule": False})
            operands = {
                "logits": self.model.stored_canvas(b["context"], 1), "banned": b["banned"],
                "step_temperature": b["step_temperature"],
            }  # fmt: skip
            results = {name.removeprefix("first_"): b[name] for name in b if name.startswith("first_")}
            r.call("predict", operands, attributes={"is_greedy": True, "is_filtered": False}, outputs=results)
            self._call("decide_first")

    def _step(self) -> None:
        """Steps 4 to 8 and the record of the step."""
        b, r, options = self.buffers, self.r, self.options
        self._call("start_step", {"is_schedule": options.commit_rule == "entropy_bound"})
        logits = self._canvas()
        self._predict(logits)
        with r.if_(b["is_finite"]):
            self._commit(logits)
            self._call("settle", {"is_sticky": options.commit_rule in ("threshold", "steps", "sub_blocks")})
            with r.if_(b["is_continued"]):
                self._call("renoise", self._noise())
                self._take_given("noise", "canvas", where="is_open")
                if self.residual is not None:
                    probs = self._call("probabilities", inputs={"logits": logits})["probs"]
                    self.model.soft_embedding(probs, self.residual)
                    r.call("set_flag", {}, attributes={"value": 1}, outputs={"flag": b["has_residual"]})
            fields = self._some(
                "block_idx", "step", "num_edits", "num_full_steps", "num_repeats", "is_done", "end_reason", "before",
                "canvas", "answer", "argmax", "token", "argmax_confidence", "confidence", "entropy", "is_open",
                "committed", "changed",
            )  # fmt: skip
            if options.keeps_residual and self.residual is not None:
                fields["residual"] = self.residual
            r.publish("step", self.ring, fields, urgent=b["is_urgent"])
        self._agree()
        self._call("finish_step")

    def _canvas(self) -> Buffer:
        """Step 4."""
        b = self.buffers
        if self.drops_rows:
            self._extend_changed(b["before"], b["visible"], num_rows=self.options.canvas_length - 1)
            return self.model.stored_canvas(b["context"], self.options.canvas_length)
        where = b["was_open"] if self.diffusion.residual.where == "masked" else None
        return self.model.canvas(b["before"], b["positions"], b["visible"], b["context"], z=self.residual, where=where)

    def _extend_changed(self, ids: Buffer, visible: Buffer, *, num_rows: int) -> None:
        self._call("changed_rows", {"num_rows": num_rows}, inputs={"ids": ids, "visible": visible})
        self.model.extend(*(self.buffers[name] for name in ("row_ids", "row_positions", "row_visible")))

    def _predict(self, logits: Buffer) -> None:
        """Step 5."""
        options, inputs = self.options, {"logits": logits}
        if not options.is_greedy:
            # Where nothing is sticky, decided slots are predicted anew.
            inputs["is_drawn"] = self.buffers["is_free" if options.commit_rule == "entropy_bound" else "was_open"]
        constants: dict[str, Value] = {"is_greedy": options.is_greedy, "is_filtered": options.is_filtered}
        self._call("predict", constants, inputs=inputs)
        self._take_given("tokens", "token", where="is_free")

    def _take_given(self, given: str, values: str, *, where: str) -> None:
        """Replace what was drawn for the present step by what a recorded run drew, if the request has one."""
        b, (num_blocks, num_steps) = self.buffers, self.options.num_given
        if num_blocks:
            operands = {"given": b[f"given_{given}"], "where": b[where], "values": b[values]}
            self._call("take_given", {"num_steps": num_steps}, inputs=operands)

    def _commit(self, logits: Buffer) -> None:
        """Step 6."""
        rule = self.options.commit_rule
        if rule == "joint_threshold_indel":
            self._edit(logits)
        else:
            self._call(f"commit_{'threshold' if rule == 'joint_threshold' else rule}")

    def _edit(self, logits: Buffer) -> None:
        """Step 6 of rule `joint_threshold_indel`: few steps look at the logits again, for the best of other ids."""
        b, diffusion = self.buffers, self.diffusion
        ids: dict[str, Value] = {}
        for name in ("mask_token_id", "delete_token_id", "split_token_id"):
            token = getattr(diffusion, name)
            assert token is not None, f"rule joint_threshold_indel without {name}"
            ids[name] = token
        ids["vocab_size"] = self.config.vocab_size
        self._call("propose_edits", ids)
        with self.r.if_(b["needs_other"]):
            operands = {"logits": logits, "banned": b["other_banned"], "step_temperature": b["step_temperature"]}
            self.r.call("best_other", operands, outputs={"argmax": b["other"]})
        self._call("apply_edits", ids)

    def _close_block(self) -> None:
        """Steps 9 and 10."""
        b, r = self.buffers, self.r
        self._call("close_block")
        with r.if_(b["needs_commit"]):
            if self.drops_rows:
                self._extend_changed(b["answer"], b["commit_visible"], num_rows=self.options.canvas_length)
            else:
                self.model.extend(b["answer"], b["positions"], b["commit_visible"])
            self._call("commit_rows", {"length": self.options.canvas_length})
        r.publish(
            "block", self.ring, self._some("block_idx", "step", "end_reason", "needs_commit", "answer", "is_finite_row")
        )
        self._call("next_block")

    def _agree(self) -> None:
        """Ranks act on a cancel together or not at all: on what rank 0 has seen of it, who may look at other times."""
        if self.shard is not None:
            constants: dict[str, Value] = {"num_ranks": self.shard.size}
            agreed = {"agreed": self.buffers["cancel"]}
            self.r.call("agree", {"flag": self.host_cancel}, attributes=constants, outputs=agreed)

    def _scalars(self, names: dict[str, str]) -> None:
        self.buffers |= {name: self.r.scalar(name, dtype) for name, dtype in names.items()}

    def _some(self, *names: str) -> dict[str, Buffer]:
        return {name: self.buffers[name] for name in names}

    def _call(
        self, op: str, attributes: Mapping[str, Value] | None = None, *, inputs: Mapping[str, Buffer] | None = None,
        outputs: Mapping[str, Buffer] | None = None,
    ) -> dict[str, Buffer]:  # fmt: skip
        """Record `op` with `inputs` and every other operand that has the name of one of the loop's buffers."""
        return self.r.call_named(op, self.buffers | dict(inputs or {}), attributes=attributes, outputs=outputs)

    def _noise(self) -> dict[str, Value]:
        """The id that fills open slots; -1: uniform ids."""
        return {"mask_token_id": -1 if self.diffusion.mask_token_id is None else self.diffusion.mask_token_id}

    def _visibility(self) -> dict[str, Value]:
        """Attribute `block` of committed rows: they see whole blocks of that length; 0: what stands before them."""
        is_causal = self.diffusion.context_attention == "causal" or self.diffusion.in_block_attention == "causal"
        return {"block": 0 if is_causal else self.diffusion.canvas_length}


def record_types(program: Program) -> dict[str, npt.DTypeLike]:
    """Numpy structure of each kind of ring record of `program`: an int32 `kind`, then the published fields, packed."""
    types: dict[str, npt.DTypeLike] = {}
    for node in walk(program.body):
        if isinstance(node, Kernel) and node.op == "publish":
            fields: list[tuple[str, npt.DTypeLike, tuple[int, ...]]] = [("kind", np.int32, ())]
            fields += [
                (name, np.dtype(buffer.dtype), tuple(maximum(dim) for dim in buffer.shape))
                for name, buffer in node.inputs.items() if name != URGENT
            ]  # fmt: skip
            types[str(node.attributes["kind"])] = np.dtype(fields)
    return types
