// Package memory lends aligned buffers and keeps count of bytes.
//
// # Basics
//
// A [Pool] lends [Buffer] values of exactly the size asked for, rounded up to 64 bytes, and keeps returned ones for the next
// request of that size, so that a training step allocates nothing from the second step on. Where the bytes come from is an
// [Allocator]'s business: [Heap] takes them from Go's heap, the bridge takes them from C. A [Ledger] counts bytes by what they
// are used for; everything that stores bytes reports to one.
//
// # Caveats
//
// A Buffer is a loan. Its memory must not be touched after [Pool.Put], and no collector gives it back: whoever holds it calls
// Put once. A lent buffer has whatever content its last user left there.
package memory
