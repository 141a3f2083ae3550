package sched

import (
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Spec is everything that decides a schedule. Its JSON form is what crosses the bridge; fields not named below are refused.
type Spec struct {
	// Chain gives "blocks" (list of {name, needs_vjp, rank, buffers}), "boundaries" (list of {producer, consumers}, one more than blocks;
	// default the plain line) and "leaves" (list of {name, blocks}: leaf groups that several blocks read; default none).
	Chain
	// Microbatches is how many parts the batch is cut into. Default 1; the sequential and async schedules run no more.
	Microbatches int `json:"microbatches"`
	// Targets says that the loss is called per microbatch (B0, B1, ...), not once on the whole output (B*). Default false.
	Targets bool `json:"targets"`
	// KeepLast lets the last block run as F, so that it is not rebuilt. Default true.
	KeepLast bool `json:"keep_last"`
	// KeepOutput keeps the chain's output (boundary L) to the end of the reverse pass. Default false.
	KeepOutput bool `json:"keep_output"`
	// Passes puts a P behind every adjoint. Default false.
	Passes bool `json:"passes"`
	// PassInput lets the passes see the adjoint of the step's input too (0P0). Default true.
	PassInput bool `json:"pass_input"`
	// Tier is where kept boundaries wait: "device" (no S, no L), "host" or "disk". Default "device".
	Tier string `json:"tier"`
	// Prefetch is how many blocks ahead of its own a load starts; sequential always takes 0. Default 1.
	Prefetch int `json:"prefetch"`
	// InputGrad says that the step's input needs a gradient, so that its adjoint exists whatever PassInput says. Default false.
	InputGrad bool `json:"input_grad"`
	// World is the number of ranks. Default 1; only the distributed schedule runs on more.
	World int `json:"world"`
	// Ranks gives each block's rank, never falling along the chain; it may be given here or as the blocks' "rank". Default: dealt evenly, the first
	// ranks getting one more.
	Ranks []int `json:"ranks"`
	// Order is the order of microbatches on a rank of the distributed schedule: "1f1b" or "gpipe". Default "1f1b".
	Order string `json:"order"`
	// GraphFreePrefix is how many leading blocks need no VJP; the same as their needs_vjp = false. Default 0.
	GraphFreePrefix int `json:"graph_free_prefix"`
	// Update adds a streamed optimizer step (bU*) behind the last VJP that a block's leaves wait for. Default false.
	Update bool `json:"update"`
	// Kinds, where given, lists the only kinds that may appear. Default: all.
	Kinds []string `json:"kinds"`
}

// maxCells bounds boundaries x microbatches x ranks, and with it the memory that a replay takes.
const maxCells = 1 << 24

// ParseSpec reads the JSON form, fills the defaults and checks every field. Errors are ErrValue naming the field.
func ParseSpec(text string) (*Spec, error) {
	s := &Spec{Microbatches: 1, KeepLast: true, PassInput: true, Tier: "device", Prefetch: 1, World: 1, Order: "1f1b"}
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(s); err != nil {
		return nil, jsonError(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errs.E(errs.ErrValue, "spec: text after the JSON object")
	}
	if err := s.complete(); err != nil {
		return nil, err
	}
	return s, nil
}

func jsonError(err error) error {
	var t *json.UnmarshalTypeError
	if errors.As(err, &t) {
		return errs.E(errs.ErrValue, "%s: a JSON %s where a %s is expected", t.Field, t.Value, t.Type)
	}
	return errs.E(errs.ErrValue, "spec: %s", strings.TrimPrefix(err.Error(), "json: "))
}

func (s *Spec) complete() error {
	n := len(s.Blocks)
	if s.GraphFreePrefix < 0 || s.GraphFreePrefix > n {
		return errs.E(errs.ErrValue, "graph_free_prefix: %d is not in 0..%d, the number of blocks", s.GraphFreePrefix, n)
	}
	for b := range s.GraphFreePrefix {
		s.Blocks[b].NeedsVJP = false
	}
	for _, c := range []struct {
		field     string
		value, lo int
	}{{"microbatches", s.Microbatches, 1}, {"world", s.World, 1}, {"prefetch", s.Prefetch, 0}} {
		if c.value < c.lo || c.value > maxCells {
			return errs.E(errs.ErrValue, "%s: %d is not in %d..%d", c.field, c.value, c.lo, maxCells)
		}
	}
	if int64(n+1)*int64(s.Microbatches) > maxCells/int64(s.World) {
		return errs.E(errs.ErrValue, "microbatches: %d blocks x %d microbatches x world %d is too large", n, s.Microbatches, s.World)
	}
	if err := s.Chain.complete(); err != nil {
		return err
	}
	if !slices.Contains([]string{"device", "host", "disk"}, s.Tier) {
		return errs.E(errs.ErrValue, "tier: %q is none of device, host, disk", s.Tier)
	}
	if s.Order != "1f1b" && s.Order != "gpipe" {
		return errs.E(errs.ErrValue, "order: %q is none of 1f1b, gpipe", s.Order)
	}
	for i, k := range s.Kinds {
		if _, err := ParseKind(k); err != nil {
			return errs.E(errs.ErrValue, "kinds[%d]: unknown kind %q", i, k)
		}
	}
	return s.dealRanks()
}

// dealRanks settles Ranks from "ranks", from the blocks' "rank", or evenly, and checks them.
func (s *Spec) dealRanks() error {
	n := len(s.Blocks)
	given := s.Ranks != nil
	if !given {
		s.Ranks = make([]int, n)
		for b := range s.Ranks {
			s.Ranks[b] = evenRank(b, n, s.World)
		}
	}
	if len(s.Ranks) != n {
		return errs.E(errs.ErrValue, "ranks: %d given for %d blocks", len(s.Ranks), n)
	}
	some := slices.ContainsFunc(s.Blocks, func(b Block) bool { return b.Rank != nil })
	for b, block := range s.Blocks {
		switch {
		case block.Rank == nil && some && !given:
			return errs.E(errs.ErrValue, "blocks[%d].rank: is missing while other blocks have one", b)
		case block.Rank != nil && given && *block.Rank != s.Ranks[b]:
			return errs.E(errs.ErrValue, "blocks[%d].rank: is %d, but ranks says %d", b, *block.Rank, s.Ranks[b])
		case block.Rank != nil:
			s.Ranks[b] = *block.Rank
		}
	}
	for b, r := range s.Ranks {
		if r < 0 || r >= s.World {
			return errs.E(errs.ErrValue, "ranks: block %d is on rank %d of world %d", b, r, s.World)
		}
		if b > 0 && r < s.Ranks[b-1] {
			return errs.E(errs.ErrValue, "ranks: block %d is on rank %d, before block %d's rank %d", b, r, b-1, s.Ranks[b-1])
		}
	}
	for i, x := range s.Boundaries {
		first, last := s.rank(x.Consumers[0]), s.rank(x.Consumers[len(x.Consumers)-1])
		if first != last {
			return errs.E(errs.ErrPlan, "boundary %d is read on ranks %d and %d; put blocks %v on one rank (ranks=)", i, first, last, x.Consumers)
		}
	}
	return nil
}

// evenRank deals n blocks to world ranks in order, the first n%world ranks getting one more.
func evenRank(b, n, world int) int {
	q, r := n/world, n%world
	if b < r*(q+1) {
		return b / (q + 1)
	}
	return r + (b-r*(q+1))/q
}

// rank is where a block runs; the loss runs with the last block.
func (s *Spec) rank(b int) int { return s.Ranks[min(b, len(s.Ranks)-1)] }

// source and sink are the ranks that make and that read boundary i. The input is made where it is read.
func (s *Spec) source(i int) int {
	if i == 0 {
		return s.sink(0)
	}
	return s.rank(i - 1)
}
func (s *Spec) sink(i int) int      { return s.rank(s.Boundaries[i].Consumers[0]) }
func (s *Spec) crosses(i int) bool  { return s.source(i) != s.sink(i) }
func (s *Spec) wholeLoss() bool     { return !s.Targets && s.Microbatches > 1 }
func (s *Spec) offDevice() bool     { return s.Tier != "device" }
func (s *Spec) passesAt(i int) bool { return s.Passes && s.hasAdjoint(i) }

// hasAdjoint tells whether boundary i gets an adjoint at all.
func (s *Spec) hasAdjoint(i int) bool {
	if i == 0 {
		return (s.InputGrad || s.Passes && s.PassInput) && len(s.needing(s.Boundaries[0].Consumers)) > 0
	}
	return s.Blocks[i-1].NeedsVJP
}
