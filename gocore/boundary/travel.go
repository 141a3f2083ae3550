package boundary

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"time"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// Move starts to bring a boundary to the store's tier (action S). One that is there already or on its way, in either direction,
// is left alone. Buffers are taken and the cap is checked before it returns, so that both depend on the order of calls only.
// ErrStoreKey, ErrClosed; ErrStore if the cap would be passed, a buffer is missing, there is no Mover for the device, or, in a
// store that is not asynchronous, the work failed. After a failure the boundary is still readable where it was, unrounded.
func (s *Store) Move(key int64) error { return s.move(key, false) }

// move is Move; aside is for Note [Work in slices].
func (s *Store) move(key int64, aside bool) error {
	s.mu.Lock()
	e, err := s.lookup(key)
	if err != nil || !s.spec.moves() || e.phase != resident || e.inTier {
		s.mu.Unlock()
		return err
	}
	s.noteUntold(e)
	e.err, e.told = nil, false
	if err := s.prepareMove(e); err != nil {
		s.mu.Unlock()
		return err
	}
	e.phase = moving
	s.stats.Moves++
	return s.start(e, aside)
}

// Load starts to bring a boundary back (action L); one that is moving follows when it has arrived. A readable one is left alone.
// Errors as for Move. After a failure the boundary is still in the tier, and Load tries again.
func (s *Store) Load(key int64) error { return s.load(key, false) }

// load is Load; aside is for Note [Work in slices].
func (s *Store) load(key int64, aside bool) error {
	s.mu.Lock()
	e, err := s.lookup(key)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	return s.startLoad(e, aside)
}

// startLoad is load with s.mu held, which it gives up.
func (s *Store) startLoad(e *entry, aside bool) error {
	if e.phase == resident || e.phase == loading || e.wantLoad {
		s.mu.Unlock()
		return nil
	}
	if e.phase == moving {
		if s.staysReadable(e.transit) {
			s.mu.Unlock()
			return nil
		}
		err := s.prepareLoad(e)
		e.wantLoad = err == nil
		s.mu.Unlock()
		return err
	}
	s.noteUntold(e)
	e.err, e.told = nil, false
	if err := s.prepareLoad(e); err != nil {
		s.mu.Unlock()
		return err
	}
	e.phase = loading
	return s.start(e, aside)
}

// start queues e's job; a store that is not asynchronous runs it here, or aside if that is asked for and may take long. It gives
// up s.mu.
func (s *Store) start(e *entry, aside bool) error {
	if s.spec.Async {
		s.enqueue(e)
		s.mu.Unlock()
		return nil
	}
	s.take(e)
	if e.aside = aside && s.mayTakeLong(e); e.aside {
		s.runAside(e)
		s.mu.Unlock()
		return nil
	}
	s.mu.Unlock()
	err := s.runJob(e, nil, nil)
	s.removeInline()
	return err
}

// staysReadable says whether what the tier holds can be read as it is: raw bytes in host memory for a boundary of the host.
func (s *Store) staysReadable(t *transit) bool {
	return s.spec.Tier != TierDisk && !t.lay.encoded && !t.onDevice
}

// prepareMove lays e out and takes what its move needs. The caller holds s.mu.
func (s *Store) prepareMove(e *entry) error {
	lay, err := plan(e.key, e.res.tensors, s.code)
	if err != nil {
		return err
	}
	t := &transit{lay: lay, onDevice: !lay.device().Host()}
	if t.onDevice {
		if err := s.needMover(e.key, lay.device()); err != nil {
			return err
		}
		if s.spec.Tier == TierDevice {
			return errs.E(errs.ErrStore, "boundary %d is on device type %d, where codec %s is not available; use the host tier",
				e.key, lay.device().Type, s.spec.Codec)
		}
	}
	need := lay.bytes()
	if s.spec.Tier == TierDisk {
		t.header = encodeHeader(e.key, s.code, lay)
		need = fileLen(t.header, lay)
	}
	if s.spec.MaxBytes > 0 && s.capped+need > s.spec.MaxBytes {
		return s.capError(e.key, need, s.capped)
	}
	if err := s.takeMoveBuffers(e.key, t); err != nil {
		s.free(&t.packed)
		s.free(&t.stage)
		return err
	}
	s.chargeTier(t, need)
	e.transit = t
	return nil
}

func (s *Store) takeMoveBuffers(key int64, t *transit) (err error) {
	now := context.Background()
	if s.spec.Tier != TierDisk && t.lay.packLen > 0 {
		if t.packed, err = s.pool.Get(now, t.lay.packLen); err != nil {
			return err
		}
	}
	if !t.onDevice {
		return nil
	}
	if (s.spec.Tier == TierDisk || t.lay.encoded) && t.lay.memLen > 0 {
		if t.stage, err = s.pool.Get(now, t.lay.memLen); err != nil {
			return err
		}
	}
	if t.after, err = s.mover.Record(t.lay.device()); err != nil {
		return errs.E(errs.ErrStore, "boundary %d: cannot record an event on device %v: %w", key, t.lay.device(), err)
	}
	return nil
}

// prepareLoad takes what e's load needs. The caller holds s.mu.
func (s *Store) prepareLoad(e *entry) error {
	t, pool := e.transit, s.pool
	target := &holding{}
	if t.onDevice {
		var err error
		if pool, err = s.devicePool(e.device()); err != nil {
			return err
		}
	}
	if err := s.readable(target, t.lay, pool); err != nil {
		return err
	}
	t.target = target
	if t.onDevice {
		err := s.prepareDeviceLoad(e)
		if err != nil {
			target.give()
			t.target = nil
			return err
		}
	}
	s.stats.Loads++
	s.chargeRes(e, e.resBytes+t.lay.spanBytes())
	return nil
}

func (s *Store) prepareDeviceLoad(e *entry) (err error) {
	t := e.transit
	if (s.spec.Tier == TierDisk || t.lay.encoded) && t.lay.memLen > 0 && t.stage.IsZero() {
		if t.stage, err = s.pool.Get(context.Background(), t.lay.memLen); err != nil {
			return err
		}
	}
	if t.loadAfter, err = s.mover.Record(e.device()); err != nil {
		return errs.E(errs.ErrStore, "boundary %d: cannot record an event on device %v: %w", e.key, e.device(), err)
	}
	return nil
}

var errStopped = errors.New("given up: the boundary was dropped or the store closed")

func (s *Store) stopped(t *transit) func() error {
	return func() error {
		if s.stop.Load() || t.cancel.Load() {
			return errStopped
		}
		return nil
	}
}

// doMove does the work of a move. It runs without s.mu.
func (s *Store) doMove(e *entry, chunk []byte) (err error) {
	defer recovered(&err)
	t := e.transit
	var base unsafe.Pointer
	if t.onDevice && t.lay.memLen > 0 {
		into := &t.stage
		if into.IsZero() {
			into = &t.packed
		}
		base = into.Ptr
		if err := s.carry(e.device(), ToHost, t.after, t.lay.copies(base)); err != nil {
			return err
		}
	}
	if s.spec.Tier != TierDisk {
		if base != nil && base == addr(t.packed) {
			return nil
		}
		return t.lay.pack(addr(t.packed), base)
	}
	need := fileLen(t.header, t.lay)
	total := s.writing.Add(need)
	defer s.writing.Add(-need)
	free, err := s.fs.Free(s.scratch.path)
	if err != nil {
		return err
	}
	if total > free {
		return fmt.Errorf("it needs %d bytes and %d are free: %w", need, max(0, free-(total-need)), syscall.ENOSPC)
	}
	return writeFile(s.fs, t.path, t.header, t.lay, base, chunk, s.stopped(t))
}

// doLoad does the work of a load. It runs without s.mu.
func (s *Store) doLoad(e *entry, chunk []byte) (err error) {
	defer recovered(&err)
	t := e.transit
	base := addr(t.target.buf)
	if t.onDevice {
		base = addr(t.stage)
	}
	switch {
	case s.spec.Tier == TierDisk:
		err = readFile(s.fs, t.path, t.header, t.lay, base, chunk, s.stopped(t))
	case t.onDevice && !t.lay.encoded:
		base = addr(t.packed)
	default:
		err = t.lay.unpack(base, addr(t.packed))
	}
	if err != nil || !t.onDevice || t.lay.memLen == 0 {
		return err
	}
	spans := t.lay.copies(t.target.buf.Ptr)
	for i := range spans {
		spans[i].Src = t.lay.from(i, base)
	}
	return s.carry(e.device(), ToDevice, t.loadAfter, spans)
}

// carry copies and waits. It waits to the end also when the job is no longer wanted: the accelerator still uses the memory.
func (s *Store) carry(dev tensor.Device, dir Direction, after Event, spans []Span) error {
	end, err := s.mover.Copy(dev, dir, after, spans)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.spec.timeout())
	defer cancel()
	if err := s.mover.Await(ctx, end); err != nil {
		return &lostError{err}
	}
	return nil
}

// lostError says that an accelerator may still use the job's buffers: they must never be lent again.
type lostError struct{ error }

func (e *lostError) Unwrap() error { return e.error }

// explain makes the error that callers see of one that a job ended with.
func (s *Store) explain(e *entry, doing string, err error) error {
	t := e.transit
	where := "on the " + string(s.spec.Tier) + " tier"
	if s.spec.Tier == TierDisk {
		where = "in " + t.path
	}
	var lost *lostError
	switch {
	case errors.Is(err, syscall.ENOSPC):
		free, freeErr := s.fs.Free(s.scratch.path)
		if freeErr != nil {
			free = 0
		}
		return errs.E(errs.ErrStore, "boundary %d: no space to store %d bytes %s, %d bytes are free in %s: %w; free some or give another dir",
			e.key, fileLen(t.header, t.lay), where, free, filepath.Dir(s.scratch.path), err)
	case errors.As(err, &lost):
		return errs.E(errs.ErrStore, "boundary %d: the accelerator did not finish the copy within %v: %w; its buffers are given up",
			e.key, s.spec.timeout().Round(time.Millisecond), err)
	}
	return errs.E(errs.ErrStore, "boundary %d: cannot %s it %s: %w", e.key, doing, where, err)
}
