package passes

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Workers is a small fixed pool of goroutines that share the chunks of large tensors. The goroutine that calls Run works too, so Run
// makes progress whatever the others do. The goroutines start with the first Run that can use them and end in Close. Safe for concurrent
// use.
type Workers struct {
	size   int
	mu     sync.RWMutex
	start  sync.Once
	jobs   chan *job
	done   sync.WaitGroup
	closed bool
}

// NewWorkers makes a pool in which `size` goroutines work at a time, the caller of Run counted; 0 or less means GOMAXPROCS.
func NewWorkers(size int) *Workers {
	if size <= 0 {
		size = runtime.GOMAXPROCS(0)
	}
	return &Workers{size: size, jobs: make(chan *job, size)}
}

// job is one Run: indices are taken from next until there are none; finished closes when all taken ones are through.
type job struct {
	n        int64
	f        func(int) error
	next     atomic.Int64
	left     atomic.Int64
	failed   atomic.Bool
	once     sync.Once
	err      error
	finished chan struct{}
}

// Run calls f(0) ... f(n-1), each once, on up to `size` goroutines, and waits for all of them. After a failure indices not yet begun are
// left out, and the first failure is returned; a panic in f counts as one, of kind errs.ErrPass with the stack. After Close, or with a nil
// pool, the caller does all of it.
func (w *Workers) Run(n int, f func(i int) error) error {
	if n <= 0 {
		return nil
	}
	j := &job{n: int64(n), f: f, finished: make(chan struct{})}
	j.left.Store(int64(n))
	w.offer(j)
	j.work()
	<-j.finished
	return j.err
}

// offer puts the job before as many helpers as could find a chunk; a full queue means that they are busy.
func (w *Workers) offer(j *job) {
	if w == nil || w.size < 2 || j.n < 2 {
		return
	}
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.closed {
		return
	}
	w.start.Do(func() {
		for range w.size - 1 {
			w.done.Go(func() {
				for j := range w.jobs {
					j.work()
				}
			})
		}
	})
	for range min(int64(w.size)-1, j.n-1) {
		select {
		case w.jobs <- j:
		default:
			return
		}
	}
}

// Close ends the goroutines and waits for them. A second call does nothing.
func (w *Workers) Close() {
	if w == nil {
		return
	}
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		close(w.jobs)
	}
	w.mu.Unlock()
	w.done.Wait()
}

func (j *job) work() {
	for {
		i := j.next.Add(1) - 1
		if i >= j.n {
			return
		}
		if !j.failed.Load() {
			if err := guard(func() error { return j.f(int(i)) }); err != nil {
				j.once.Do(func() { j.err = err })
				j.failed.Store(true)
			}
		}
		if j.left.Add(-1) == 0 {
			close(j.finished)
		}
	}
}

// guard turns a panic of f into an error.
func guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = errs.E(errs.ErrPass, "panic: %v\n%s", r, debug.Stack())
		}
	}()
	return f()
}
