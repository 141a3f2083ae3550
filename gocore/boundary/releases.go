package boundary

import "sync"

// Releases is a queue of tensor releases that must run on a caller's thread, because they may need something that only that
// thread can take (Python's interpreter lock). The zero value is ready. Several stores may share one.
type Releases struct {
	mu    sync.Mutex
	queue []func()
}

// Push queues one release; nil is ignored. It does not block.
func (r *Releases) Push(release func()) {
	if release == nil {
		return
	}
	r.mu.Lock()
	r.queue = append(r.queue, release)
	r.mu.Unlock()
}

// Drain runs what is queued, oldest first, on the calling thread, and gives how many that was. A release may push more; those
// run too.
func (r *Releases) Drain() int {
	total := 0
	for {
		r.mu.Lock()
		batch := r.queue
		r.queue = nil
		r.mu.Unlock()
		if len(batch) == 0 {
			return total
		}
		for _, release := range batch {
			release()
		}
		total += len(batch)
	}
}

// Len is how many releases wait.
func (r *Releases) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.queue)
}
