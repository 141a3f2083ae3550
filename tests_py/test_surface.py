"""The public surface, frozen: names, arguments with order and defaults, fields, event names.

An entry lists the arguments that callers rely on. Ours may have more of them behind these, each with a default.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch

import eae_runtime
from eae_runtime import EventType, RuntimeConfig, errors

TOP_LEVEL = [
    "AdjointPipeline",
    "AdjointState",
    "AsyncScheduler",
    "BackendManager",
    "BaseScheduler",
    "BlockDecomposer",
    "BoundaryStore",
    "DistributedScheduler",
    "EAEBlock",
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
    "RuntimeConfig",
    "SequentialScheduler",
    "build_scheduler",
]

SUBMODULES = {
    "adjoint": ["AdjointState"],
    "backend": ["BackendManager"],
    "blocks": ["BlockDecomposer", "EAEBlock"],
    "boundary_store": ["BoundaryStore"],
    "config": ["RuntimeConfig"],
    "contrib": [
        "CausalSelfAttention",
        "PreNormTransformerBlock",
        "RMSNorm",
        "RotaryPositionalEmbedding",
        "SwiGLU",
        "apply_rotary",
    ],
    "contrib.lm": ["LMHead", "TokenEmbedding", "build_lm", "lm_loss"],
    "contrib.transformer_blocks": ["PreNormTransformerBlock"],
    "events": ["Event", "EventBus", "EventType"],
    "forward_executor": ["ForwardExecutor"],
    "logging_utils": ["attach_structured_logging", "get_logger"],
    "memory": ["MemoryManager", "MemoryPolicy", "NullMemoryPolicy", "PoolMemoryPolicy"],
    "passes": [
        "ClipPass",
        "EAEPass",
        "FP16Pass",
        "FP8Pass",
        "GaussianNoisePass",
        "Int8QuantizationPass",
        "LoggingPass",
        "RegularizationPass",
        "SyntheticGradientPass",
    ],
    "passes.base": ["EAEPass"],
    "passes.clip": ["ClipPass"],
    "passes.logging_pass": ["LoggingPass"],
    "passes.quantize": ["FP16Pass", "FP8Pass", "Int8QuantizationPass"],
    "passes.regularization": ["GaussianNoisePass", "RegularizationPass"],
    "passes.synthetic_gradient": ["SyntheticGradientPass"],
    "pipeline": ["AdjointPipeline", "PassManager"],
    "profiler": ["Profiler"],
    "reconstruction": ["ReconstructionEngine"],
    "runtime": ["EAERuntime"],
    "schedulers": [
        "AsyncScheduler",
        "BaseScheduler",
        "DistributedScheduler",
        "PipelineScheduler",
        "ReverseContext",
        "SequentialScheduler",
        "build_scheduler",
    ],
    "schedulers.async_scheduler": ["AsyncScheduler"],
    "schedulers.base": ["BaseScheduler", "ReverseContext"],
    "schedulers.distributed": ["DistributedScheduler"],
    "schedulers.pipeline_scheduler": ["PipelineScheduler"],
    "schedulers.sequential": ["SequentialScheduler"],
}

# "=..." stands for a default that is made anew for each call.
SIGNATURES = {
    "adjoint.AdjointState": "tensor, layer_id, block='', dtype=None, device=None, metadata=..., history=...",
    "adjoint.AdjointState.norm": "p=2.0",
    "adjoint.AdjointState.statistics": "",
    "adjoint.AdjointState.quantize": "dtype=torch.float16",
    "adjoint.AdjointState.dequantize": "dtype=torch.float32",
    "adjoint.AdjointState.compress": "ratio=0.5",
    "adjoint.AdjointState.to": "device=None, dtype=None",
    "adjoint.AdjointState.clone": "",
    "adjoint.AdjointState.detach": "",
    "adjoint.AdjointState.record": "pass_name",
    "backend.BackendManager": "backend='auto'",
    "backend.BackendManager.device_for": "block=None",
    "backend.BackendManager.autocast": "enabled=False, dtype=None",
    "blocks.BlockDecomposer.from_sequential": "seq",
    "blocks.BlockDecomposer.from_list": "modules",
    "blocks.BlockDecomposer.decompose": "model",
    "boundary_store.BoundaryStore": "offload=False, precision=None, pin_memory=False, *, tier=None, directory=None, "
    "max_bytes=None, is_async=False, workers=2, timeout=60.0",
    "boundary_store.BoundaryStore.put": "idx, tensor",
    "boundary_store.BoundaryStore.get": "idx, device=None, dtype=None",
    "boundary_store.BoundaryStore.clear": "",
    "boundary_store.BoundaryStore.memory_bytes": "",
    "boundary_store.BoundaryStore.stats": "",
    "boundary_store.BoundaryStore.close": "",
    "events.Event": "type, payload=..., timestamp=...",
    "events.EventBus": "",
    "events.EventBus.subscribe": "event_type, callback",
    "events.EventBus.unsubscribe": "event_type, callback",
    "events.EventBus.emit": "event_type, **payload",
    "events.EventBus.wants": "event_type",
    "events.EventBus.start_recording": "",
    "events.EventBus.stop_recording": "",
    "events.EventBus.events_of_type": "event_type",
    "forward_executor.ForwardExecutor": "event_bus=None, compute_dtype=None",
    "forward_executor.ForwardExecutor.run": "blocks, x0, boundary_store",
    "memory.MemoryManager": "policy='pool', event_bus=None",
    "memory.MemoryManager.request": "shape, dtype=torch.float32, device='cpu'",
    "memory.MemoryManager.release": "tensor",
    "memory.MemoryManager.reuse": "tensor",
    "memory.MemoryManager.stats": "",
    "memory.MemoryManager.reset": "",
    "memory.MemoryPolicy.allocate": "shape, dtype, device",
    "memory.MemoryPolicy.free": "tensor",
    "memory.MemoryPolicy.stats": "",
    "memory.MemoryPolicy.reset": "",
    "memory.NullMemoryPolicy": "",
    "memory.PoolMemoryPolicy": "max_pool_per_key=8",
    "pipeline.AdjointPipeline": "passes=None, event_bus=None, profiler=None",
    "pipeline.AdjointPipeline.add_pass": "p",
    "pipeline.AdjointPipeline.run": "adjoint, context=None",
    "pipeline.AdjointPipeline.__call__": "adjoint, context=None",
    "profiler.Profiler": "enabled=True",
    "profiler.Profiler.record": "name, elapsed_seconds",
    "profiler.Profiler.track": "name",
    "profiler.Profiler.report": "",
    "profiler.Profiler.reset": "",
    "reconstruction.ReconstructionEngine": "event_bus=None, compute_dtype=None",
    "reconstruction.ReconstructionEngine.reconstruct": "block, input_activation, adjoint, block_name=''",
    "runtime.EAERuntime": "model, optimizer=None, config=None",
    "runtime.EAERuntime.forward": "x",
    "runtime.EAERuntime.backward": "output, loss_fn",
    "runtime.EAERuntime.apply_gradients": "param_grads",
    "runtime.EAERuntime.zero_grad": "",
    "runtime.EAERuntime.train_step": "x, loss_fn, targets=None, loss_reduction='mean'",
    "runtime.EAERuntime.compute_gradients": "x, loss_fn",
    "runtime.EAERuntime.parameters": "",
    "runtime.EAERuntime.trace": "path",
    "runtime.EAERuntime.release_foreign": "",
    "runtime.EAERuntime.any_rank": "flag",
    "runtime.EAERuntime.close": "",
    "passes.EAEPass": "",
    "passes.EAEPass.process": "adjoint, context=None",
    "passes.EAEPass.__call__": "adjoint, context=None",
    "passes.ClipPass": "max_norm=1.0",
    "passes.ClipPass.process": "adjoint, context=None",
    "passes.FP16Pass": "",
    "passes.Int8QuantizationPass": "",
    "passes.FP8Pass": "format='e4m3'",
    "passes.RegularizationPass": "strength=0.0",
    "passes.GaussianNoisePass": "std=0.0, generator=None, seed=None",
    "passes.LoggingPass": "event_bus=None",
    "passes.SyntheticGradientPass": "feature_dim, hidden_dim=64, lr=0.001, warmup_steps=0, use_synthetic=False, "
    "device=None",
    "passes.SyntheticGradientPass.process": "adjoint, context=None",
    "schedulers.BaseScheduler": "",
    "schedulers.BaseScheduler.run": "context",
    "schedulers.BaseScheduler._accumulate": "target, updates",
    "schedulers.BaseScheduler._reconstruct_one": "context, i, adjoint",
    "schedulers.SequentialScheduler": "",
    "schedulers.AsyncScheduler": "max_workers=2",
    "schedulers.PipelineScheduler": "num_microbatches=1",
    "schedulers.DistributedScheduler": "block_ranks=None, shared=()",
    "schedulers.ReverseContext": "blocks, block_names, boundary_store, reconstruction_engine, pipeline, "
    "memory_manager, event_bus, profiler, initial_adjoint",
    "schedulers.build_scheduler": "spec, **kwargs",
    "contrib.RMSNorm": "dim, eps=1e-06",
    "contrib.RotaryPositionalEmbedding": "head_dim, max_seq_len=4096, base=10000.0",
    "contrib.SwiGLU": "dim, hidden_dim=None, multiple_of=256",
    "contrib.CausalSelfAttention": "dim, num_heads, num_kv_heads=None, max_seq_len=4096, dropout=0.0, rope=True",
    "contrib.PreNormTransformerBlock": "dim, num_heads, num_kv_heads=None, max_seq_len=4096, ffn_hidden_dim=None, "
    "dropout=0.0, norm_eps=1e-06",
    "contrib.apply_rotary": "x, cos, sin",
    "contrib.lm.build_lm": "vocab, dim, depth, heads, kv_heads=None, hidden=None, *, max_seq_len=1024, dropout=0.0, "
    "norm_eps=1e-06, tied=True, init_std=0.02",
}

CONFIG = [
    ("scheduler", "sequential"),
    ("memory", "pool"),
    ("backend", "auto"),
    ("passes", []),
    ("compute_dtype", None),
    ("boundary_offload", False),
    ("boundary_precision", None),
    ("pin_memory", False),
    ("num_microbatches", 1),
    ("grad_clip_norm", None),
    ("seed", None),
    ("enable_profiler", True),
    ("log_level", "WARNING"),
    ("boundary_tier", None),
    ("disk_dir", None),
    ("disk_max_bytes", None),
    ("prefetch", 2),
    ("timeout", 60.0),
    ("block_ranks", None),
    ("random_streams", None),
    ("trace", False),
    ("verify_rebuild", "sample"),
    ("loss_scaler", None),
]

EVENTS = [
    "ForwardStarted",
    "ForwardFinished",
    "BlockReconstructed",
    "AdjointCreated",
    "AdjointModified",
    "MemoryAllocated",
    "MemoryReleased",
    "SchedulerStep",
    "KernelLaunch",
    "CommunicationStart",
    "CommunicationFinish",
    "TrainStepStarted",
    "TrainStepFinished",
    "PassApplied",
]

ERRORS = {
    "BlockError": RuntimeError,
    "EAEError": Exception,
    "BridgeError": RuntimeError,
    "ClosedError": RuntimeError,
    "ConfigError": ValueError,
    "DistributedError": RuntimeError,
    "LossError": RuntimeError,
    "PassError": RuntimeError,
    "PlanError": ValueError,
    "RebuildMismatchError": RuntimeError,
    "ScheduleError": ValueError,
    "StoreError": OSError,
    "StoreKeyError": KeyError,
    "StoreTimeoutError": TimeoutError,
    "TensorTypeError": TypeError,
    "UpdateError": RuntimeError,
}


def find(path: str) -> Any:
    """The object at `module.name.name` below the package."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module("eae_runtime." + ".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise LookupError(path)


def written(parameter: inspect.Parameter) -> str:
    """A parameter as the table writes it."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.default is parameter.empty:
        return stars + parameter.name
    made = dataclasses.MISSING is parameter.default or "factory" in repr(parameter.default)
    return f"{parameter.name}={'...' if made else repr(parameter.default)}"


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_top_level(name: str) -> None:
    assert hasattr(eae_runtime, name) and name in eae_runtime.__all__
    assert isinstance(eae_runtime.__version__, str)


@pytest.mark.parametrize("module", SUBMODULES)
def test_submodules(module: str) -> None:
    found = importlib.import_module("eae_runtime." + module)
    assert [name for name in SUBMODULES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    parameters = [p for p in inspect.signature(find(path)).parameters.values() if p.name != "self"]
    wanted = [part for part in SIGNATURES[path].split(", ") if part]
    if "*" in wanted:
        mark = wanted.index("*")
        keyword_only = {part.split("=")[0] for part in wanted[mark + 1 :]}
        kinds = {p.name: p.kind for p in parameters}
        assert all(kinds[name] is inspect.Parameter.KEYWORD_ONLY for name in keyword_only)
        wanted.remove("*")
    shown = [written(p) for p in parameters]
    assert shown[: len(wanted)] == wanted
    more = parameters[len(wanted) :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    assert all(p.default is not p.empty or p.kind in variadic for p in more)


def test_config_fields() -> None:
    fields = dataclasses.fields(RuntimeConfig)
    assert [field.name for field in fields] == [name for name, _ in CONFIG]
    config = RuntimeConfig()
    assert [(field.name, getattr(config, field.name)) for field in fields] == CONFIG


def test_event_names() -> None:
    assert sorted(value for key, value in vars(EventType).items() if key.isupper()) == sorted(EVENTS)
    constants = ["".join(f"_{c}" if c.isupper() else c.upper() for c in name)[1:] for name in EVENTS]
    assert [getattr(EventType, constant) for constant in constants] == EVENTS


def test_errors_are_the_builtins_that_a_caller_expects() -> None:
    assert sorted(errors.__all__) == sorted(ERRORS)
    for name, builtin in ERRORS.items():
        made = getattr(errors, name)
        assert issubclass(made, errors.EAEError) and issubclass(made, builtin)


def test_runtime_attributes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with eae_runtime.EAERuntime(model) as runtime:
        for name in [
            "config",
            "optimizer",
            "blocks",
            "block_names",
            "event_bus",
            "profiler",
            "backend_manager",
            "memory_manager",
            "boundary_store",
            "forward_executor",
            "reconstruction_engine",
            "pipeline",
            "scheduler",
            "last_loss",
            "last_grad_stats",
        ]:
            assert hasattr(runtime, name), name
        assert runtime.block_names == ["Linear_0", "ReLU_1"]
        assert runtime.last_loss is None


def test_contrib_is_not_imported_by_the_package() -> None:
    assert "contrib" not in eae_runtime.__all__


def test_alias() -> None:
    assert eae_runtime.PassManager is eae_runtime.AdjointPipeline
