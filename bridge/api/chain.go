package api

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/eae-runtime/eae-runtime/bridge/offheap"
	"github.com/eae-runtime/eae-runtime/gocore/errs"
	"github.com/eae-runtime/eae-runtime/gocore/memory"
	"github.com/eae-runtime/eae-runtime/gocore/passes"
	"github.com/eae-runtime/eae-runtime/gocore/tensor"
	"github.com/eae-runtime/eae-runtime/gocore/trace"
)

var chains = table[*passChain]{noun: "chain of passes"}

// keepPerSize is how many idle result buffers of one size a chain keeps: those of a boundary's tensors and of the boundary before, which
// may still be in use.
const keepPerSize = 8

// passChain is a chain of passes with the pool that its results come from.
type passChain struct {
	chain *passes.Chain
	pool  *memory.Pool
	owned bool // the pool is the chain's own
	trace atomic.Pointer[trace.Recorder]
}

// Get lends the memory of a result; it goes back when the tensor dies.
func (c *passChain) Get(bytes int64) (unsafe.Pointer, func(), error) {
	buffer, err := c.pool.Get(context.Background(), bytes)
	if err != nil {
		return nil, nil, err
	}
	return buffer.Ptr, func() {
		// Put fails only for a buffer that is not lent, and each is given back once.
		if err := c.pool.Put(buffer); err != nil {
			panic(err)
		}
	}, nil
}

// applyContext is what ChainApply is told about a gradient; see passes.Grad.
type applyContext struct {
	Step       int64   `json:"step"`
	Block      int64   `json:"block"`
	Microbatch int64   `json:"microbatch"`
	LossScale  float64 `json:"loss_scale"`
	Rows       int64   `json:"rows"`
	Weight     float64 `json:"weight"`
	Report     bool    `json:"report"` // the reports follow the addresses on a second line
	Stats      bool    `json:"stats"`  // statistics are computed for the passes that log them
}

// apply takes tensors, which it takes over, through the passes and gives the results.
func (c *passChain) apply(in []*tensor.Tensor, about applyContext) ([]*tensor.Tensor, error) {
	grad := &passes.Grad{
		Src: make([]tensor.Tensor, len(in)), LossScale: about.LossScale, Step: about.Step, Block: about.Block,
		Microbatch: about.Microbatch, Rows: about.Rows, Weight: about.Weight,
	}
	for i, t := range in {
		grad.Src[i] = *t
		t.Release = nil
	}
	defer func() {
		for i := range grad.Src {
			grad.Src[i].Free()
		}
	}()
	recorder := c.trace.Load()
	start := recorder.Start()
	if err := c.chain.Apply(&passes.Context{Buffers: c, Stats: about.Stats, MoveUnchanged: true}, grad); err != nil {
		return nil, err
	}
	if recorder != nil {
		recorder.End(trace.LanePasses, fmt.Sprintf("%dP%d", about.Block, about.Microbatch), start, 0)
	}
	out := make([]*tensor.Tensor, len(grad.Dst))
	for i := range grad.Dst {
		out[i] = &grad.Dst[i]
	}
	return out, nil
}

// ChainNew makes a chain of passes from a JSON list of {"name", "params"} (see passes.NewChain), with the memory of its results from that
// pool, which has to be closed after it; 0 gives it a pool of its own.
func ChainNew(spec string, poolHandle int64) (int64, error) {
	return value(func() (int64, error) {
		pool, err := poolOf(poolHandle)
		if err != nil {
			return 0, err
		}
		chain, err := passes.NewChain(spec)
		if err != nil {
			return 0, err
		}
		owned := pool == nil
		if owned {
			pool, err = memory.NewPool(memory.PoolOptions{Allocator: offheap.Allocator{}, MaxPerKey: keepPerSize})
		}
		if err != nil {
			chain.Close()
			return 0, err
		}
		return chains.add(&passChain{chain: chain, pool: pool, owned: owned}), nil
	})
}

// ChainApply takes the tensors of one boundary, comma separated addresses, through the passes in one crossing. The tensors are not written; the
// results, comma separated addresses, lie in pooled memory, and a tensor that no pass changes comes back as it is. about is a
// JSON object {step, block, microbatch, loss_scale, rows, weight, report, stats}; with report the passes' reports follow on a second line.
func ChainApply(h int64, dls, about string) (string, error) {
	return value(func() (string, error) {
		addresses, err := parseInts(dls)
		if err != nil {
			return "", err
		}
		in, err := importAll(addresses)
		if err != nil {
			return "", err
		}
		// Does nothing for tensors that the chain has taken over.
		defer freeAll(in)
		chain, err := chains.get(h)
		if err != nil {
			return "", err
		}
		var grad applyContext
		if about != "" {
			if err := json.Unmarshal([]byte(about), &grad); err != nil {
				return "", errs.E(errs.ErrValue, "the context of a chain of passes: %w", err)
			}
		}
		out, err := chain.apply(in, grad)
		if err != nil {
			return "", err
		}
		made, err := exportAll(out)
		if err != nil {
			return "", err
		}
		text := formatInts(made)
		if grad.Report {
			text += "\n" + chain.chain.Meta()
		}
		return text, nil
	})
}

// ChainMeta gives what each pass reported about the last ChainApply, as a JSON list.
func ChainMeta(h int64) (string, error) {
	return value(func() (string, error) {
		chain, err := chains.get(h)
		if err != nil {
			return "", err
		}
		return chain.chain.Meta(), nil
	})
}

// ChainState gives the state of each pass as a JSON list, null for a pass without.
func ChainState(h int64) (string, error) {
	return value(func() (string, error) {
		chain, err := chains.get(h)
		if err != nil {
			return "", err
		}
		state, err := readState(chain.chain)
		if err != nil {
			return "", err
		}
		list := make([][]byte, len(state.Passes))
		for i, p := range state.Passes {
			list[i] = p.State
		}
		text, err := json.Marshal(list)
		return string(text), err
	})
}

// ChainSetState puts back what ChainState gave; null leaves a pass as it is. After an error all passes are as they were.
func ChainSetState(h int64, text string) error {
	return guard(func() error {
		chain, err := chains.get(h)
		if err != nil {
			return err
		}
		var list [][]byte
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			return errs.E(errs.ErrValue, "this is not the state of a chain of passes: %w", err)
		}
		state, err := readState(chain.chain)
		if err != nil {
			return err
		}
		if len(list) != len(state.Passes) {
			return errs.E(errs.ErrValue, "a state of %d passes does not fit a chain of %d", len(list), len(state.Passes))
		}
		for i, saved := range list {
			if saved != nil {
				state.Passes[i].State = saved
			}
		}
		whole, err := json.Marshal(state)
		if err != nil {
			return err
		}
		return chain.chain.SetState(string(whole))
	})
}

// ChainTrace has each ChainApply recorded by the trace of that handle, on the lane "passes" and named as the action ("3P0"); 0 ends it.
func ChainTrace(h, traceHandle int64) error {
	return guard(func() error {
		chain, err := chains.get(h)
		if err != nil {
			return err
		}
		recorder, err := recorderOf(traceHandle)
		if err == nil {
			chain.trace.Store(recorder)
		}
		return err
	})
}

// ChainClose ends the chain's workers and frees its idle memory; results that are alive stay valid. A second call does nothing.
func ChainClose(h int64) error {
	return guard(func() error {
		if chain, ok := chains.remove(h); ok {
			chain.chain.Close()
			if chain.owned {
				chain.pool.Close()
			}
		}
		return nil
	})
}

// chainState is the form of passes.Chain.State.
type chainState struct {
	Version int `json:"version"`
	Passes  []struct {
		Name  string `json:"name"`
		State []byte `json:"state,omitempty"`
	} `json:"passes"`
}

func readState(chain *passes.Chain) (chainState, error) {
	var state chainState
	text, err := chain.State()
	if err != nil {
		return state, err
	}
	return state, json.Unmarshal([]byte(text), &state)
}
