"""One sequence of a batch: where its rows lie in every tensor, dense or packed, and how many count."""

from cutlass import Int32, Int64

SEQUENCE_COLUMNS = ("batch_q", "row_q", "seqlen_q", "batch_k", "row_k", "seqlen_k", "padded_row", "unused")
"""Columns of the int64 table (batch_size, 8) that every kernel reads.

Element (b, i) of a query-side tensor (batches, rows, heads, width) is row row_q + i of batch batch_q; a packed tensor
is one batch. padded_row is a multiple of tile_m: the sequence's first row in lse_log2, delta and dq_accum.
"""


class Sequence:
    """The row of the table that belongs to one sequence, in registers."""

    def __init__(self, table, batch):
        self.batch_q, self.row_q, self.seqlen_q = table[batch, 0], table[batch, 1], Int32(table[batch, 2])
        self.batch_k, self.row_k, self.seqlen_k = table[batch, 3], table[batch, 4], Int32(table[batch, 5])
        self.padded_row = table[batch, 6]


def query_address(sequence, tensor, head, row):
    """Int64 byte address of element (row, 0) of a head of a tensor on the queries' side."""
    return _address(tensor, sequence.batch_q, sequence.row_q + Int64(row), head)


def key_address(sequence, tensor, head, row):
    """Int64 byte address of element (row, 0) of a head of a tensor on the keys' side."""
    return _address(tensor, sequence.batch_k, sequence.row_k + Int64(row), head)


def padded_index(sequence, rows, head, row):
    """Int64 index of a row of a head in a buffer of `rows` padded rows a head."""
    return Int64(head) * rows + sequence.padded_row + Int64(row)


def _address(tensor, batch, row, head):
    strides = tensor.stride
    index = batch * Int64(strides[0]) + row * Int64(strides[1]) + Int64(head) * Int64(strides[2])
    return tensor.iterator.toint() + index * (tensor.element_type.width // 8)


def row_stride_bytes(tensor):
    """Int64 bytes from one row of a (batches, rows, heads, width) tensor to the next."""
    return Int64(tensor.stride[1]) * (tensor.element_type.width // 8)


def statistic(tensor, sequence, head, row):
    """Pointer to a row's element of a (batches, num_heads_q, rows) tensor."""
    strides = tensor.stride
    index = sequence.batch_q * Int64(strides[0]) + Int64(head) * Int64(strides[1])
    return tensor.iterator + (index + (sequence.row_q + Int64(row)) * Int64(strides[2]))
