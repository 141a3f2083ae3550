package api

import (
	"sync"
	"sync/atomic"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// lastHandle is shared by all tables, so that a handle of one kind is never a handle of another.
var lastHandle atomic.Int64

// table maps handles to objects of one kind. Lookups do not wait for one another.
type table[T any] struct {
	noun    string
	objects sync.Map
	count   atomic.Int64
}

// add gives the object a new handle.
func (t *table[T]) add(object T) int64 {
	handle := lastHandle.Add(1)
	t.objects.Store(handle, object)
	t.count.Add(1)
	return handle
}

// get finds the object. ErrClosed for a handle that was closed, ErrBridge for one that never was.
func (t *table[T]) get(handle int64) (T, error) {
	if object, ok := t.objects.Load(handle); ok {
		return object.(T), nil
	}
	var none T
	if handle > 0 && handle <= lastHandle.Load() {
		return none, errs.E(errs.ErrClosed, "the %s is closed", t.noun)
	}
	return none, errs.E(errs.ErrBridge, "there is no %s with the handle %d", t.noun, handle)
}

// remove takes the object out; false when it is not there (any more).
func (t *table[T]) remove(handle int64) (T, bool) {
	object, ok := t.objects.LoadAndDelete(handle)
	if !ok {
		var none T
		return none, false
	}
	t.count.Add(-1)
	return object.(T), true
}

// live is the number of objects.
func (t *table[T]) live() int64 { return t.count.Load() }
