"""Any bytes as a BackwardRequest: a problem that is right in itself, or an InvalidRequest that names its field."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["dqkv"]):
    from dqkv import codec, errors
    from dqkv.location import Inline, InRegion
    from dqkv.v1 import gradient_pb2 as pb

from google.protobuf.message import DecodeError

from fuzz import mutation


def decode(raw: bytes) -> None:
    try:
        message = pb.BackwardRequest.FromString(raw)
    except DecodeError:
        return
    try:
        problem = codec.decode_problem(message.problem)
        outputs = codec.decode_outputs(message.problem, problem)
    except (errors.InvalidRequest, errors.RegionBounds) as refused:
        if not refused.field:
            raise AssertionError("a refusal names its field") from refused
        return
    for tensor in problem.tensors.values():
        if isinstance(tensor.data, Inline):
            assert tensor.data.view.nbytes == tensor.nbytes
        if isinstance(tensor.data, InRegion):
            assert tensor.data.byte_offset >= 0
    assert set(outputs) <= set(problem.gradients)
    assert set(codec.roles(message.problem)) == set(problem.tensors)
    for starts, lengths, rows in (
        (problem.rows.q_start, problem.rows.q_len, problem.shape.rows_q),
        (problem.rows.k_start, problem.rows.k_len, problem.shape.rows_k),
    ):
        assert (starts >= 0).all()
        assert (lengths >= 0).all()
        assert (starts + lengths <= rows).all()
    again = codec.decode_problem(codec.encode_problem(problem, outputs))
    assert again.options == problem.options
    assert (again.queries, again.keys) == (problem.queries, problem.keys)


def mutate(raw: bytes, max_size: int, seed: int) -> bytes:
    """Fields changed where the bytes are a message, bytes changed otherwise and sometimes."""
    rng = random.Random(seed)
    try:
        message = pb.BackwardRequest.FromString(raw)
    except DecodeError:
        return atheris.Mutate(raw, max_size)
    if rng.random() < 0.2:
        return atheris.Mutate(raw, max_size)
    mutation.change(message.problem, rng)
    return message.SerializeToString()[:max_size]


def main() -> None:
    atheris.Setup(sys.argv, decode, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
