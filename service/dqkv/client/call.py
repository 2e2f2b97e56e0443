"""One backward on its way: which bytes travel and which lie in regions, in a message or a stream, and the answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dqkv import codec, errors, framing
from dqkv.client.arrays import HostArray, dense_bytes, raw_view
from dqkv.client.connection import Connection
from dqkv.framing import Part
from dqkv.location import Inline, InRegion, InStream, Location
from dqkv.problem import Gradients, Problem
from dqkv.tensor import NUMPY_DTYPES, Tensor
from dqkv.v1 import gradient_pb2 as pb


class Call:
    """A problem with its tensors placed, which can be attempted more than once.

    `outputs` is the caller's memory for gradients; what lies in a region is written there by the server, what has
    gaps is received beside and copied. `find` says where in a region an array lies.
    """

    def __init__(
        self,
        problem: Problem[HostArray],
        outputs: Mapping[str, HostArray],
        find: Callable[[HostArray], Tensor[InRegion] | None],
    ) -> None:
        self._problem = problem
        self._request_id = uuid.uuid4().hex
        self._results = {
            role: outputs[role] if role in outputs else np.empty(tensor.shape, NUMPY_DTYPES[tensor.dtype])
            for role, tensor in problem.gradients.items()
        }
        self._references = _found(find, {role: tensor.data for role, tensor in problem.tensors.items()})
        self._outputs = _found(find, outputs)
        self._received = {
            role: array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
            for role, array in self._results.items()
            if role not in self._outputs
        }

    @property
    def writes_region(self) -> bool:
        """Whether the server writes gradients into memory of ours."""
        return bool(self._outputs)

    @property
    def written(self) -> frozenset[bytes]:
        """Handles of the regions that the server writes gradients into."""
        return frozenset(tensor.data.handle for tensor in self._outputs.values())

    async def attempt(self, connection: Connection, deadline: float, *, inline_nbytes: int) -> Gradients[HostArray]:
        """Sends the request and waits for the gradients; streams where either way has more than inline_nbytes.

        Raises the server's typed error, or TransportError.
        """
        await connection.capabilities()
        sent = sum(tensor.nbytes for role, tensor in self._problem.tensors.items() if role not in self._references)
        back = sum(array.nbytes for array in self._received.values())
        send = self._unary if max(sent, back) <= inline_nbytes else self._stream
        report = await send(connection, deadline)
        for role, array in self._received.items():
            if array is not self._results[role]:
                self._results[role][...] = array
        results = self._results
        return Gradients(
            dq=results["dq"],
            dk=results["dk"],
            dv=results["dv"],
            dsink=results.get("dsink"),
            report=codec.decode_report(report),
        )

    async def _unary(self, connection: Connection, deadline: float) -> pb.Report:
        problem = self._placed(lambda array: Inline(dense_bytes(array)))
        request = pb.BackwardRequest(
            problem=codec.encode_problem(problem, self._outputs),
            request_id=self._request_id,
            checksum=codec.inline_checksum(problem.tensors.values()),
        )
        answer = await connection.call(connection.gradients.Backward, request, deadline)
        gradients = self._check(answer.gradients, Inline)
        framing.check_sum(answer, codec.inline_checksum(gradients.values()))
        for role, array in self._received.items():
            match gradients[role].data:
                case Inline(view):
                    dense_bytes(array)[:] = view
        return answer.report

    async def _stream(self, connection: Connection, deadline: float) -> pb.Report:
        problem = self._placed(lambda _: InStream())
        parts = [
            Part(role, raw_view(self._problem.tensors[role].data))
            for role, tensor in problem.tensors.items()
            if isinstance(tensor.data, InStream)
        ]
        header = pb.BackwardStreamRequest.Header(
            problem=codec.encode_problem(problem, self._outputs),
            request_id=self._request_id,
            total_bytes=framing.total_nbytes(parts),
        )
        return await connection.stream(header, parts, self._accept, deadline)

    def _accept(self, header: pb.BackwardStreamResponse.Header) -> Sequence[Part]:
        gradients = self._check(header.gradients, InStream)
        parts = [Part(role, dense_bytes(self._received[role])) for role in gradients if role in self._received]
        if header.total_bytes != framing.total_nbytes(parts):
            raise errors.ByteCountMismatch(
                f"the answer has {header.total_bytes} bytes, its gradients {framing.total_nbytes(parts)}",
                field="total_bytes",
            )
        return parts

    def _placed(self, place: Callable[[HostArray], Location]) -> Problem[Location]:
        tensors: dict[str, Tensor[Location]] = {}
        for role, tensor in self._problem.tensors.items():
            reference = self._references.get(role)
            tensors[role] = tensor.with_data(place(tensor.data)) if reference is None else reference
        return self._problem.with_tensors(tensors)

    def _check(self, messages: Iterable[pb.Tensor], where: type[Location]) -> dict[str, Tensor[Location]]:
        """The answer's gradients, held against those asked for. Raises MessageInvalid."""
        gradients, wanted = codec.decode_gradients(messages), self._problem.gradients
        if set(gradients) != set(wanted):
            raise errors.MessageInvalid(
                f"the answer holds {sorted(gradients)}, asked for were {sorted(wanted)}", field="gradients"
            )
        for role, tensor in gradients.items():
            have, want = (tensor.dtype, tensor.shape), (wanted[role].dtype, wanted[role].shape)
            if have != want or not isinstance(tensor.data, InRegion if role in self._outputs else where):
                raise errors.MessageInvalid(
                    f"the answer's {role} is {have} in {type(tensor.data).__name__}, asked for was {want}", field=role
                )
        return gradients


def _found(
    find: Callable[[HostArray], Tensor[InRegion] | None], arrays: Mapping[str, HostArray]
) -> dict[str, Tensor[InRegion]]:
    found = {role: find(array) for role, array in arrays.items()}
    return {role: tensor for role, tensor in found.items() if tensor is not None}
