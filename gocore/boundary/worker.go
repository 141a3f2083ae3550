package boundary

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
)

// Note [The order of background work]
//
// Loads go first: somebody computes towards them. Removals go before moves, and a move does not begin while a removal is
// outstanding: else the files of a moment could pass the cap that the books say is kept.

// startWorkers takes the scratch chunks, so that the pool's demand does not depend on timing, and starts the goroutines.
func (s *Store) startWorkers() error {
	if !s.spec.Async || !s.spec.moves() {
		return nil
	}
	for range s.spec.Workers {
		chunk := memory.Buffer{}
		if s.needsChunk() {
			var err error
			if chunk, err = s.pool.Get(context.Background(), chunkLen); err != nil {
				return err
			}
			s.chunks = append(s.chunks, chunk)
		}
		s.mu.Lock()
		s.stats.Workers++
		s.mu.Unlock()
		s.workers.Go(func() error { return s.work(chunk) })
	}
	return nil
}

func (s *Store) needsChunk() bool { return s.spec.Tier == TierDisk && s.code != asIs }

// enqueue puts e in line. The caller holds s.mu.
func (s *Store) enqueue(e *entry) {
	e.queued = true
	if e.phase == loading {
		s.loads = append(s.loads, e)
	} else {
		s.moves = append(s.moves, e)
	}
	s.wake.Signal()
}

// take marks e's job as under way. The caller holds s.mu.
func (s *Store) take(e *entry) {
	e.queued, e.busy = false, true
	s.running++
	if t := e.transit; e.phase == moving && s.spec.Tier == TierDisk {
		s.fileSeq++
		t.path = filepath.Join(s.scratch.path, fmt.Sprintf("%d-%d.eaeb", e.key, s.fileSeq))
	}
}

// pop takes the first entry off the queue that still waits; nil without one. The caller holds s.mu.
func pop(queue *[]*entry) *entry {
	for len(*queue) > 0 {
		e := (*queue)[0]
		*queue = slices.Delete(*queue, 0, 1)
		if e.queued {
			return e
		}
	}
	return nil
}

// work is a worker's life.
func (s *Store) work(chunk memory.Buffer) error {
	var scratch []byte
	if !chunk.IsZero() {
		scratch = chunk.Bytes()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.stats.Workers-- }()
	for !s.closed {
		e := pop(&s.loads)
		if e == nil && len(s.removals) > 0 {
			s.removeNext()
			continue
		}
		if e == nil && s.removing == 0 {
			e = pop(&s.moves)
		}
		if e == nil {
			s.wake.Wait()
			continue
		}
		s.take(e)
		s.mu.Unlock()
		_ = s.runJob(e, scratch, s.releases) // kept in the entry, for the next Ready or Get
		s.mu.Lock()
	}
	return nil
}

// removeNext removes one file. The caller holds s.mu, which is given up meanwhile.
func (s *Store) removeNext() {
	path := s.removals[0]
	s.removals = slices.Delete(s.removals, 0, 1)
	s.removing++
	s.mu.Unlock()
	err := s.remove(path)
	s.mu.Lock()
	s.removing--
	if err != nil {
		s.late = append(s.late, errs.E(errs.ErrStore, "boundary store: cannot remove %s: %w; remove it by hand", path, err))
	} else {
		s.stats.FilesRemoved++
	}
	s.wake.Broadcast() // moves may have waited for this
	s.idle.Broadcast()
}

func (s *Store) remove(path string) (err error) {
	defer recovered(&err)
	return s.fs.Remove(path)
}

// removeInline removes files on the calling thread where no worker will.
func (s *Store) removeInline() {
	if s.scratch == nil || s.spec.Async {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.removals) > 0 && !s.closed {
		s.removeNext()
	}
}

// runJob does e's move or load, which take has marked, and enters the outcome. Memory that is no longer needed is released
// through queue, or on this thread without one. chunk may be nil.
func (s *Store) runJob(e *entry, chunk []byte, queue *Releases) error {
	for {
		span := s.beginSpan(e)
		err := s.withChunk(chunk, func(chunk []byte) error {
			if e.phase == moving {
				return s.doMove(e, chunk)
			}
			return s.doLoad(e, chunk)
		})
		span.end()
		s.mu.Lock()
		garbage, again := s.finish(e, err)
		err = e.err
		if again && !s.spec.Async {
			s.take(e)
		} else if again {
			s.enqueue(e)
		}
		if garbage != nil && queue != nil {
			// Before anybody who waits for the boundary looks: what it frees is in the queue by then.
			garbage.giveTo(queue)
			garbage = nil
		}
		s.mu.Unlock()
		if garbage != nil {
			garbage.give()
		}
		if !again || s.spec.Async {
			return err
		}
	}
}

func (s *Store) withChunk(chunk []byte, f func([]byte) error) error {
	if chunk != nil || !s.needsChunk() {
		return f(chunk)
	}
	buf, err := s.pool.Get(context.Background(), chunkLen)
	if err != nil {
		return err
	}
	defer giveBack(s.pool, buf)
	return f(buf.Bytes())
}

// finish enters the outcome of e's job. It gives memory to give up after unlocking, and whether a load is to follow. The caller
// holds s.mu.
func (s *Store) finish(e *entry, err error) (garbage *holding, again bool) {
	e.busy = false
	s.running--
	if s.running == 0 {
		s.idle.Broadcast()
	}
	if e.phase == moving {
		garbage = s.finishMove(e, err)
	} else {
		s.finishLoad(e, err)
	}
	if e.gone {
		// finishMove and finishLoad keep at most one holding alive in res besides the garbage.
		e.err = nil
		if rest := s.discard(e); rest != nil {
			if garbage == nil {
				return rest, false
			}
			rest.give() // a pooled buffer: no foreign release is in it
		}
		return garbage, false
	}
	if again = e.wantLoad && e.phase == stored; again {
		e.phase = loading
	}
	e.wantLoad = false
	if !again {
		e.wake()
	}
	return garbage, again
}

func (s *Store) finishMove(e *entry, err error) *holding {
	t := e.transit
	if err != nil {
		s.fail(e, "store", err)
		s.forgetIfLost(t, err)
		t.path = "" // writeFile leaves none behind
		s.freeTier(t)
		s.freeLoad(t)
		e.phase, e.wantLoad, e.transit = resident, false, nil
		s.chargeRes(e, e.res.bytes(e.key))
		return nil
	}
	if s.spec.Tier == TierDisk {
		s.stats.FilesWritten++
		s.stats.BytesWritten += t.tierBytes
	}
	if !e.wantLoad {
		s.free(&t.stage)
	}
	old := e.res
	e.res = nil
	loading := int64(0)
	if t.target != nil {
		loading = t.lay.spanBytes()
	}
	s.chargeRes(e, loading)
	e.phase = stored
	if s.staysReadable(t) {
		h := &holding{buf: t.packed, pool: s.pool}
		h.adopt(t.lay.tensorsAt(h.single[:0], addr(t.packed)))
		t.packed = memory.Buffer{}
		e.res, e.phase, e.inTier = h, resident, true
	}
	return old
}

func (s *Store) finishLoad(e *entry, err error) {
	t := e.transit
	if err != nil {
		s.fail(e, "load", err)
		s.forgetIfLost(t, err)
		s.freeLoad(t)
		s.chargeRes(e, 0)
		e.phase = stored
		return
	}
	if s.spec.Tier == TierDisk {
		s.stats.BytesRead += t.tierBytes
	}
	e.res, t.target = t.target, nil
	s.freeTier(t)
	e.phase, e.transit = resident, nil
}

// fail keeps the failure of e's job for the next caller who asks for e.
func (s *Store) fail(e *entry, doing string, err error) {
	if errors.Is(err, errStopped) && e.gone {
		return
	}
	s.stats.Failures++
	if errors.Is(err, errChecksum) || errors.Is(err, errHeader) || errors.Is(err, errForeign) {
		s.stats.ChecksumFailures++
	}
	e.err, e.told = s.explain(e, doing, err), !s.spec.Async && !e.aside
}

// forgetIfLost leaves the buffers of a copy that never ended out of circulation.
func (s *Store) forgetIfLost(t *transit, err error) {
	var lost *lostError
	if errors.As(err, &lost) {
		t.stage, t.packed, t.target = memory.Buffer{}, memory.Buffer{}, nil
	}
}
