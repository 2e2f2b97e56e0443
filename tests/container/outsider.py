"""A client of another user outside the container: `python -m container.outsider HOST:PORT UID KIND`.

Sends every problem with a known answer through a region of that kind, and prints how many were right.
"""

from __future__ import annotations

import os
import sys

import dqkv
from dqkv import oracle
from dqkv.client.segment import aligned
from dqkv.trials import TRIALS, Trial, draw


def main() -> None:
    address, uid, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # All code is loaded by its first use: where it lies may be closed to the other user.
    with dqkv.Client(address) as client:
        _ask(client, TRIALS[0], "memfd")
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    with dqkv.Client(address) as client:
        wrong = {trial.name: found for trial in TRIALS if (found := _ask(client, trial, kind))}
    if wrong:
        sys.exit(f"wrong: {wrong}")
    print(f"{len(TRIALS)} right as user {os.getuid()}")


def _ask(client: dqkv.Client, trial: Trial, kind: str) -> list[str]:
    """What is wrong with an answer that was written to a region."""
    drawn = draw(trial)
    problem = drawn.problem
    tensors = [*problem.tensors.values(), *problem.gradients.values()]
    with client.region(sum(aligned(tensor.nbytes) for tensor in tensors), kind=kind) as region:
        inputs = {}
        for role, tensor in problem.tensors.items():
            view = region.tensor(tensor.shape, tensor.dtype)
            view[...] = tensor.data
            inputs[role] = tensor.with_data(view)
        outputs = {role: region.tensor(wanted.shape, wanted.dtype) for role, wanted in problem.gradients.items()}
        client.submit(problem.with_tensors(inputs), outputs)
        return oracle.complaints(drawn.expected, {role: outputs[role] for role in drawn.expected.gradients})


if __name__ == "__main__":
    main()
