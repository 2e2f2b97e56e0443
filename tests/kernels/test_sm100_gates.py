"""The main loops for tensor memory hold the instructions that their tables say, as PTX and as machine code."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from assembly import DIRECTORY, disassemble
from sm100.answer import program_of

from dqkv_kernels.build import default_set
from dqkv_kernels.device.sm100.program import DRAIN_COLUMNS, Act, Role, Signal
from dqkv_kernels.key import Kernel
from dqkv_kernels.tiles import tile_for

KEYS = [key for key in default_set(100, "sm_100a") if key.kernel is Kernel.MAIN_LOOP]
DISASSEMBLED = [key for key in KEYS if key.dtype == key.grad_dtype == "bf16"]
COLUMNS_A_LOAD = 32
HALVES = 2
BLOCK_COLUMNS = 64
pytestmark = pytest.mark.timeout(1500)


def expected(key):
    """How often each instruction stands in a main loop, by its program's tables."""
    program = program_of(tile_for(key.arch, key.target, key.head_dim, key.head_dim_v))
    steps = [*program.first[Role.MULTIPLY], *program.each[Role.MULTIPLY]]
    # what concerns the next step stands before the loop, too
    steps += [step for step in program.each[Role.MULTIPLY] if step.at > 0]
    acts = [step.name for step in steps if isinstance(step, Act)]
    chunks = program.slot("s").parts[0][1] // HALVES // COLUMNS_A_LOAD
    drained = program.head_dim // DRAIN_COLUMNS
    if program.lanes == "keys":
        written = (program.head_dim + program.head_dim_v) // COLUMNS_A_LOAD
    else:
        # each half of the warps takes 32 of the 64 keys of every part
        written = sum(len(program.slot(name).parts) for name in ("dk", "dv"))
    loaded = sum(program.operand(name).columns // BLOCK_COLUMNS for name in ("k", "v", "q", "dout"))
    return {
        "mma": sum(product.instructions for act in acts for product in program.products_of(act)),
        "commit": sum(isinstance(step, Signal) for step in steps),
        "load": 2 * chunks + drained + written,
        "store": 0 if program.operand("p").in_shared_memory else chunks,
        "tensor copy": loaded,
        "bulk add": drained,
        "allocation": 1,
        "release": 1,
    }


PTX = {
    "mma": r"tcgen05\.mma\.cta_group::1\.kind::f16",
    "commit": r"tcgen05\.commit",
    "load": r"tcgen05\.ld\.sync",
    "store": r"tcgen05\.st\.sync",
    "tensor copy": r"cp\.async\.bulk\.tensor\.4d\.shared",
    "bulk add": r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32",
    "allocation": r"tcgen05\.alloc",
    "release": r"tcgen05\.dealloc",
}
SASS = {
    "mma": "UTCHMMA",
    "commit": "UTCBAR",
    "load": "LDTM",
    "store": "STTM",
    "tensor copy": "UTMALDG",
    "bulk add": "UBLKRED",
}
LOCAL_MEMORY = ("LDL", "STL")


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_the_ptx_has_what_the_tables_say(built, key):
    assert built[key].error == ""
    ptx = (DIRECTORY / f"{key.name}.ptx").read_text()
    assert {name: len(re.findall(pattern, ptx)) for name, pattern in PTX.items()} == expected(key)
    assert ".local" not in ptx
    assert re.search(r"\.maxntid 512\b|\.reqntid 512\b", ptx)


@pytest.mark.parametrize("key", DISASSEMBLED, ids=lambda key: key.name)
def test_the_machine_code_has_it_too_and_no_local_memory(built, key, tmp_path):
    assert built[key].error == ""
    code = disassemble(DIRECTORY / f"{key.name}.ptx", key.target, tmp_path)
    found = Counter(name.split(".", maxsplit=1)[0] for name in code)
    assert {name: found[opcode] for name, opcode in SASS.items()} == {name: expected(key)[name] for name in SASS}
    assert [opcode for opcode in LOCAL_MEMORY if found[opcode]] == []
