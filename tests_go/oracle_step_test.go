//go:build gotorch

package tests

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	torch "github.com/wangkuiyi/gotorch"

	adapter "github.com/eae-runtime/eae-runtime/bridge/gotorch"
	"github.com/eae-runtime/eae-runtime/bridge/offheap"
	"github.com/eae-runtime/eae-runtime/gocore/boundary"
	"github.com/eae-runtime/eae-runtime/gocore/sched"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

// weights are the matrices of a chain of blocks tanh(x W).
func weights(blocks int, width int64) []torch.Tensor {
	made := make([]torch.Tensor, blocks)
	for i := range made {
		made[i] = torch.RandN([]int64{width, width}, true)
	}
	return made
}

func block(x, w torch.Tensor) torch.Tensor {
	product := torch.MM(x, w)
	return product.Tanh()
}

// loss is the mean of the squares.
func loss(y torch.Tensor) torch.Tensor {
	square := y.Mul(y)
	return square.Mean()
}

// detached is the same data without a graph.
func detached(g torch.Tensor) torch.Tensor { return g.Detach() }

// stepper walks a schedule with gotorch as the engine: the executor of the Python side, in small.
type stepper struct {
	t       *testing.T
	store   *boundary.Store
	weights []torch.Tensor
	flowing torch.Tensor         // the boundary on its way forward
	inputs  map[int]torch.Tensor // of blocks that have a graph
	outputs map[int]torch.Tensor
	adjoint torch.Tensor
}

// run does one action.
func (s *stepper) run(a sched.Action) {
	switch a.Kind {
	case sched.KindC:
		s.keep(a.Block)
		s.flowing = detached(block(s.flowing, s.weights[a.Block].Detach()))
		if a.Block == len(s.weights)-1 {
			s.keep(a.Block + 1)
		}
	case sched.KindF:
		s.graph(a.Block, s.flowing)
	case sched.KindB:
		if output, kept := s.outputs[a.Block-1]; kept {
			s.flowing = detached(output)
		}
		y := leaf(s.flowing)
		loss(y).Backward()
		s.adjoint = y.Grad()
	case sched.KindR:
		kept, err := s.store.GetOne(context.Background(), int64(a.Block))
		require.NoError(s.t, err)
		x, err := adapter.Wrap(&kept)
		require.NoError(s.t, err)
		s.graph(a.Block, x)
		kept.Free()
	case sched.KindV:
		// gotorch differentiates scalars only: d(sum(y a))/dy is a, exactly.
		output := s.outputs[a.Block]
		weighted := output.Mul(s.adjoint)
		weighted.Sum().Backward()
		s.adjoint = s.inputs[a.Block].Grad()
		delete(s.inputs, a.Block)
		delete(s.outputs, a.Block)
	case sched.KindS:
		require.NoError(s.t, s.store.Move(int64(a.Block)))
	case sched.KindL:
		require.NoError(s.t, s.store.Load(int64(a.Block)))
	case sched.KindD:
		require.NoError(s.t, s.store.Drop(int64(a.Block)))
	default:
		s.t.Fatalf("no action of kind %s belongs here", a)
	}
}

// keep stores what flows as a boundary.
func (s *stepper) keep(number int) {
	kept, err := adapter.Bridge(s.flowing)
	require.NoError(s.t, err)
	require.NoError(s.t, s.store.Put(int64(number), []tensor.Tensor{kept}))
}

// graph runs a block with a graph.
func (s *stepper) graph(number int, x torch.Tensor) {
	s.inputs[number] = leaf(x)
	s.outputs[number] = block(s.inputs[number], s.weights[number])
}

func TestAWholeStepAgainstTorchsBackward(t *testing.T) {
	const blocks, rows, width = 5, 7, 16
	for _, c := range []struct{ generator, spec, store string }{
		{"sequential", `"tier": "device"`, `{}`},
		{"sequential", `"tier": "device", "keep_last": false, "keep_output": true`, `{}`},
		{"sequential", `"tier": "host"`, `{"tier": "host"}`},
		{"async", `"tier": "host", "prefetch": 2`, `{"tier": "host", "async": true}`},
		{"async", `"tier": "disk"`, `{"tier": "disk", "async": true}`},
	} {
		t.Run(c.generator+" "+c.spec, func(t *testing.T) {
			ws := weights(blocks, width)
			x := torch.RandN([]int64{rows, width}, false)

			plain := leaf(x)
			h := plain
			for _, w := range ws {
				h = block(h, w)
			}
			loss(h).Backward()
			want := make([][]byte, blocks)
			for i, w := range ws {
				want[i] = bits(t, w.Grad())
			}
			wantInput := bits(t, plain.Grad())

			spec, err := boundary.ParseSpec(c.store)
			require.NoError(t, err)
			spec.Dir = t.TempDir()
			store, err := boundary.New(spec, boundary.Options{Allocator: offheap.Allocator{}})
			require.NoError(t, err)
			list := `{}, {}, {}, {}, {}`
			text, err := sched.Generate(c.generator, fmt.Sprintf(`{"blocks": [%s], "input_grad": true, %s}`, list, c.spec))
			require.NoError(t, err)
			program, err := sched.ParseProgram(text)
			require.NoError(t, err)

			fresh := make([]torch.Tensor, blocks)
			for i, w := range ws {
				fresh[i] = leaf(w.Detach())
			}
			s := &stepper{
				t: t, store: store, weights: fresh, flowing: x, inputs: map[int]torch.Tensor{}, outputs: map[int]torch.Tensor{},
			}
			for _, action := range program[0].All() {
				s.run(action)
			}
			require.Zero(t, store.Len(), "every boundary has been dropped")
			for i := range fresh {
				require.Equal(t, want[i], bits(t, fresh[i].Grad()), "weight %d", i)
			}
			require.Equal(t, wantInput, bits(t, s.adjoint))
			require.NoError(t, store.Close())
			runtime.KeepAlive(x)
		})
	}
}
