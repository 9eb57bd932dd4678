"""Records for the host: packed into a ring in mapped host memory, each made visible by its sequence number.

Words of the control block (int64, on the device): address of the ring, number of slots, bytes of a slot, records
written so far. A slot begins with a header of `HEADER` bytes, whose first word (int32) is the record's number plus one
and is written last, behind a system-wide fence; the host takes a record only when it finds the number it waits for.
The ring never fills: a launch may write no more records than there are slots (`dlmrt.cuda.programs`).

Source: ours; PTX ISA 8.x, memory consistency model, for fence and release.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlmrt.cuda.kernels.comm import is_met

HEADER = 16  # bytes before a record
_HEADER = tl.constexpr(HEADER)


@triton.jit
def pack_record(control, fields, kind, BYTES: tl.constexpr):
    """Copy one field of a record. Grid: fields + 1; `fields` int64 [F, 3]: source, place in the record, bytes.

    The last program writes the record's kind, an int32 before the fields.
    """
    field = tl.program_id(0)
    slots = tl.load(control + 1)
    if slots == 0:
        return
    record = tl.load(control) + tl.load(control + 3) % slots * tl.load(control + 2) + _HEADER
    if field == tl.num_programs(0) - 1:
        tl.store(record.to(tl.pointer_type(tl.int32)), kind)
        return
    source = tl.load(fields + 3 * field).to(tl.pointer_type(tl.uint8))
    target = (record + tl.load(fields + 3 * field + 1)).to(tl.pointer_type(tl.uint8))
    count = tl.load(fields + 3 * field + 2)
    for begin in range(0, count, BYTES):
        i = begin + tl.arange(0, BYTES)
        tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


@triton.jit
def publish(control, ranks, HAS_RANKS: tl.constexpr, IS_DEVICE: tl.constexpr):
    """Make the packed record visible, unless one of several ranks did not come. Grid: 1."""
    slots = tl.load(control + 1)
    if HAS_RANKS:
        slots = tl.where(is_met(ranks), slots, 0)
    if slots == 0:
        return
    number = tl.load(control + 3)
    slot = tl.load(control) + number % slots * tl.load(control + 2)
    tl.store(control + 3, number + 1)
    if IS_DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [slot, (number + 1).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(slot.to(tl.pointer_type(tl.int32)), (number + 1).to(tl.int32))
