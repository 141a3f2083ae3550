package boundary

import (
	"context"
	"time"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Get lends the boundary's tensors; each is to be released once, and none is to be written: Note [Who owns a boundary]. A
// boundary in the tier is loaded first. Get waits for this boundary's move and load only, until ctx is done or, if ctx has no
// deadline, for at most the spec's timeout: ErrTimeout. ErrStoreKey if the boundary is not there; ErrStore if its move or load
// failed, told once: the next Get reads what was put, or loads again; ErrClosed.
func (s *Store) Get(ctx context.Context, key int64) ([]tensor.Tensor, error) {
	s.mu.Lock()
	h, err := s.acquire(ctx, key, -1)
	if err != nil {
		return nil, err
	}
	return h.lend(), nil
}

// GetOne is Get for a boundary of one tensor; ErrBridge if it has another number.
func (s *Store) GetOne(ctx context.Context, key int64) (tensor.Tensor, error) {
	s.mu.Lock()
	h, err := s.acquire(ctx, key, 1)
	if err != nil {
		return tensor.Tensor{}, err
	}
	return h.lendOne(), nil
}

// acquire adds a count for each of the boundary's tensors, having waited until it is readable. want is the number of tensors it
// must have, -1 for any. It is entered with s.mu held and left without.
func (s *Store) acquire(ctx context.Context, key int64, want int) (*holding, error) {
	var limit *time.Timer
	for {
		e, err := s.lookup(key)
		if err == nil && e.err != nil && !e.told {
			e.told, err = true, e.err
		}
		if err != nil {
			s.mu.Unlock()
			return nil, err
		}
		if e.phase == resident {
			return s.hold(e, want)
		}
		if e.phase == stored || e.phase == moving && !e.wantLoad {
			if err := s.startLoad(e, false); err != nil {
				return nil, err
			}
			s.mu.Lock()
			if s.entries[key] != e || e.phase != moving && e.phase != loading {
				continue
			}
		}
		done := e.waiter()
		s.mu.Unlock()
		if limit == nil {
			limit = time.NewTimer(s.patience(ctx))
			defer limit.Stop()
		}
		select {
		case <-done:
		case <-ctx.Done():
			return nil, errs.E(errs.ErrTimeout, "boundary %d: it was not there in time: %w", key, ctx.Err())
		case <-limit.C:
			return nil, errs.E(errs.ErrTimeout, "boundary %d: it was not there within %v; raise timeout_seconds", key, s.spec.timeout())
		}
		s.mu.Lock()
	}
}

// patience is how long to wait: as ctx says, or as the spec says if ctx says nothing.
func (s *Store) patience(ctx context.Context) time.Duration {
	if _, ok := ctx.Deadline(); ok {
		return time.Duration(1<<63 - 1)
	}
	return s.spec.timeout()
}

// hold counts the tensors of a resident boundary as lent. It gives up s.mu.
func (s *Store) hold(e *entry, want int) (*holding, error) {
	h := e.res
	if n := len(h.tensors); want >= 0 && n != want {
		s.mu.Unlock()
		return nil, errs.E(errs.ErrBridge, "boundary %d has %d tensors, not %d; get all of them", e.key, n, want)
	}
	if h.got == nil {
		h.got = h.give
	}
	h.refs.Add(int32(len(h.tensors)))
	s.stats.Gets++
	s.mu.Unlock()
	return h, nil
}

// waiter gives a channel that is closed when e's job ends. The caller holds Store.mu.
func (e *entry) waiter() <-chan struct{} {
	if e.done == nil {
		e.done = make(chan struct{})
	}
	return e.done
}

// Ready says whether Get would not wait, having waited up to wait for a move or load under way. It does not start a load: a
// boundary that is only in the tier is not ready. Errors as for Get, a timeout excepted.
func (s *Store) Ready(key int64, wait time.Duration) (bool, error) {
	var limit *time.Timer
	for {
		s.mu.Lock()
		e, err := s.lookup(key)
		if err == nil && e.err != nil && !e.told {
			e.told, err = true, e.err
		}
		if err != nil || e.phase == resident || e.phase == stored || wait <= 0 {
			ready := err == nil && e.phase == resident
			s.mu.Unlock()
			return ready, err
		}
		done := e.waiter()
		s.mu.Unlock()
		if limit == nil {
			limit = time.NewTimer(wait)
			defer limit.Stop()
		}
		select {
		case <-done:
		case <-limit.C:
			wait = 0
		}
	}
}
