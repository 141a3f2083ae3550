package sched

import (
	"crypto/sha256"
	"sync"
)

// cacheSize is how many (spec, text) pairs are remembered: more than a process with several runtimes and shapes uses.
const cacheSize = 256

// cache remembers which pairs of spec and text were found valid; only good results, the oldest making room.
type cache struct {
	mu   sync.Mutex
	seen map[pair]bool
	ring []pair
	next int
}

type pair struct{ spec, text [sha256.Size]byte }

var validated cache

// check runs slow unless the pair is known to be valid. Safe for concurrent use; slow runs outside the lock.
func (c *cache) check(spec, text string, slow func() error) error {
	key := pair{sha256.Sum256([]byte(spec)), sha256.Sum256([]byte(text))}
	c.mu.Lock()
	known := c.seen[key]
	c.mu.Unlock()
	if known {
		return nil
	}
	if err := slow(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.seen == nil:
		c.seen, c.ring = map[pair]bool{}, make([]pair, cacheSize)
	case c.seen[key]:
		return nil
	}
	delete(c.seen, c.ring[c.next])
	c.ring[c.next] = key
	c.seen[key] = true
	c.next = (c.next + 1) % cacheSize
	return nil
}
