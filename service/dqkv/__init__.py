"""The exact gradients of attention, from a server: dQ, dK and dV.

Each name is imported when it is first used: the client works with numpy alone, `attention` needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dqkv import errors
    from dqkv.client.autograd import attention
    from dqkv.client.capabilities import Capabilities, Estimate, Health
    from dqkv.client.client import AsyncClient, Client
    from dqkv.client.endpoint import Tls
    from dqkv.client.regions import AsyncRegion, Region
    from dqkv.client.retry import Retry
    from dqkv.problem import Arch, Gradients, Lengths, LseScope, Options, Problem, Report, Window
    from dqkv.tensor import DType, Tensor

_HOMES = {
    "dqkv.client.autograd": ("attention",),
    "dqkv.client.capabilities": ("Capabilities", "Estimate", "Health"),
    "dqkv.client.client": ("AsyncClient", "Client"),
    "dqkv.client.endpoint": ("Tls",),
    "dqkv.client.regions": ("AsyncRegion", "Region"),
    "dqkv.client.retry": ("Retry",),
    "dqkv.problem": ("Arch", "Gradients", "Lengths", "LseScope", "Options", "Problem", "Report", "Window"),
    "dqkv.tensor": ("DType", "Tensor"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Arch",
    "AsyncClient",
    "AsyncRegion",
    "Capabilities",
    "Client",
    "DType",
    "Estimate",
    "Gradients",
    "Health",
    "Lengths",
    "LseScope",
    "Options",
    "Problem",
    "Region",
    "Report",
    "Retry",
    "Tensor",
    "Tls",
    "Window",
    "attention",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("dqkv.errors")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        says = f"dqkv.{name} needs torch: pip install 'dqkv[client-torch]'"
        raise ModuleNotFoundError(says, name="torch") from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
