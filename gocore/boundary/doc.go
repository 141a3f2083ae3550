// Package boundary keeps boundaries, the values between blocks, from their forward to their last use.
//
// # Basics
//
// A [Store] holds boundaries by number. [Store.Put] hands one over, [Store.Move] (action S) starts to bring it to the store's
// tier, [Store.Load] (action L) starts to bring it back, [Store.Get] lends it, [Store.Drop] (action D) gives it up:
//
//	Put ──> resident ──Move──> moving ──> stored ──Load──> loading ──> resident
//
// Move and Load return at once in an asynchronous store and surface their failure at the next [Store.Ready] or [Store.Get] of
// that boundary; otherwise they do the work before they return. On the device tier without a codec they do nothing: a boundary
// stays the reference that was put. On the host tier without a codec, for host memory, a moved boundary can be got right away.
//
// # What comes back
//
// Shapes, strides, dtypes, device, aliasing among a boundary's tensors, and addresses modulo 64 are those of what was put. Gaps
// that strides leave inside a tensor's span travel along. The codecs fp16 and bf16 change float32 and float64 values only.
//
// # Caveats
//
// A Store never runs a tensor's Release on a goroutine of its own: those wait in [Releases] until the caller drains them. What
// Get returns may alias what was put and must not be written. Overlap by adjacency is not aliasing: two tensors that only touch
// may come back apart.
//
// # Note [Who owns a boundary]
//
// Memory is held through a count. The store holds one count from Put (or from the end of a load) until Drop, Clear, Close, the
// end of a Move (the moved copy takes over), or a Put under the same key; each tensor that Get returned holds one until its Release. At zero the memory
// goes back: a tensor that was put is released, a pooled buffer returns to its pool. So a Drop never pulls memory from under a
// reader, a tensor that was got outlives the store, and each Release is called exactly once. A boundary that is dropped while a
// worker moves it leaves the store at once; the worker stops at its next chunk and gives everything back.
//
// Put, PutOne and Copy own their tensors from the call on, also when they fail: they release them then.
//
// On the last count's side: a Release runs on the thread that gave up the last count, if that is the caller of a Store method
// or of a got tensor's Release, and through [Releases] if it is a worker.
package boundary
