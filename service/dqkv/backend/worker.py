"""The process of one device (`python -m dqkv.backend.worker`): one thread reads the socket, one makes all device calls.

It ends when the front asks for it and when the front's end of the socket closes, whatever it is doing then.
"""

from __future__ import annotations

import argparse
import errno
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from dqkv import errors
from dqkv.backend import messages
from dqkv.backend.base import Backend, DeviceBroken, Task
from dqkv.backend.driver import warm_up

EXIT_FRONT_GONE = 3
EXIT_REFUSED = 4
EXIT_PROTOCOL = 5
EXIT_BROKEN = 6

_READ_NBYTES = 1 << 20
_FDS_LIMIT = 16
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "can't start new thread",
)
"""How torch's allocators and Python's threads say it, in lower case, with a plain RuntimeError."""


def main() -> None:
    """Serve one device until the front says stop or goes away."""
    arguments = _parse()
    # Both signals reach a whole terminal or control group; the front decides when this process ends, after its drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_limit, files_limit))  # two for each block
    with socket.socket(fileno=arguments.socket_fd) as front:
        inbox = Inbox(front)
        threading.Thread(target=inbox.read_forever, name="front", daemon=True).start()
        try:
            if arguments.address_space_nbytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (arguments.address_space_nbytes,) * 2)
            backend = load_backend(
                arguments.device,
                num_threads=arguments.num_threads,
                kernels=arguments.kernels,
                builds=arguments.build_kernels,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the operator has to read it
            traceback.print_exc()
            front.sendall(messages.frame(messages.Refused(message=_in_words(error))))
            sys.exit(EXIT_REFUSED)
        front.sendall(messages.frame(messages.Ready(info=backend.info)))
        serve(front, inbox, backend)


@dataclass(frozen=True, slots=True)
class Order:
    """A task to do, and the flag that the reading thread sets when it is cancelled."""

    task: Task
    cancelled: threading.Event


class Inbox:
    """What the front sent: read by one thread, taken by the other, except that a cancellation takes effect at once."""

    def __init__(self, front: socket.socket) -> None:
        self._front = front
        self._orders: queue.SimpleQueue[messages.AddBlock | messages.DropBlock | Order | messages.Stop]
        self._orders = queue.SimpleQueue()
        self._cancellations: dict[int, threading.Event] = {}

    def take(self) -> messages.AddBlock | messages.DropBlock | Order | messages.Stop:
        """The next thing to do, in the order sent; waits for it."""
        return self._orders.get()

    def forget(self, task_id: int) -> None:
        """The task is over: a cancellation that comes late is nothing."""
        self._cancellations.pop(task_id, None)

    def read_forever(self) -> None:
        """Read until the front goes away, then end the process: nobody is left to answer."""
        try:
            self._read()
        except BaseException:  # noqa: BLE001 - a deaf process would hold the device for ever
            traceback.print_exc()
            os._exit(EXIT_PROTOCOL)
        os._exit(EXIT_FRONT_GONE)

    def _read(self) -> None:
        frames, files = messages.Frames(), deque[int]()
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(self._front, _READ_NBYTES, _FDS_LIMIT, socket.MSG_CMSG_CLOEXEC)
            except ConnectionError:
                return
            if not data:
                return
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "a block's file did not arrive: too many files are open")
            files.extend(fds)
            for body in frames.feed(data):
                self._accept(messages.decode_to_device(body), files)

    def _accept(self, message: messages.ToDevice, files: deque[int]) -> None:
        match message:
            case messages.AddBlock(block):
                self._orders.put(messages.AddBlock(replace(block, fd=files.popleft())))
            case messages.Run(task):
                cancelled = threading.Event()
                self._cancellations[task.task_id] = cancelled
                self._orders.put(Order(task, cancelled))
            case messages.Cancel(task_id):
                event = self._cancellations.get(task_id)
                if event is not None:
                    event.set()
            case messages.DropBlock() | messages.Stop():
                self._orders.put(message)


def serve(front: socket.socket, inbox: Inbox, backend: Backend) -> None:
    """Do what comes, in order, until Stop; every task is answered once."""
    while True:
        match inbox.take():
            case messages.AddBlock(block):
                backend.add_block(block)
            case messages.DropBlock(block_id):
                backend.drop_block(block_id)
            case Order(task, cancelled):
                try:
                    answer = answer_task(backend, task, cancelled)
                except DeviceBroken as error:
                    traceback.print_exc()
                    front.sendall(messages.frame(messages.Refused(message=str(error))))
                    # Not sys.exit: what is left of the device may wait for ever when it is taken down in order.
                    os._exit(EXIT_BROKEN)
                inbox.forget(task.task_id)
                front.sendall(messages.frame(answer))
            case messages.Stop():
                return


def answer_task(backend: Backend, task: Task, cancelled: threading.Event) -> messages.Done | messages.Failed:
    """Run one task; whatever goes wrong becomes a Failed whose words name nothing of this machine.

    Raises DeviceBroken: the task then fails with the process.
    """
    try:
        if cancelled.is_set():
            raise errors.Cancelled("the request was cancelled before it ran")
        return messages.Done(task_id=task.task_id, report=backend.run(task, cancelled.is_set))
    except errors.DqkvError as error:
        return messages.Failed(
            task_id=task.task_id,
            reason=error.reason,
            message=error.message,
            field=error.field,
            retry_after_s=error.retry_after_s,
        )
    except DeviceBroken:
        raise
    except Exception as error:  # noqa: BLE001 - one request's fault must not end the device
        kind = errors.DeviceOutOfMemory if is_out_of_memory(error) else errors.InternalFault
        said = {
            errors.DeviceOutOfMemory: f"{backend.info.name} ran out of memory while it worked on this request",
            errors.InternalFault: f"{backend.info.name} failed on this request: {type(error).__name__}",
        }
        return messages.Failed(
            task_id=task.task_id,
            reason=kind.reason,
            message=said[kind],
            detail="".join(traceback.format_exception(error)),
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether the machine, the address-space limit or torch's allocator refused memory."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in words for phrase in _OUT_OF_MEMORY)


def load_backend(device: str, *, num_threads: int, kernels: Path | None = None, builds: bool = False) -> Backend:
    """The backend of a device by its name; one for a GPU takes its kernels from a directory, and may build them there.

    Raises OptionInvalid when no backend drives that kind of device, and what the backend raises while it starts.
    """
    kind, _, index = device.partition(":")
    match kind:
        case "cpu":
            from dqkv.backend.cpu import CpuBackend

            return CpuBackend(device, num_threads=num_threads)
        case "cuda" if kernels is not None:
            # The driver starts while torch is imported.
            if index.isdecimal():
                warm_up(int(index))
            from dqkv.backend.cute import CuteBackend

            return CuteBackend(device, kernels=kernels, num_threads=num_threads, builds=builds)
        case "cuda":
            raise errors.OptionInvalid(f"device is {device!r}, which needs a directory of kernels", field="device")
        case _:
            raise errors.OptionInvalid(
                f"device is {device!r}: no backend drives {kind!r}, only 'cpu' and 'cuda'", field="device"
            )


def _in_words(error: Exception) -> str:
    if isinstance(error, errors.DqkvError):
        return error.message
    if is_out_of_memory(error):
        return "there is not enough memory, or its address-space limit is too small, for its process"
    return f"its process failed while it started ({type(error).__name__}); its log says more"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dqkv.backend.worker", description="The process of one device.")
    parser.add_argument("device", help='such as "cpu:0"')
    parser.add_argument("--socket-fd", type=int, required=True, help="its end of the socket to the front")
    parser.add_argument("--num-threads", type=int, required=True, help="threads that compute")
    parser.add_argument("--address-space-nbytes", type=int, help="the most address space it may take (RLIMIT_AS)")
    parser.add_argument("--kernels", type=Path, help="directory of the built kernels, for a GPU")
    parser.add_argument("--build-kernels", action="store_true", help="build there what is missing when it is needed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
