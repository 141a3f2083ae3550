package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/boundary"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/passes"
	"github.com/eae-runtime/eae-runtime/gocore/sched"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// toy is a chain of blocks y = w*x + x*x/8 on single-precision vectors, and a loss that is half the sum of the squares.
type toy struct{ weights []float32 }

func (c toy) forward(b int, x []float32) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = c.weights[b]*v + v*v/8
	}
	return y
}

// vjp gives the adjoint at the block's input and the gradient of its weight.
func (c toy) vjp(b int, x, a []float32) ([]float32, float32) {
	left, weight := make([]float32, len(x)), float32(0)
	for i, v := range x {
		left[i] = a[i] * (c.weights[b] + v/4)
		weight += a[i] * v
	}
	return left, weight
}

// plain runs the chain with everything kept; halve is what the pass does at each boundary.
func (c toy) plain(x []float32, halve float32) ([]float32, []float32) {
	xs := [][]float32{x}
	for b := range c.weights {
		xs = append(xs, c.forward(b, xs[b]))
	}
	scale := func(a []float32) []float32 {
		for i := range a {
			a[i] *= halve
		}
		return a
	}
	a := scale(append([]float32(nil), xs[len(xs)-1]...))
	grads := make([]float32, len(c.weights))
	for b := len(c.weights) - 1; b >= 0; b-- {
		a, grads[b] = c.vjp(b, xs[b], a)
		a = scale(a)
	}
	return a, grads
}

// walker executes a schedule over the real store and the real passes.
type walker struct {
	t      *rapid.T
	chain  toy
	store  *boundary.Store
	passes *passes.Chain
	now    map[int][]float32
	graphs map[[2]int][]float32
	adj    map[int][]float32
	grads  []float32
}

func wrap(values []float32, release func()) tensor.Tensor {
	return tensor.Tensor{
		Data: unsafe.Pointer(unsafe.SliceData(values)), DType: tensor.Float32, Device: tensor.CPU,
		Shape: []int64{int64(len(values))}, Strides: []int64{1}, Release: release,
	}
}

func view(x tensor.Tensor) []float32 { return unsafe.Slice((*float32)(x.Data), x.Numel()) }

func (s *walker) run(actions []sched.Action, released *int) {
	for _, a := range actions {
		b, m := int(a.Block), int(a.Micro)
		key := int64(b) + int64(m)<<20
		switch a.Kind {
		case sched.KindC, sched.KindF, sched.KindN:
			x := s.now[m]
			if a.Kind == sched.KindC {
				require.NoError(s.t, s.store.PutOne(key, wrap(x, func() { *released++ })))
			}
			if a.Kind == sched.KindF {
				s.graphs[[2]int{b, m}] = x
			}
			s.now[m] = s.chain.forward(b, x)
		case sched.KindB:
			for k, y := range s.now {
				if m == k || m < 0 {
					s.adj[k] = append([]float32(nil), y...)
				}
			}
		case sched.KindR:
			x, err := s.store.GetOne(context.Background(), key)
			require.NoError(s.t, err)
			s.graphs[[2]int{b, m}] = append([]float32(nil), view(x)...)
			x.Free()
		case sched.KindV:
			left, weight := s.chain.vjp(b, s.graphs[[2]int{b, m}], s.adj[m])
			delete(s.graphs, [2]int{b, m})
			s.adj[m], s.grads[b] = left, s.grads[b]+weight
		case sched.KindP:
			g := &passes.Grad{Src: []tensor.Tensor{wrap(s.adj[m], nil)}, Step: 0, Block: int64(b), Microbatch: int64(m)}
			require.NoError(s.t, s.passes.Apply(&passes.Context{}, g))
			s.adj[m] = append([]float32(nil), view(g.Dst[0])...)
			g.Dst[0].Free()
		case sched.KindS:
			require.NoError(s.t, s.store.Move(key))
		case sched.KindL:
			require.NoError(s.t, s.store.Load(key))
		case sched.KindD:
			require.NoError(s.t, s.store.Drop(key))
		default:
			s.t.Fatalf("%s in a schedule of one rank", a)
		}
		s.store.Drain()
	}
}

// Whatever the schedule, tier and number of microbatches: the step's gradients are those of the chain with everything kept, bit for bit, and
// nothing is left.
func TestAStepOverTheRealParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.IntRange(1, 6).Draw(t, "blocks")
		micro := rapid.IntRange(1, 3).Draw(t, "microbatches")
		tier := rapid.SampledFrom([]boundary.Tier{boundary.TierDevice, boundary.TierHost, boundary.TierDisk}).Draw(t, "tier")
		name := "pipeline"
		if micro == 1 {
			name = rapid.SampledFrom([]string{"sequential", "async", "pipeline"}).Draw(t, "scheduler")
		}
		withPasses, keepLast := rapid.Bool().Draw(t, "passes"), rapid.Bool().Draw(t, "keep last")
		spec := map[string]any{
			"microbatches": micro, "targets": rapid.Bool().Draw(t, "targets"), "keep_last": keepLast, "passes": withPasses, "tier": tier,
			"pass_input": true, "prefetch": 2,
		}
		var blocks []map[string]any
		chain := toy{}
		for b := range length {
			blocks = append(blocks, map[string]any{"name": fmt.Sprint("b", b), "needs_vjp": true})
			chain.weights = append(chain.weights, rapid.Float32Range(-2, 2).Draw(t, "w"))
		}
		spec["blocks"] = blocks
		text, err := json.Marshal(spec)
		require.NoError(t, err)
		schedule, err := sched.Generate(name, string(text))
		require.NoError(t, err)
		program, err := sched.ParseProgram(schedule)
		require.NoError(t, err)

		storeSpec := boundary.DefaultSpec()
		storeSpec.Tier, storeSpec.Async, storeSpec.Dir = tier, name == "async", "/scratch"
		heap, fs := memory.NewHeap(), boundary.NewMemFS()
		store, err := boundary.New(storeSpec, boundary.Options{Allocator: heap, FS: fs})
		require.NoError(t, err)
		regularization, err := passes.NewChain(`[{"name":"regularization","params":{"strength":0.5}}]`)
		require.NoError(t, err)
		s := &walker{
			t: t, chain: chain, store: store, passes: regularization, now: map[int][]float32{}, graphs: map[[2]int][]float32{},
			adj: map[int][]float32{}, grads: make([]float32, length),
		}
		halve := float32(1)
		if withPasses {
			halve = 0.5
		}
		wantGrads, wantAdj := make([]float32, length), map[int][]float32{}
		for m := range micro {
			x := rapid.SliceOfN(rapid.Float32Range(-1, 1), 3, 3).Draw(t, "x")
			s.now[m] = x
			left, grads := chain.plain(x, halve)
			wantAdj[m] = left
			for b := range grads {
				wantGrads[b] += grads[b]
			}
		}
		released := 0
		s.run(program[0].Forward, &released)
		s.run(program[0].Reverse, &released)
		require.Equal(t, wantGrads, s.grads)
		if withPasses {
			require.Equal(t, wantAdj, s.adj)
		}
		require.Zero(t, store.Len(), schedule)
		puts := store.Stats().Puts
		require.NoError(t, store.Close())
		store.Drain()
		regularization.Close()
		require.EqualValues(t, puts, released)
		require.Empty(t, fs.Files())
		count, _ := heap.Live()
		require.Zero(t, count)
	})
}
