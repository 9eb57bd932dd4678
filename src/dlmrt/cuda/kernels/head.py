"""Step 5 of the loop: from final hidden states to one predicted token a slot, without logits in memory.

`head_stats` multiplies a tile of the vocabulary and keeps what the softmax needs of it: greatest logit and its id, sum,
weighted sum, and with SAMPLE the best of logit plus Gumbel noise. `head_merge` joins the tiles of a row. Logits are
written only where a filter or a soft embedding reads them. Order of operations as in dlmrt.decode.sampling: cap,
temperature, then banned ids at minus infinity; ties go to the lower id.

A row with a logit that is not finite, of an id that is not banned, gets a sum that is NaN, which `head_merge` reports.

Where ranks share the vocabulary, V is what this one has of it and ids begin at `first`. `put_statistics` joins the
tiles of this rank, and `merge_ranks` joins what the ranks have put as `head_merge` joins tiles.

Legend: M rows at most, V vocabulary, K width, T tiles of the vocabulary (TP the power of two from T on), P ranks (PP).

Source: ours; the noise is that of dlmrt.ops.numerics.gumbel, bit-equal words and float32 logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlmrt.cuda.kernels.comm import is_met, own_part, part_behind
from dlmrt.cuda.kernels.condition import hand_over

LARGEST_ID = tl.constexpr(2147483647)
SAMPLE_STREAM = tl.constexpr(1)


@triton.jit
def is_set(bits, ids, mask):
    """Whether bit id % 32 of word id // 32 is 1."""
    word = tl.load(bits + ids // 32, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return ((word >> (ids % 32).to(tl.uint32)) & 1) != 0


@triton.jit
def gumbel_of_words(words):
    """Standard Gumbel noise of 32-bit words: -log(-log1p(-u)), u = (word + 0.5) / 2**32, kept below 1."""
    u = words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    u = tl.minimum(u, 0.99999994)
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u rounded (Kahan): the rounding of w cancels.
    w = 1.0 - u
    log1p = tl.where(w == 1.0, -u, tl.log(w) * (-u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return -tl.log(-log1p)


@triton.jit
def sample_words(seed, first_id, step, block, slots, BN: tl.constexpr, BM: tl.constexpr):
    """Words [BN, BM] of ids first_id .. first_id + BN - 1 (a multiple of 4) in canvas slots `slots` [BM]."""
    group = (first_id // 4 + tl.arange(0, BN // 4)).to(tl.uint32)[:, None] + tl.zeros((BN // 4, BM), tl.uint32)
    zero = tl.zeros_like(group)
    last = zero + (slots.to(tl.uint32) << 8)[None, :] + SAMPLE_STREAM
    w0, w1, w2, w3 = tl.philox(seed, group, zero + step.to(tl.uint32), zero + block.to(tl.uint32), last)
    # [BN / 4, BM, 2, 2] with the word's low bit last, then id = 4 group + word along the first axis.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(words, (0, 2, 3, 1)), (BN, BM))


@triton.jit
def head_stats(
    x, weight, banned, temperature, seed, step, block_idx, tile_max, tile_sum, tile_weighted, tile_argmax, tile_score,
    tile_sample, tile_sample_logit, logits, rows, cap, first, M: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_CAP: tl.constexpr, IS_SAMPLED: tl.constexpr,
    HAS_LOGITS: tl.constexpr, CDT: tl.constexpr,
):  # fmt: skip
    """Statistics [T, M] of one tile of the vocabulary. Grid: T, tiles of rows.

    Tiles begin at a multiple of 4, where words of noise do: the first one at `first` less its remainder.
    """
    num_rows = tl.load(rows)
    if tl.program_id(1) * BM >= num_rows:
        return
    tile = tl.program_id(0)
    begin_id = first - first % 4 + tile * BN
    ids = begin_id + tl.arange(0, BN)
    n = ids - first  # row of the weight
    is_known = (n >= 0) & (n < V)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    acc = tl.zeros((BN, BM), tl.float32)
    for begin in range(0, K, BK):
        k = begin + tl.arange(0, BK)
        w_tile = tl.load(
            weight + n[:, None].to(tl.int64) * K + k[None, :], mask=is_known[:, None] & (k[None, :] < K), other=0.0
        )
        x_tile = tl.load(x + m[None, :] * K + k[:, None], mask=(m[None, :] < num_rows) & (k[:, None] < K), other=0.0)
        acc = tl.dot(w_tile.to(CDT), x_tile.to(CDT), acc, input_precision="ieee")
    if HAS_CAP:
        acc = cap * (2.0 / (1.0 + tl.exp(acc * (-2.0 / cap))) - 1.0)
    acc = acc / tl.load(temperature)
    is_id = is_known[:, None]
    is_live = is_id & ~is_set(banned, ids, is_known)[:, None]
    is_bad = tl.max((is_live & ~(tl.abs(acc) < float("inf"))).to(tl.int32), 0)
    acc = tl.where(is_live, acc, -float("inf"))
    is_row = m < num_rows
    if HAS_LOGITS:
        tl.store(logits + m[None, :].to(tl.int64) * V + n[:, None], acc, mask=is_id & is_row[None, :])
    peak = tl.max(acc, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    share = tl.exp(acc - base[None, :])
    at = tile * M + m
    tl.store(tile_max + at, peak, mask=is_row)
    tl.store(tile_sum + at, tl.where(is_bad != 0, float("nan"), tl.sum(share, 0)), mask=is_row)
    tl.store(tile_weighted + at, tl.sum(tl.where(share > 0, share * (acc - base[None, :]), 0.0), 0), mask=is_row)
    tl.store(tile_argmax + at, tl.min(tl.where(acc == peak[None, :], ids[:, None], LARGEST_ID), 0), mask=is_row)
    if IS_SAMPLED:
        words = sample_words(tl.load(seed), begin_id, tl.load(step), tl.load(block_idx), m, BN, BM)
        score = acc + gumbel_of_words(words)
        best = tl.max(score, 0)
        choice = tl.min(tl.where(score == best[None, :], ids[:, None], LARGEST_ID), 0)
        logit = tl.max(tl.where(ids[:, None] == choice[None, :], acc, -float("inf")), 0)
        tl.store(tile_score + at, best, mask=is_row)
        tl.store(tile_sample + at, choice, mask=is_row)
        tl.store(tile_sample_logit + at, logit, mask=is_row)


@triton.jit
def join_tiles(peaks, sums, weighted, ids):
    """Greatest logit, sum, weighted sum and id of the tiles' vectors; where there is no tile, -inf, 0, 0 and no id."""
    peak = tl.max(peaks, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    scale = tl.exp(peaks - base)
    weighted = tl.sum(tl.where(scale > 0, scale * (weighted + (peaks - base) * sums), 0.0), 0)
    return peak, tl.sum(sums * scale, 0), weighted, tl.min(tl.where(peaks == peak, ids, LARGEST_ID), 0)


@triton.jit
def join_draws(scores, samples, logits):
    """Best score, its id and logit."""
    top = tl.max(scores, 0)
    sample = tl.min(tl.where(scores == top, samples, LARGEST_ID), 0)
    return top, sample, tl.max(tl.where(samples == sample, logits, -float("inf")), 0)


@triton.jit
def store_prediction(
    row, peak, total, weighted, best, sample, logit, is_drawn, argmax, argmax_confidence, token, confidence,
    entropy, log_sum_exp, max_logit, is_finite_row, IS_SAMPLED: tl.constexpr,
):  # fmt: skip
    """What is known of a row from its joined statistics."""
    base = tl.where(peak == -float("inf"), 0.0, peak)
    share = 1.0 / total
    chosen, chosen_share = best, share
    if IS_SAMPLED:
        is_taken = tl.load(is_drawn + row) != 0
        chosen = tl.where(is_taken, sample, best)
        chosen_share = tl.where(is_taken, tl.exp(logit - base) * share, share)
    is_finite = (total > 0) & (total < float("inf"))
    # Ids of a row that cannot be used stay within the vocabulary.
    tl.store(argmax + row, tl.where(is_finite, best, 0))
    tl.store(argmax_confidence + row, share)
    tl.store(token + row, tl.where(is_finite, chosen, 0))
    tl.store(confidence + row, chosen_share)
    tl.store(entropy + row, tl.maximum(tl.log(total) - weighted / total, 0.0))
    tl.store(log_sum_exp + row, base + tl.log(total))
    tl.store(max_logit + row, base)
    tl.store(is_finite_row + row, is_finite.to(tl.uint8))


@triton.jit
def row_statistics(
    row, tile_max, tile_sum, tile_weighted, tile_argmax, tile_score, tile_sample, tile_sample_logit, M: tl.constexpr,
    T: tl.constexpr, TP: tl.constexpr, IS_SAMPLED: tl.constexpr,
):  # fmt: skip
    """The seven statistics of a row, joined from its tiles; without IS_SAMPLED the last three stand for nothing."""
    t = tl.arange(0, TP)
    at = t * M + row
    peaks = tl.load(tile_max + at, mask=t < T, other=-float("inf"))
    sums = tl.load(tile_sum + at, mask=t < T, other=0.0)
    weights = tl.load(tile_weighted + at, mask=t < T, other=0.0)
    ids = tl.load(tile_argmax + at, mask=t < T, other=LARGEST_ID)
    peak, total, weighted, best = join_tiles(peaks, sums, weights, ids)
    top, sample, logit = peak, best, peak
    if IS_SAMPLED:
        scores = tl.load(tile_score + at, mask=t < T, other=-float("inf"))
        samples = tl.load(tile_sample + at, mask=t < T, other=LARGEST_ID)
        logits = tl.load(tile_sample_logit + at, mask=t < T, other=-float("inf"))
        top, sample, logit = join_draws(scores, samples, logits)
    return peak, total, weighted, best, top, sample, logit


@triton.jit
def head_merge(
    tile_max, tile_sum, tile_weighted, tile_argmax, tile_score, tile_sample, tile_sample_logit, is_drawn, argmax,
    argmax_confidence, token, confidence, entropy, log_sum_exp, max_logit, is_finite_row, rows, M: tl.constexpr,
    T: tl.constexpr, TP: tl.constexpr, IS_SAMPLED: tl.constexpr,
):  # fmt: skip
    """One row from its tiles. Grid: rows."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    peak, total, weighted, best, _, sample, logit = row_statistics(
        row, tile_max, tile_sum, tile_weighted, tile_argmax, tile_score, tile_sample, tile_sample_logit, M, T, TP,
        IS_SAMPLED,
    )  # fmt: skip
    store_prediction(
        row, peak, total, weighted, best, sample, logit, is_drawn, argmax, argmax_confidence, token, confidence,
        entropy, log_sum_exp, max_logit, is_finite_row, IS_SAMPLED,
    )  # fmt: skip


@triton.jit
def put_statistics(
    ranks, tile_max, tile_sum, tile_weighted, tile_argmax, tile_score, tile_sample, tile_sample_logit, rows,
    M: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, P: tl.constexpr, IS_SAMPLED: tl.constexpr,
):  # fmt: skip
    """What this rank knows of a row goes where the others read it: seven words each [7, M]. Grid: rows."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    peak, total, weighted, best, top, sample, logit = row_statistics(
        row, tile_max, tile_sum, tile_weighted, tile_argmax, tile_score, tile_sample, tile_sample_logit, M, T, TP,
        IS_SAMPLED,
    )  # fmt: skip
    numbers = own_part(ranks, P).to(tl.pointer_type(tl.float32)) + row
    ids = own_part(ranks, P).to(tl.pointer_type(tl.int32)) + row
    tl.store(numbers, peak)
    tl.store(numbers + M, total)
    tl.store(numbers + 2 * M, weighted)
    tl.store(numbers + 3 * M, top)
    tl.store(numbers + 4 * M, logit)
    tl.store(ids + 5 * M, best)
    tl.store(ids + 6 * M, sample)


@triton.jit
def merge_ranks(
    ranks, is_drawn, argmax, argmax_confidence, token, confidence, entropy, log_sum_exp, max_logit, is_finite_row, rows,
    M: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, IS_SAMPLED: tl.constexpr,
):  # fmt: skip
    """One row from what the ranks have put; where one did not come, no row can be used. Grid: rows."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    p = tl.arange(0, PP)
    parts = part_behind(ranks, tl.minimum(p, P - 1), P)
    numbers, ids = parts.to(tl.pointer_type(tl.float32)) + row, parts.to(tl.pointer_type(tl.int32)) + row
    is_rank = is_met(ranks) & (p < P)
    peaks = tl.load(numbers, mask=is_rank, other=-float("inf"))
    sums = tl.load(numbers + M, mask=is_rank, other=0.0)
    weights = tl.load(numbers + 2 * M, mask=is_rank, other=0.0)
    peak, total, weighted, best = join_tiles(
        peaks, sums, weights, tl.load(ids + 5 * M, mask=is_rank, other=LARGEST_ID)
    )  # fmt: skip
    sample, logit = best, peak
    if IS_SAMPLED:
        _, sample, logit = join_draws(
            tl.load(numbers + 3 * M, mask=is_rank, other=-float("inf")),
            tl.load(ids + 6 * M, mask=is_rank, other=LARGEST_ID),
            tl.load(numbers + 4 * M, mask=is_rank, other=-float("inf")),
        )  # fmt: skip
    store_prediction(
        row, peak, total, weighted, best, sample, logit, is_drawn, argmax, argmax_confidence, token,
        confidence, entropy, log_sum_exp, max_logit, is_finite_row, IS_SAMPLED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["handle"])
def all_finite(is_finite_row, is_finite, rows, MP: tl.constexpr, handle: tl.int64 = 0, SETS: tl.constexpr = False):
    """Whether every row can be used. Grid: 1."""
    m = tl.arange(0, MP)
    flags = tl.load(is_finite_row + m, mask=m < tl.load(rows), other=1)
    hand_over(is_finite, tl.min(flags.to(tl.int32), 0), handle, SETS)


@triton.jit
def mass_above(logits, at, peak, level, V: tl.constexpr, BV: tl.constexpr):
    """Sum of the weights exp(logit - peak) above `level`, float64, and how many they are."""
    mass = tl.zeros((BV,), tl.float64)
    count = tl.zeros((BV,), tl.int32)
    for begin in range(0, V, BV):
        v = begin + tl.arange(0, BV)
        weight = tl.exp(tl.load(logits + at + v, mask=v < V, other=-float("inf")) - peak)
        is_above = weight > level
        mass += tl.where(is_above, weight, 0.0).to(tl.float64)
        count += is_above.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def filtered_draw(
    logits, max_logit, log_sum_exp, is_drawn, top_k, top_p, min_p, seed, step, block_idx, token, confidence, rows,
    V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gumbel-max over what top-k, then top-p, then min-p leave, for rows that need a draw. Grid: rows.

    Thresholds are found exactly, by bisection over the bits of the weights exp(logit - max), which are in [0, 1]: the
    bits of non-negative floats have the order of their values.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    if tl.load(is_drawn + row) == 0:
        return
    at = row.to(tl.int64) * V
    peak = tl.load(max_logit + row)
    # Least weight that top-k keeps: the greatest level with at least k weights at or above it.
    k = tl.load(top_k)
    floor = tl.zeros((1,), tl.float32)
    if (k > 0) & (k < V):
        low, high = tl.full((1,), 0, tl.int32), tl.full((1,), 1065353216, tl.int32)  # bits of 0.0 and 1.0
        for _ in range(30):
            middle = low + (high - low + 1) // 2
            # weights >= level are those above the float just below it
            _, count = mass_above(logits, at, peak, (middle - 1).to(tl.float32, bitcast=True), V, BV)
            is_enough = count >= k
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle - 1)
        floor = low.to(tl.float32, bitcast=True)
    # Least weight that top-p keeps, of what top-k left, and what weighs more.
    share = tl.load(top_p)
    edge = tl.zeros((1,), tl.float32)
    heavier = tl.zeros((1,), tl.float64)
    limit = tl.zeros((1,), tl.float64)
    if share < 1.0:
        kept = tl.maximum(floor.to(tl.int32, bitcast=True) - 1, 0).to(tl.float32, bitcast=True)
        mass, _ = mass_above(logits, at, peak, kept, V, BV)
        limit += mass * share
        low, high = tl.full((1,), 0, tl.int32), tl.full((1,), 1065353216, tl.int32)
        for _ in range(30):
            middle = low + (high - low) // 2
            mass, _ = mass_above(logits, at, peak, middle.to(tl.float32, bitcast=True), V, BV)
            is_within = mass <= limit
            low, high = tl.where(is_within, low, middle + 1), tl.where(is_within, middle, high)
        edge = high.to(tl.float32, bitcast=True)
        mass, _ = mass_above(logits, at, peak, edge, V, BV)
        heavier += mass
    least = tl.load(min_p)
    best = tl.full((1,), -float("inf"), tl.float32)
    choice = tl.full((1,), 0, tl.int32)
    chosen_logit = tl.zeros((1,), tl.float32)
    num_equal = tl.zeros((1,), tl.int32)
    slot = tl.zeros((1,), tl.int32) + row
    for begin in range(0, V, BV):
        v = begin + tl.arange(0, BV)
        logit = tl.load(logits + at + v, mask=v < V, other=-float("inf"))
        weight = tl.exp(logit - peak)
        is_kept = (weight > 0) & (weight >= floor) & (weight >= least)
        if share < 1.0:
            # Among equal weights the lower ids come first.
            is_edge = is_kept & (weight == edge)
            rank = num_equal + tl.cumsum(is_edge.to(tl.int32), 0) - 1
            before = heavier + rank.to(tl.float64) * edge.to(tl.float64)
            is_kept = is_kept & ((weight > edge) | (is_edge & (before <= limit)))
            num_equal += tl.sum(is_edge.to(tl.int32), 0)
        words = tl.reshape(sample_words(tl.load(seed), begin, tl.load(step), tl.load(block_idx), slot, BV, 1), (BV,))
        score = tl.where(is_kept, (logit - peak) + gumbel_of_words(words), -float("inf"))
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, v, LARGEST_ID), 0)
        value = tl.max(tl.where(v == first, logit, -float("inf")), 0)
        is_better = top > best
        choice, chosen_logit = tl.where(is_better, first, choice), tl.where(is_better, value, chosen_logit)
        best = tl.where(is_better, top, best)
    tl.store(token + row + tl.arange(0, 1), choice)
    tl.store(confidence + row + tl.arange(0, 1), tl.exp(chosen_logit - tl.load(log_sum_exp + row)))


@triton.jit
def soft_embedding(
    source, log_sum_exp, table, part, rows, M: tl.constexpr, V: tl.constexpr, D: tl.constexpr, PER: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, IS_LOGITS: tl.constexpr, CDT: tl.constexpr,
):  # fmt: skip
    """part[s, m, d] = sum over the s-th PER ids of p[m, v] table[v, d]; p of logits is exp(logit - log_sum_exp).

    Grid: tiles of D, tiles of rows, S.
    """
    num_rows = tl.load(rows)
    if tl.program_id(1) * BM >= num_rows:
        return
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    is_row = m < num_rows
    norm = tl.load(log_sum_exp + m, mask=is_row, other=0.0)
    acc = tl.zeros((BD, BM), tl.float32)
    for begin in range(0, PER, BV):
        v = split * PER + begin + tl.arange(0, BV)
        empty = -float("inf") if IS_LOGITS else 0.0
        p = tl.load(
            source + m[None, :].to(tl.int64) * V + v[:, None], mask=is_row[None, :] & (v[:, None] < V), other=empty
        )
        if IS_LOGITS:
            p = tl.exp(p - norm[None, :])
        values = tl.load(
            table + v[None, :].to(tl.int64) * D + d[:, None], mask=(v[None, :] < V) & (d[:, None] < D), other=0.0
        )
        acc = tl.dot(values.to(CDT), p.to(CDT), acc, input_precision="ieee")
    at = split.to(tl.int64) * M * D + m[None, :] * D + d[:, None]
    tl.store(part + at, acc, mask=(d[:, None] < D) & is_row[None, :])
