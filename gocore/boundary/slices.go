package boundary

import "time"

// Note [Work in slices]
//
// A host's main thread may have to be back every now and then: inside a call, Python hears no signal. Its way to a move or load is
// [Store.MoveFor] or [Store.LoadFor] and then [Store.Settled], each of which returns after a given time at most. In a store that
// is not asynchronous, work that may take long runs on a goroutine of its own meanwhile; Drop, Clear and Close treat it as they
// treat a worker's. Copies within host memory up to asideLen are not worth the goroutine and are done at once.

// asideLen is copied within about 50 ms also on a busy machine.
const asideLen = 64 << 20

// MoveFor is Move, with a wait of at most about `wait` for the work, and says whether the work is done. An asynchronous store's is not
// waited for and counts as done.
func (s *Store) MoveFor(key int64, wait time.Duration) (bool, error) {
	if err := s.move(key, true); err != nil || s.spec.Async || !s.spec.moves() {
		return err == nil, err
	}
	return s.Settled(key, wait)
}

// LoadFor is to Load what MoveFor is to Move.
func (s *Store) LoadFor(key int64, wait time.Duration) (bool, error) {
	if err := s.load(key, true); err != nil || s.spec.Async || !s.spec.moves() {
		return err == nil, err
	}
	return s.Settled(key, wait)
}

// Settled says whether no move or load of the boundary is under way, having waited up to wait for one that is. ErrStoreKey,
// ErrClosed, and the failure of the move or load, told once.
func (s *Store) Settled(key int64, wait time.Duration) (bool, error) {
	var limit *time.Timer
	for {
		s.mu.Lock()
		e, err := s.lookup(key)
		if err == nil && e.err != nil && !e.told {
			e.told, err = true, e.err
		}
		if err != nil || !(e.busy || e.queued) || wait <= 0 {
			settled := err == nil && !(e.busy || e.queued)
			s.mu.Unlock()
			return settled, err
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

// mayTakeLong says whether e's job is worth a goroutine. The caller holds s.mu.
func (s *Store) mayTakeLong(e *entry) bool {
	t := e.transit
	return s.spec.Tier == TierDisk || t.onDevice || t.lay.spanBytes() > asideLen
}

// runAside runs e's job, which take has marked, on a goroutine of its own, which Close joins. The caller holds s.mu: so the
// goroutine is started before Close begins to wait, or not at all.
func (s *Store) runAside(e *entry) {
	s.workers.Go(func() error {
		_ = s.runJob(e, nil, s.releases) // kept in the entry, for Settled
		s.removeInline()
		return nil
	})
}
