package api

import (
	"context"
	"encoding/json"
	"time"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/bridge/offheap"
	"github.com/eae-runtime/eae-runtime/gocore/boundary"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

var stores = table[*boundary.Store]{noun: "boundary store"}

var (
	// releases is shared by all stores: every exported function drains it at its end.
	releases boundary.Releases
	// ledger counts the bytes of all stores.
	ledger memory.Ledger
)

// withStore runs the body on the store of a handle.
func withStore(h int64, body func(*boundary.Store) error) error {
	return guard(func() error {
		store, err := stores.get(h)
		if err != nil {
			return err
		}
		return body(store)
	})
}

// askStore is withStore for a body with a result.
func askStore[T any](h int64, body func(*boundary.Store) (T, error)) (T, error) {
	return value(func() (T, error) {
		store, err := stores.get(h)
		if err != nil {
			var zero T
			return zero, err
		}
		return body(store)
	})
}

// giveStore hands imported tensors to a store: taken over also when the handle is unknown.
func giveStore(h int64, addresses []int64, body func(*boundary.Store, []tensor.Tensor) error) error {
	taken, err := importAll(addresses)
	if err != nil {
		return err
	}
	store, err := stores.get(h)
	if err != nil {
		freeAll(taken)
		return err
	}
	tensors := make([]tensor.Tensor, len(taken))
	for i, t := range taken {
		tensors[i] = *t
	}
	return body(store, tensors)
}

// StoreNew makes a boundary store from the JSON form of boundary.Spec, with its buffers from that pool, which has to be closed after it; 0
// gives it a pool of its own, and so does a spec that asks for page-locked buffers where the process has CUDA.
func StoreNew(spec string, poolHandle int64) (int64, error) {
	return value(func() (int64, error) {
		parsed, err := boundary.ParseSpec(spec)
		if err != nil {
			return 0, err
		}
		pool, err := poolOf(poolHandle)
		if err != nil {
			return 0, err
		}
		options := boundary.Options{Allocator: offheap.Allocator{}, Pool: pool, Releases: &releases, Ledger: &ledger}
		if pinned, found := offheap.NewPinned(); parsed.Pin && found {
			options.Pool, options.Pinned = nil, pinned
		}
		store, err := boundary.New(parsed, options)
		if err != nil {
			return 0, err
		}
		return stores.add(store), nil
	})
}

// StorePut adopts a boundary of one tensor without a copy. The key is the boundary's number plus 2^20 times the microbatch's.
func StorePut(h, key, dl int64) error {
	return guard(func() error {
		t, err := dlpack.Import(dl)
		if err != nil {
			return err
		}
		store, err := stores.get(h)
		if err != nil {
			t.Free()
			return err
		}
		return store.PutOne(key, *t)
	})
}

// StorePutN adopts a boundary of several tensors, comma separated addresses; what they share they will share when they come back.
func StorePutN(h, key int64, dls string) error {
	return guard(func() error {
		addresses, err := parseInts(dls)
		if err != nil {
			return err
		}
		return giveStore(h, addresses, func(store *boundary.Store, tensors []tensor.Tensor) error {
			return store.Put(key, tensors)
		})
	})
}

// StoreCopy is StorePut, but the store takes its own copy at once, also on the device tier.
func StoreCopy(h, key, dl int64) error {
	return guard(func() error {
		return giveStore(h, []int64{dl}, func(store *boundary.Store, tensors []tensor.Tensor) error {
			return store.Copy(key, tensors)
		})
	})
}

// slice bounds how long a call stays away: a host's main thread hears no signal meanwhile.
const slice = 100 * time.Millisecond

// StoreMove is action S: it moves a boundary to the store's tier. It returns within about 100 ms, false if the move goes on: StoreSettle
// waits on. An asynchronous store returns at once, and true.
func StoreMove(h, key int64) (bool, error) {
	return askStore(h, func(store *boundary.Store) (bool, error) { return store.MoveFor(key, slice) })
}

// StoreLoad is action L: it loads a boundary back, and returns as StoreMove does.
func StoreLoad(h, key int64) (bool, error) {
	return askStore(h, func(store *boundary.Store) (bool, error) { return store.LoadFor(key, slice) })
}

// StoreSettle waits up to ms milliseconds for a boundary's move or load and says whether it is done. Its failure comes from here.
func StoreSettle(h, key, ms int64) (bool, error) {
	return askStore(h, func(store *boundary.Store) (bool, error) {
		return store.Settled(key, time.Duration(ms)*time.Millisecond)
	})
}

// StoreWait waits up to ms milliseconds for a boundary, whose load it starts if that has not been done, and says whether it can be got without
// waiting.
func StoreWait(h, key, ms int64) (bool, error) {
	return askStore(h, func(store *boundary.Store) (bool, error) {
		if ready, err := store.Ready(key, 0); ready || err != nil {
			return ready, err
		}
		if err := store.Load(key); err != nil {
			return false, err
		}
		return store.Ready(key, time.Duration(ms)*time.Millisecond)
	})
}

// StoreGet lends a boundary of one tensor: a new tensor on the boundary's memory, which must not be written. It waits for a load
// under way.
func StoreGet(h, key int64) (int64, error) {
	return askStore(h, func(store *boundary.Store) (int64, error) {
		t, err := store.GetOne(context.Background(), key)
		if err != nil {
			return 0, err
		}
		return dlpack.Export(&t)
	})
}

// StoreGetN is StoreGet for a boundary of several tensors: comma separated addresses, in the order in which they were put.
func StoreGetN(h, key int64) (string, error) {
	return askStore(h, func(store *boundary.Store) (string, error) {
		tensors, err := store.Get(context.Background(), key)
		if err != nil {
			return "", err
		}
		lent := make([]*tensor.Tensor, len(tensors))
		for i := range tensors {
			lent[i] = &tensors[i]
		}
		addresses, err := exportAll(lent)
		return formatInts(addresses), err
	})
}

// StoreDrop is action D: it gives a boundary up. Tensors that were got stay valid.
func StoreDrop(h, key int64) error {
	return withStore(h, func(store *boundary.Store) error { return store.Drop(key) })
}

// StoreHas says whether there is a boundary under the key.
func StoreHas(h, key int64) (bool, error) {
	return askStore(h, func(store *boundary.Store) (bool, error) { return store.Has(key), nil })
}

// StoreLen is the number of boundaries.
func StoreLen(h int64) (int64, error) {
	return askStore(h, func(store *boundary.Store) (int64, error) { return int64(store.Len()), nil })
}

// StoreBytes is what all boundaries take up now, on every tier together.
func StoreBytes(h int64) (int64, error) {
	return askStore(h, func(store *boundary.Store) (int64, error) { return store.Bytes(), nil })
}

// StoreKeys gives the keys in ascending order, comma separated.
func StoreKeys(h int64) (string, error) {
	return askStore(h, func(store *boundary.Store) (string, error) { return formatInts(store.Keys()), nil })
}

// StoreStats gives the store's exact counters as JSON (see boundary.Stats).
func StoreStats(h int64) (string, error) {
	return askStore(h, func(store *boundary.Store) (string, error) {
		text, err := json.Marshal(store.Stats())
		return string(text), err
	})
}

// StoreClear drops every boundary.
func StoreClear(h int64) error {
	return withStore(h, func(store *boundary.Store) error { return store.Clear() })
}

// StoreTrace has the store's moves and loads recorded by the trace of that handle; 0 ends it.
func StoreTrace(h, traceHandle int64) error {
	return withStore(h, func(store *boundary.Store) error {
		recorder, err := recorderOf(traceHandle)
		if err == nil {
			store.SetTrace(recorder)
		}
		return err
	})
}

// StoreClose drops every boundary, joins the store's goroutines and removes its files. Tensors that were got stay valid. A second call does
// nothing.
func StoreClose(h int64) error {
	return guard(func() error {
		if store, ok := stores.remove(h); ok {
			return store.Close()
		}
		return nil
	})
}
