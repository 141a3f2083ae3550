package sched

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Block is one block of a chain, as the scheduler sees it.
type Block struct {
	// Name is for messages; it may be empty.
	Name string `json:"name"`
	// NeedsVJP is false where the block's output needs no gradient (a frozen prefix): it then runs as N and never again. Default true.
	NeedsVJP bool `json:"needs_vjp"`
	// Rank is the rank that holds the block; see [Spec].Ranks. Default: blocks are dealt evenly.
	Rank *int `json:"rank"`
	// Buffers names the buffers that a forward of the block writes (BatchNorm's statistics). Their blocks run in microbatch order.
	Buffers []string `json:"buffers"`
}

// UnmarshalJSON fills the default of needs_vjp and refuses unknown fields.
func (b *Block) UnmarshalJSON(data []byte) error {
	type plain Block
	p := plain{NeedsVJP: true}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return err
	}
	*b = Block(p)
	return nil
}

// Boundary is a value between blocks.
type Boundary struct {
	// Producer is the block that makes it, always the boundary's number less one; -1 for the step's input.
	Producer int `json:"producer"`
	// Consumers are the blocks that read it, rising; the number of blocks stands for the loss.
	Consumers []int `json:"consumers"`
}

// Leaf is a group of leaves (parameters and other tensors that collect gradients) which several blocks read.
type Leaf struct {
	Name   string `json:"name"`
	Blocks []int  `json:"blocks"`
}

// Chain is what a generator knows about a model. Boundaries is the line by default (boundary i is read by block i alone). Leaves lists only shared
// groups: every block has leaves of its own besides.
type Chain struct {
	Blocks     []Block    `json:"blocks"`
	Boundaries []Boundary `json:"boundaries"`
	Leaves     []Leaf     `json:"leaves"`
}

// Len is the number of blocks, which is also the loss's number among the consumers.
func (c *Chain) Len() int { return len(c.Blocks) }

// needs tells whether block b takes part in the reverse pass; the loss does.
func (c *Chain) needs(b int) bool { return b == len(c.Blocks) || c.Blocks[b].NeedsVJP }

// reads lists the boundaries that each block, and last the loss, reads; rising.
func (c *Chain) reads() [][]int {
	out := make([][]int, len(c.Blocks)+1)
	for i, x := range c.Boundaries {
		for _, b := range x.Consumers {
			out[b] = append(out[b], i)
		}
	}
	return out
}

// needing filters blocks down to those that take part in the reverse pass.
func (c *Chain) needing(blocks []int) []int {
	var out []int
	for _, b := range blocks {
		if c.needs(b) {
			out = append(out, b)
		}
	}
	return out
}

// owner is the block whose U updates a leaf group: its first reader that has a VJP, the last to read it in a reverse pass; -1 if it has none.
func (c *Chain) owner(l Leaf) int {
	if n := c.needing(l.Blocks); len(n) > 0 {
		return slices.Min(n)
	}
	return -1
}

// complete fills in the plain line and checks the chain; errors are ErrValue naming the field.
func (c *Chain) complete() error {
	n := len(c.Blocks)
	if n == 0 {
		return errs.E(errs.ErrValue, "blocks: a chain needs at least one block")
	}
	if c.Boundaries == nil {
		c.Boundaries = make([]Boundary, n+1)
		for i := range c.Boundaries {
			c.Boundaries[i] = Boundary{Producer: i - 1, Consumers: []int{i}}
		}
	}
	if len(c.Boundaries) != n+1 {
		return errs.E(errs.ErrValue, "boundaries: %d given, %d blocks have %d", len(c.Boundaries), n, n+1)
	}
	for i, x := range c.Boundaries {
		if x.Producer != i-1 {
			return errs.E(errs.ErrValue, "boundaries[%d].producer: is %d, must be %d: block b makes boundary b+1", i, x.Producer, i-1)
		}
		if len(x.Consumers) == 0 {
			return errs.E(errs.ErrValue, "boundaries[%d].consumers: is empty; no block reads boundary %d", i, i)
		}
		for j, b := range x.Consumers {
			if b < i || b > n || j > 0 && b <= x.Consumers[j-1] {
				return errs.E(errs.ErrValue, "boundaries[%d].consumers: %v must rise and lie in %d..%d", i, x.Consumers, i, n)
			}
		}
	}
	for b, block := range c.Blocks {
		if block.NeedsVJP && len(c.needing(c.Boundaries[b+1].Consumers)) == 0 {
			return errs.E(errs.ErrValue, "blocks[%d].needs_vjp: is true, but no block that reads its output has a VJP", b)
		}
	}
	if i := slices.IndexFunc(c.reads(), func(r []int) bool { return len(r) == 0 }); i >= 0 {
		return errs.E(errs.ErrValue, "boundaries: block %d (%d is the loss) reads none", i, n)
	}
	for i, l := range c.Leaves {
		for j, b := range l.Blocks {
			if b < 0 || b >= n || slices.Contains(l.Blocks[:j], b) {
				return errs.E(errs.ErrValue, "leaves[%d].blocks: %v must be distinct and lie in 0..%d", i, l.Blocks, n-1)
			}
		}
		if len(l.Blocks) == 0 {
			return errs.E(errs.ErrValue, "leaves[%d].blocks: is empty", i)
		}
	}
	return nil
}
