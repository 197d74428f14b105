"""The Triton kernel of `triton_kernel`; imported where there is Triton only.

One program attends for up to BLOCK_Q queries of one sequence and one key head. Each query has a row
for each of the G query heads that share the key head: BLOCK_M rows, of which the last may be idle.
It goes through the context in tiles of BLOCK_N keys, found by the block table, with an online
softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Tiles begin at multiples of BLOCK_N
wherever a row stands, and rows do not mix: so a token's result is the same in any batch, bit for
bit.

The blocks of sequence i begin at program query_starts[i] // BLOCK_Q + i, which is at or behind the
end of those before it. So N // BLOCK_Q + num_sequences programs are enough, however the N queries
are spread, and each finds its sequence by bisection.

Queries are [N, H, D], keys [num_slots, K, D], values [num_slots, K, D_value], sinks [H]; all but
the queries are contiguous. SOFTCAP is 0 where there is none.
"""

import triton
import triton.language as tl


# what differs from step to step would have the kernel compiled anew
@triton.jit(
    do_not_specialize=[
        "num_sequences", "window", "query_stride", "query_head_stride", "table_stride"
    ]
)  # fmt: skip
def paged_attention(
    query,
    keys,
    values,
    output,
    sinks,
    query_starts,
    context_lens,
    block_table,
    num_sequences,
    scale,
    window,
    query_stride,
    query_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Attention of the rows of one program; see the module."""
    kv_head = tl.program_id(1)
    sequence = _find_sequence(query_starts, num_sequences, BLOCK_Q)
    first_query = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_query
    first_of_block = (tl.program_id(0) - first_query // BLOCK_Q - sequence) * BLOCK_Q
    if first_of_block >= num_queries:
        return
    rows = tl.arange(0, BLOCK_M)
    queries_of_rows = first_of_block + rows // G
    is_row = (rows < BLOCK_Q * G) & (queries_of_rows < num_queries)
    heads = kv_head * G + rows % G
    tokens = (first_query + queries_of_rows).to(tl.int64)
    positions = tl.load(context_lens + sequence) - num_queries + queries_of_rows
    queries = _load(
        query + tokens * query_stride + heads * query_head_stride, is_row, KEY_DIM, BLOCK_KEY
    )
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        total = total + 1.0
    means = _attend(
        queries, is_row, positions, highest, total, block_table + sequence * table_stride,
        keys + kv_head * KEY_DIM, values + kv_head * VALUE_DIM, scale, window,
        NUM_KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE, SOFTCAP,
        BLOCK_N, BLOCK_KEY, BLOCK_VALUE,
    )  # fmt: skip
    rows_of_output = output + (tokens * NUM_KV_HEADS * G + heads) * VALUE_DIM
    _store(rows_of_output, means, is_row, VALUE_DIM, BLOCK_VALUE)


@triton.jit
def _find_sequence(query_starts, num_sequences, BLOCK_Q: tl.constexpr):
    """The last sequence whose blocks begin at this program or before it."""
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(query_starts + middle) // BLOCK_Q + middle
        low = tl.where(begin <= tl.program_id(0), middle, low)
        high = tl.where(begin <= tl.program_id(0), high, middle)
    return low


@triton.jit
def _attend(
    queries,
    is_row,
    positions,
    highest,
    total,
    table_row,
    keys,
    values,
    scale,
    window,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """The mean of the values by each row's weights.  # [BLOCK_M, BLOCK_VALUE] fp32

    `highest` and `total` are those of a softmax that has begun.
    """
    weighted = tl.zeros([queries.shape[0], BLOCK_VALUE], tl.float32)
    end = tl.max(tl.where(is_row, positions, -1), axis=0) + 1
    first_seen = tl.min(tl.where(is_row, positions, end), axis=0) - window + 1
    begin = tl.maximum(first_seen, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, end, BLOCK_N):
        seats = start + tl.arange(0, BLOCK_N)
        blocks = tl.load(table_row + seats // BLOCK_SIZE, mask=seats < end, other=0)
        slots = (blocks.to(tl.int64) * BLOCK_SIZE + seats % BLOCK_SIZE) * NUM_KV_HEADS
        tile_keys = _load(keys + slots * KEY_DIM, seats < end, KEY_DIM, BLOCK_KEY)
        scores = tl.dot(queries, tl.trans(tile_keys), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0) * SOFTCAP  # tanh
        is_seen = (seats[None, :] < end) & (seats[None, :] <= positions[:, None])
        is_seen = is_seen & (seats[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        tile_values = _load(values + slots * VALUE_DIM, seats < end, VALUE_DIM, BLOCK_VALUE)
        highest, total, weighted = _add_tile(scores, tile_values, highest, total, weighted)
    return weighted / total[:, None]


@triton.jit
def _load(rows, is_row, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The first DIM numbers behind each pointer, and zeros.  # [rows] -> [rows, BLOCK]"""
    columns = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns[None, :] < DIM)
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store(rows, numbers, is_row, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first DIM numbers behind each pointer, in its precision.  # [rows, BLOCK]"""
    columns = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns[None, :] < DIM)
    tl.store(rows[:, None] + columns[None, :], numbers.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _add_tile(scores, tile_values, highest, total, weighted):
    """The running softmax of each row with the scores and values of another tile."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # a row may see nothing of a tile, and nothing yet
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(highest - base)
    product = tl.dot(weights.to(tile_values.dtype), tile_values, input_precision="ieee")
    total = total * shrink + tl.sum(weights, axis=1)
    return new_highest, total, weighted * shrink[:, None] + product
