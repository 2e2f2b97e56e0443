"""Any tensors in regions: what is taken lies inside, byte by byte, and no byte that is written is shared."""

from __future__ import annotations

import itertools
import os
import sys

import atheris
import numpy as np

with atheris.instrument_imports(include=["dqkv"]):
    from dqkv import errors
    from dqkv.location import InRegion
    from dqkv.memory import memfd
    from dqkv.memory.regions import Access, RegionLimits, RegionTable
    from dqkv.tensor import DType, Tensor

NBYTES = 1 << 10
ELEMENTS_LIMIT = 1 << 12
EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**61, 2**62 - 1, 2**62, 2**63 - 1, -1, -(2**63)]


def make_table() -> tuple[RegionTable, list[bytes]]:
    """Two regions on one file, of which the second is shorter, and one on a file of its own."""
    block_ids = itertools.count()
    table = RegionTable(
        limits=RegionLimits(regions_per_owner=8),
        block_ids=block_ids,
        on_close=lambda _: None,
        observe=lambda *_: None,
        is_own=lambda *_: False,
    )
    first, second = (memfd.inspect(memfd.create("fuzz", NBYTES)) for _ in range(2))
    again = memfd.inspect(os.dup(first.fd))
    handles = [
        table.register("me", memory, nbytes=nbytes, access=Access.READ_WRITE, label="", lease_s=3600.0).handle
        for memory, nbytes in ((first, NBYTES), (again, NBYTES // 2), (second, NBYTES))
    ]
    return table, handles


class Target:
    """The table and what it must not do."""

    def __init__(self) -> None:
        self._table, self._handles = make_table()
        self._files = (0, 0, 1)
        self._limits = (NBYTES, NBYTES // 2, NBYTES)

    def use(self, raw: bytes) -> None:
        data = atheris.FuzzedDataProvider(raw)
        try:
            reads = {f"r{index}": self._tensor(data) for index in range(data.ConsumeIntInRange(0, 2))}
            writes = {f"w{index}": self._tensor(data) for index in range(data.ConsumeIntInRange(0, 2))}
            use = self._table.use("me", reads=reads, writes=writes)
        except errors.InvalidRequest:
            return
        except (errors.RegionBounds, errors.RegionUnknown):
            return
        with use:
            touched = {role: self._bytes(tensor) for role, tensor in {**reads, **writes}.items()}
            for role, tensor in writes.items():
                file, indices = touched[role]
                assert len(np.unique(indices)) == len(indices), (role, tensor)
                for other, (other_file, other_indices) in touched.items():
                    if other != role and other_file == file:
                        assert not np.intersect1d(indices, other_indices).size, (tensor, other)

    def _tensor(self, data: atheris.FuzzedDataProvider) -> Tensor[InRegion]:
        rank = data.ConsumeIntInRange(0, 4)
        # As the codec gives them: any integers that 64 bits hold.
        shape = tuple(self._size(data, 6) for _ in range(rank))
        strides = tuple(self._size(data, 40) for _ in range(rank))
        dtype = data.PickValueInList(list(DType))
        handle = self._handles[data.ConsumeIntInRange(0, 2)] if data.ConsumeBool() else self._handles[0]
        return Tensor(dtype=dtype, shape=shape, strides=strides, data=InRegion(handle, self._size(data, NBYTES)))

    def _size(self, data: atheris.FuzzedDataProvider, usual: int) -> int:
        if data.ConsumeIntInRange(0, 15) == 0:
            return int(data.PickValueInList(EXTREMES))
        return int(data.ConsumeIntInRange(0, usual))

    def _bytes(self, tensor: Tensor[InRegion]) -> tuple[int, np.ndarray]:
        """Every byte that the tensor's indices reach, counted the slow way; asserts that they lie in the region."""
        index = self._handles.index(tensor.data.handle)
        if 0 in tensor.shape:
            return self._files[index], np.empty(0, dtype=np.int64)
        assert np.prod([float(size) for size in tensor.shape]) * tensor.dtype.itemsize < 2**62
        # A tensor of many elements inside a small region repeats them: two of each repeated dimension say the same.
        shape = [
            min(size, 2) if not stride else size for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        ]
        assert np.prod(shape) <= ELEMENTS_LIMIT, tensor
        places = np.zeros(1, dtype=np.int64)
        for size, stride in zip(shape, tensor.strides, strict=True):
            places = (places[:, None] + np.arange(size) * stride).reshape(-1)
        start = tensor.data.byte_offset + places * tensor.dtype.itemsize
        reached = (start[:, None] + np.arange(tensor.dtype.itemsize)).reshape(-1)
        assert reached.min() >= 0, tensor
        assert reached.max() < self._limits[index], tensor
        return self._files[index], reached


def main() -> None:
    target = Target()
    atheris.Setup(sys.argv, target.use)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
