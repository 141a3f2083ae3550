"""eae-runtime: a programmable reverse-mode runtime for PyTorch, with its core in Go.

runtime = EAERuntime(model, optimizer, RuntimeConfig(scheduler="async"))
loss = runtime.train_step(x, lambda output: criterion(output, y))
"""

from __future__ import annotations

from ._autograd_driver import unwrap, wrap
from ._pins import pin
from .adjoint import AdjointState
from .backend import BackendManager
from .blocks import BlockDecomposer, EAEBlock
from .boundary_store import BoundaryStore
from .config import RuntimeConfig
from .errors import EAEError
from .events import Event, EventBus, EventType
from .forward_executor import ForwardExecutor
from .memory import MemoryManager, MemoryPolicy, NullMemoryPolicy, PoolMemoryPolicy
from .parity import verify
from .pipeline import AdjointPipeline, PassManager
from .profiler import Profiler
from .reconstruction import ReconstructionEngine
from .runtime import EAERuntime
from .schedulers import (
    AsyncScheduler,
    BaseScheduler,
    DistributedScheduler,
    PipelineScheduler,
    ReverseContext,
    SequentialScheduler,
    build_scheduler,
)

__version__ = "0.2.0"

__all__ = [
    "AdjointPipeline",
    "AdjointState",
    "AsyncScheduler",
    "BackendManager",
    "BaseScheduler",
    "BlockDecomposer",
    "BoundaryStore",
    "DistributedScheduler",
    "EAEBlock",
    "EAEError",
    "EAERuntime",
    "Event",
    "EventBus",
    "EventType",
    "ForwardExecutor",
    "MemoryManager",
    "MemoryPolicy",
    "NullMemoryPolicy",
    "PassManager",
    "PipelineScheduler",
    "PoolMemoryPolicy",
    "Profiler",
    "ReconstructionEngine",
    "ReverseContext",
    "RuntimeConfig",
    "SequentialScheduler",
    "build_scheduler",
    "pin",
    "unwrap",
    "verify",
    "wrap",
]
