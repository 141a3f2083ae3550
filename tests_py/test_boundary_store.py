"""The boundary store's face: what goes in comes out, on every tier."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eae_runtime import _bridge
from eae_runtime.boundary_store import BoundaryStore, boundary_key
from eae_runtime.errors import ClosedError, ConfigError, StoreKeyError, StoreTimeoutError, TensorTypeError
from oracle import nothing_left

TIERS = ["device", "host", "disk"]


@pytest.fixture(params=[(tier, later) for tier in TIERS for later in (False, True)], ids=str)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BoundaryStore]:
    tier, later = request.param
    with BoundaryStore(tier=tier, directory=tmp_path, is_async=later) as made:
        yield made


TENSORS = {
    "float32": torch.randn(3, 5),
    "float64": torch.randn(4, dtype=torch.float64),
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "int64": torch.arange(7),
    "bool": torch.tensor([True, False, True]),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 5).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 5).expand(3, 5),
    "strided": torch.randn(6, 6)[::2, 1::3],
    "offset by one": torch.randn(7)[1:],
    "negative view": torch.randn(3, dtype=torch.complex64).conj().imag,
    "needs a gradient": torch.randn(3, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_bit_and_the_layout_come_back(store: BoundaryStore, name: str) -> None:
    tensor = TENSORS[name]
    store.put(2, tensor)
    back = store.get(2)
    assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert torch.equal(back, tensor.detach().resolve_neg())
    if tensor.numel() and not tensor.is_neg():
        assert back.stride() == tensor.stride()
    assert not back.requires_grad


def test_put_keeps_its_own_copy(store: BoundaryStore) -> None:
    tensor = torch.ones(1000)
    store.put(0, tensor)
    tensor.zero_()
    assert torch.equal(store.get(0), torch.ones(1000))


def test_container_behaviour(store: BoundaryStore) -> None:
    assert len(store) == 0 and 0 not in store
    store.put(0, torch.ones(10))
    store.put(3, torch.ones(5, dtype=torch.float64))
    assert len(store) == 2 and 3 in store and 1 not in store and "x" not in store
    store.put(0, torch.zeros(2))
    assert len(store) == 2 and torch.equal(store.get(0), torch.zeros(2))
    store.clear()
    assert len(store) == 0 and store.memory_bytes() == 0
    with pytest.raises(KeyError):
        store.get(0)


@pytest.mark.parametrize("tier", TIERS)
def test_bytes_are_those_kept(tier: str, tmp_path: Path) -> None:
    for precision, size in ((None, 4), ("fp16", 2), (torch.bfloat16, 2), (torch.float32, 4)):
        with BoundaryStore(precision=precision, tier=tier, directory=tmp_path) as store:
            store.put(0, torch.ones(100))
            store.put(1, torch.ones(10, dtype=torch.int64))
            # A file has a header of its own.
            headers = range(1, 513) if tier == "disk" else range(1)
            assert store.memory_bytes() - (100 * size + 80) in headers, precision


def test_a_missing_boundary_is_a_key_error(store: BoundaryStore) -> None:
    with pytest.raises(StoreKeyError, match="boundary 5") as caught:
        store.get(5)
    assert isinstance(caught.value, KeyError)
    for use in (store.fetch, store.load, store.move):
        with pytest.raises(KeyError):
            use(5)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS)
def test_precision_rounds_and_gives_the_dtype_back(tier: str, precision: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(1000) * 10 ** torch.randint(-8, 6, (1000,))
    with BoundaryStore(precision=precision, tier=tier, directory=tmp_path) as store:
        store.put(0, tensor)
        back = store.get(0)
        assert back.dtype is torch.float32
        assert torch.equal(back, tensor.to(precision).float())
        ids = torch.arange(5000)
        store.put(1, ids)
        assert torch.equal(store.get(1), ids)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float32])
def test_precision_of_double(precision: torch.dtype) -> None:
    tensor = torch.randn(100, dtype=torch.float64)
    with BoundaryStore(precision=precision) as store:
        store.put(0, tensor)
        back = store.get(0)
        assert back.dtype is torch.float64
        assert torch.equal(back, tensor.to(precision).double())


def test_get_in_another_dtype() -> None:
    with BoundaryStore() as store:
        store.put(0, torch.ones(2))
        assert store.get(0, dtype=torch.float64).dtype is torch.float64
        assert store.get(0, device="cpu").device.type == "cpu"


def test_positional_arguments_are_those_of_0_1_1() -> None:
    with BoundaryStore(True, torch.float16, False) as store:
        assert (store.offload, store.precision, store.pin_memory, store.tier) == (True, torch.float16, False, "host")


def test_adopt_copies_nothing_on_the_device() -> None:
    with BoundaryStore() as store:
        tensor = torch.ones(10)
        store.adopt(1, tensor)
        assert store.fetch(1).data_ptr() == tensor.data_ptr()
        store.drop(1)
        assert 1 not in store


def test_the_executors_round(store: BoundaryStore) -> None:
    keys = [boundary_key(i, m) for i in range(3) for m in range(2)]
    assert len(set(keys)) == 6 and boundary_key(3, 0) == 3
    tensors = {key: torch.randn(50) for key in keys}
    for key, tensor in tensors.items():
        store.adopt(key, tensor)
        if store.offload:
            store.move(key)
    for key in reversed(keys):
        if store.offload:
            store.load(key)
        assert torch.equal(store.fetch(key), tensors[key])
        store.drop(key)
    assert len(store) == 0 and store.memory_bytes() == 0


def test_a_boundary_of_several_tensors_keeps_its_aliases(store: BoundaryStore) -> None:
    base = torch.randn(4, 6)
    given = [base, base.t(), base[1:3], torch.arange(3)]
    store.adopt(0, given)
    if store.offload:
        store.move(0)
        store.load(0)
    back = store.fetch_all(0)
    assert [torch.equal(a, b) for a, b in zip(given, back, strict=True)] == [True] * 4
    assert [a.stride() for a in back] == [a.stride() for a in given]
    assert back[0].data_ptr() == back[1].data_ptr()
    assert back[2].data_ptr() == back[0].data_ptr() + 6 * 4


def test_a_fetched_tensor_outlives_drop_and_close(store: BoundaryStore) -> None:
    store.put(0, torch.arange(1000.0))
    back = store.get(0)
    store.drop(0)
    store.close()
    gc.collect()
    assert torch.equal(back, torch.arange(1000.0))


def test_alignment_is_kept_for_kernels(store: BoundaryStore) -> None:
    store.put(0, torch.randn(33))
    assert store.get(0).data_ptr() % 64 == 0


def test_closing_twice_and_using_a_closed_store(store: BoundaryStore) -> None:
    store.put(0, torch.ones(3))
    store.close()
    store.close()
    uses: list[Any] = [
        lambda: store.put(0, torch.ones(1)),
        lambda: store.get(0),
        lambda: len(store),
        lambda: 0 in store,
        lambda: store.adopt(0, torch.ones(1)),
        lambda: store.fetch(0),
        store.clear,
        store.stats,
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def test_disk_files_go_with_the_store(tmp_path: Path) -> None:
    store = BoundaryStore(tier="disk", directory=tmp_path)
    store.put(0, torch.ones(1000))
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    del store
    gc.collect()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_is_left_behind(tier: str, tmp_path: Path) -> None:
    gc.collect()
    before = json.loads(_bridge.live())
    store = BoundaryStore(tier=tier, directory=tmp_path, is_async=True)
    for key in range(5):
        store.put(key, torch.randn(1000))
        store.adopt(10 + key, torch.randn(1000))
    kept = store.get(0)
    store.close()
    del kept
    assert json.loads(_bridge.live()) == before


def test_disk_cap(tmp_path: Path) -> None:
    with BoundaryStore(tier="disk", directory=tmp_path, max_bytes=10_000) as store:
        store.put(0, torch.ones(1000))
        with pytest.raises(OSError, match=r"10[,_ ]?000"):
            store.put(1, torch.ones(3000))
        assert torch.equal(store.get(0), torch.ones(1000))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"tier": "tape"}, "'disk'"), ({"precision": torch.int8}, "fp16"), ({"precision": "x"}, "bf16")],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BoundaryStore(**options)


def test_what_is_no_dense_tensor_is_refused(store: BoundaryStore) -> None:
    for bad in (None, 3.0, torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TensorTypeError):
            store.put(0, bad)  # type: ignore[arg-type]
    assert len(store) == 0


def test_at_most_one_call_a_boundary_action(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = _bridge.core

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(real, name)

    with BoundaryStore() as store:
        monkeypatch.setattr(_bridge, "core", Counted())
        for key in range(3):
            store.adopt(key, torch.full((3,), float(key)))
        assert calls == []
        assert store.fetch(1).tolist() == [1.0] * 3
        for key in range(3):
            store.drop(key)
        monkeypatch.undo()
    # What stays on the device goes over together.
    assert calls == ["api_StorePutAll", "api_StoreGet", *["api_StoreDrop"] * 3]
    calls.clear()
    with BoundaryStore(tier="host") as store:
        monkeypatch.setattr(_bridge, "core", Counted())
        store.adopt(0, torch.ones(3))
        store.move(0)
        store.load(0)
        store.fetch(0)
        store.drop(0)
        monkeypatch.undo()
    assert calls == ["api_StorePut", "api_StoreMove", "api_StoreLoad", "api_StoreGet", "api_StoreDrop"]


def test_boundaries_that_have_not_gone_over_are_not_lost() -> None:
    with nothing_left():
        store = BoundaryStore()
        store.adopt(0, torch.ones(3))
        assert len(store) == 1 and 0 in store and store.memory_bytes() == 12
        store.adopt(1, torch.ones(3))
        store.close()
        with pytest.raises(ClosedError):
            store.adopt(2, torch.ones(3))
        store = BoundaryStore()
        store.adopt(0, torch.ones(3))
        del store


class NeverReady:
    """A core whose tier never answers."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.waits: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def api_StoreWait(self, handle: int, key: int, ms: int) -> bool:
        self.waits.append(ms)
        time.sleep(ms / 1000)
        return False


def test_a_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with BoundaryStore(tier="host", is_async=True, timeout=0.3) as store:
        store.put(0, torch.ones(3))
        core = NeverReady(_bridge.core)
        monkeypatch.setattr(_bridge, "core", core)
        start = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="boundary 0") as caught:
            store.fetch(0)
        assert time.monotonic() - start < 2 and isinstance(caught.value, TimeoutError)
        monkeypatch.undo()
    assert max(core.waits) <= 100


def test_ctrl_c_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    import _thread

    with BoundaryStore(tier="host", is_async=True, timeout=10) as store:
        store.put(0, torch.ones(3))
        monkeypatch.setattr(_bridge, "core", NeverReady(_bridge.core))
        threading.Timer(0.2, _thread.interrupt_main).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            store.fetch(0)
        assert time.monotonic() - start < 1.2
        monkeypatch.undo()


def test_a_forked_child_neither_hangs_nor_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    store = BoundaryStore()
    monkeypatch.setattr(_bridge, "in_child", True)
    with contextlib.suppress(Exception):
        real = _bridge.call
        monkeypatch.setattr(_bridge, "call", lambda name, *args: closed.append(name) or real(name, *args))
    del store
    gc.collect()
    assert closed == []
