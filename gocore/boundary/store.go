package boundary

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
	"github.com/eae-runtime/eae-runtime/gocore/trace"
)

// Options are the parts that a [Store] works with. Every one may be left out.
type Options struct {
	Allocator memory.Allocator // host buffers; nil is Go's heap
	Pinned    memory.Allocator // page-locked host buffers, used where Spec.Pin asks for them
	Pool      *memory.Pool     // shared with others and not closed by the store; nil makes one on the allocator
	FS        FS               // nil is OSFS
	Mover     Mover            // nil where there is no accelerator
	Releases  *Releases        // nil makes one
	Ledger    *memory.Ledger
}

// Store keeps boundaries: see the package documentation. All methods may be called from any goroutine.
type Store struct {
	spec     Spec
	code     code
	tierKind memory.Kind
	pool     *memory.Pool
	ownPool  bool
	fs       FS
	mover    Mover
	releases *Releases
	ledger   *memory.Ledger
	scratch  *scratch // disk tier
	chunks   []memory.Buffer

	mu        sync.Mutex
	wake      sync.Cond // work for the workers, or Close
	idle      sync.Cond // no job runs
	entries   map[int64]*entry
	devPools  map[tensor.Device]*memory.Pool
	stats     Stats
	capped    int64 // bytes that count against MaxBytes
	fileSeq   int64
	loads     []*entry
	moves     []*entry
	removals  []string
	removing  int // removals under way
	running   int // jobs under way, the callers' own too
	closed    bool
	late      []error // failures that no caller has seen
	closeDone chan struct{}

	trace   atomic.Pointer[trace.Recorder]
	stop    atomic.Bool    // Close has begun: jobs stop at their next chunk
	writing atomic.Int64   // bytes of files being written
	workers errgroup.Group // and the goroutines of Note [Work in slices]
}

// New makes a store. ErrValue if the spec is not valid; ErrStore if the disk tier's folder cannot be made. On the disk tier it
// first removes what crashed processes left there: Note [Whose files].
func New(spec Spec, opt Options) (*Store, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	s := &Store{
		spec: spec, code: codes[spec.Codec], pool: opt.Pool, fs: opt.FS, mover: opt.Mover, releases: opt.Releases, ledger: opt.Ledger,
		entries: map[int64]*entry{}, devPools: map[tensor.Device]*memory.Pool{}, closeDone: make(chan struct{}),
		tierKind: map[Tier]memory.Kind{
			TierDevice: memory.BoundaryDevice, TierHost: memory.BoundaryHost, TierDisk: memory.BoundaryDisk,
		}[spec.Tier],
	}
	s.wake.L, s.idle.L = &s.mu, &s.mu
	if s.fs == nil {
		s.fs = OSFS{}
	}
	if spec.FileDelaySeconds > 0 {
		s.fs = slowFS{s.fs, time.Duration(spec.FileDelaySeconds * float64(time.Second))}
	}
	if s.releases == nil {
		s.releases = &Releases{}
	}
	if s.pool == nil {
		alloc := opt.Allocator
		if spec.Pin && opt.Pinned != nil {
			alloc = opt.Pinned
		}
		pool, err := s.newPool(alloc)
		if err != nil {
			return nil, err
		}
		s.pool, s.ownPool = pool, true
	}
	if spec.Tier == TierDisk {
		dir := spec.Dir
		if dir == "" {
			dir = os.TempDir()
		}
		var err error
		if s.scratch, err = openScratch(s.fs, dir); err != nil {
			return nil, err
		}
	}
	if err := s.startWorkers(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Store) newPool(alloc memory.Allocator) (*memory.Pool, error) {
	keep := 0
	if s.spec.PoolBuffers {
		keep = memory.Unbounded
	}
	return memory.NewPool(memory.PoolOptions{Allocator: alloc, MaxPerKey: keep, Ledger: s.ledger})
}

// Spec gives what the store was made with.
func (s *Store) Spec() Spec { return s.spec }

// Put adopts a boundary of several tensors without a copy; aliasing among them is kept from here on. A boundary already there
// under the key is dropped. ErrStore if the device tier's cap would be passed, ErrBridge for a malformed tensor, ErrClosed after
// Close; the tensors are released then. The store keeps the slice; Shape and Strides must be Go memory that outlives the tensors'
// Release. It does not block.
func (s *Store) Put(key int64, tensors []tensor.Tensor) error {
	e := &entry{key: key}
	e.own.adopt(tensors)
	return s.put(e)
}

// PutOne is Put for a boundary of one tensor.
func (s *Store) PutOne(key int64, t tensor.Tensor) error {
	e := &entry{key: key}
	e.own.adoptOne(t)
	return s.put(e)
}

func (s *Store) put(e *entry) error {
	e.res = &e.own
	bytes, err := occupied(e.key, e.own.tensors)
	if err == nil {
		err = s.insert(e, bytes)
	}
	if err != nil {
		e.own.give()
	}
	return err
}

// insert enters a resident boundary into the books.
func (s *Store) insert(e *entry, bytes int64) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return s.closedError(e.key)
	}
	old := s.entries[e.key]
	if !s.spec.moves() && s.spec.MaxBytes > 0 {
		freed := int64(0)
		if old != nil {
			freed = old.resBytes
		}
		if s.capped-freed+bytes > s.spec.MaxBytes {
			err := s.capError(e.key, bytes, s.capped-freed)
			s.mu.Unlock()
			return err
		}
	}
	var garbage *holding
	if old != nil {
		garbage = s.discard(old)
	}
	s.entries[e.key] = e
	s.chargeRes(e, bytes)
	s.stats.Puts++
	s.mu.Unlock()
	if garbage != nil {
		garbage.give()
	}
	return nil
}

// Copy takes the store's own copy of the tensors at once, in pooled memory, and releases them; otherwise it is Put. On an
// accelerator the copy is queued on the caller's stream order and not waited for; ErrStore without a Mover.
func (s *Store) Copy(key int64, tensors []tensor.Tensor) error {
	e := &entry{key: key}
	lay, err := s.copyIn(e, tensors)
	for i := range tensors {
		tensors[i].Free()
	}
	if err != nil {
		return err
	}
	e.res = &e.own
	if err := s.insert(e, lay.bytes()); err != nil {
		e.own.give()
		return err
	}
	return nil
}

func (s *Store) copyIn(e *entry, tensors []tensor.Tensor) (*layout, error) {
	lay, err := plan(e.key, tensors, asIs)
	if err != nil {
		return nil, err
	}
	if lay.device().Host() {
		if err := s.readable(&e.own, lay, s.pool); err != nil {
			return nil, err
		}
		lay.gather(addr(e.own.buf))
		return lay, nil
	}
	dev := lay.device()
	if err := s.needMover(e.key, dev); err != nil {
		return nil, err
	}
	s.mu.Lock()
	pool, err := s.devicePool(dev)
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := s.readable(&e.own, lay, pool); err != nil {
		return nil, err
	}
	now, err := s.mover.Record(dev)
	if err == nil {
		var end Event
		if end, err = s.mover.Copy(dev, OnDevice, now, lay.copies(addr(e.own.buf))); err == nil {
			err = s.mover.Join(dev, end)
		}
	}
	if err != nil {
		e.own.give()
		return nil, errs.E(errs.ErrStore, "boundary %d: cannot copy on device %v: %w", e.key, dev, err)
	}
	return lay, nil
}

// readable makes h hold a buffer from pool, laid out by lay.
func (s *Store) readable(h *holding, lay *layout, pool *memory.Pool) error {
	h.pool = pool
	if lay.memLen > 0 {
		buf, err := pool.Get(context.Background(), lay.memLen)
		if err != nil {
			return err
		}
		h.buf = buf
	}
	h.adopt(lay.tensorsAt(h.single[:0], addr(h.buf)))
	return nil
}

// Drop gives the boundary up (action D); its memory goes back once nobody else holds it. ErrStoreKey if it is not there. It does
// not wait for a move or load under way; an asynchronous store removes the file in the background.
func (s *Store) Drop(key int64) error {
	s.mu.Lock()
	e, err := s.lookup(key)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	delete(s.entries, key)
	garbage := s.discard(e)
	s.stats.Drops++
	s.mu.Unlock()
	if garbage != nil {
		garbage.give()
	}
	s.removeInline()
	return nil
}

// Clear drops every boundary and drains the releases.
func (s *Store) Clear() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errs.E(errs.ErrClosed, "boundary store: it is closed")
	}
	garbage := s.discardAll()
	s.mu.Unlock()
	for _, h := range garbage {
		h.give()
	}
	s.removeInline()
	s.releases.Drain()
	return nil
}

func (s *Store) discardAll() []*holding {
	var garbage []*holding
	for key, e := range s.entries {
		delete(s.entries, key)
		if h := s.discard(e); h != nil {
			garbage = append(garbage, h)
		}
		s.stats.Drops++
	}
	return garbage
}

// Close drops every boundary, stops jobs at their next chunk, joins all goroutines, removes all files, and drains the releases.
// It returns the failures that no caller has seen, joined. What Get returned stays valid until released. A second Close waits
// for the first and returns nil.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		<-s.closeDone
		return nil
	}
	s.closed = true
	defer close(s.closeDone)
	s.stop.Store(true)
	for _, e := range s.entries {
		s.noteUntold(e)
	}
	garbage := s.discardAll()
	s.wake.Broadcast()
	for s.running > 0 || s.removing > 0 {
		s.idle.Wait()
	}
	for len(s.removals) > 0 {
		s.removeNext()
	}
	s.mu.Unlock()
	for _, h := range garbage {
		h.give()
	}
	workersErr := s.workers.Wait()
	s.releases.Drain()
	for _, chunk := range s.chunks {
		giveBack(s.pool, chunk)
	}
	if s.ownPool {
		s.pool.Close()
	}
	for _, pool := range s.devPools {
		pool.Close()
	}
	var scratchErr error
	if s.scratch != nil {
		if err := s.scratch.close(); err != nil {
			scratchErr = errs.E(errs.ErrStore, "boundary store: cannot remove the folder %s: %w; remove it by hand", s.scratch.path, err)
		}
	}
	return errors.Join(append(s.late, workersErr, scratchErr)...)
}

// Has says whether there is a boundary under the key.
func (s *Store) Has(key int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries[key] != nil
}

// Len is the number of boundaries.
func (s *Store) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.entries)
}

// Keys gives the boundaries' numbers in ascending order.
func (s *Store) Keys() []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := make([]int64, 0, len(s.entries))
	for key := range s.entries {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// Bytes is what all boundaries take up now, on every tier together; one that is moving or loading counts on both sides.
func (s *Store) Bytes() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats.BytesDevice + s.stats.BytesHost + s.stats.BytesDisk
}

// Drain runs the releases that wait, on the calling thread, and gives their number.
func (s *Store) Drain() int { return s.releases.Drain() }
