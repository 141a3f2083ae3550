package api

import (
	"encoding/json"
	"os"
	"runtime"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/bridge/libtorch"
	"github.com/eae-runtime/eae-runtime/bridge/offheap"
	"github.com/eae-runtime/eae-runtime/gocore/boundary"
)

// version is the package's version; a test compares it with pyproject.toml.
const version = "0.2.0"

// Version gives the core's version.
func Version() (string, error) { return value(func() (string, error) { return version, nil }) }

// census is what Live reports.
type census struct {
	Stores     int64 `json:"stores"`
	Boundaries int   `json:"boundaries"`
	Pools      int64 `json:"pools"`
	Chains     int64 `json:"chains"`
	Traces     int64 `json:"traces"`
	Buffers    int64 `json:"buffers"`         // tensors handed out that their consumer still holds
	Bytes      int64 `json:"bytes"`           // bytes allocated outside Go's heap
	Files      int   `json:"files"`           // open file descriptors of the process
	Goroutines int   `json:"goroutines"`      // of the whole process
	Tensors    int64 `json:"tensors"`         // tensors from outside that the core still holds
	FailedFree int64 `json:"failed_releases"` // release functions that panicked
}

// Live says what the core holds at this moment, as JSON. Tests compare it before and after.
func Live() (string, error) {
	return value(func() (string, error) {
		drain()
		counts := dlpack.Live()
		now := census{
			Stores: stores.live(), Boundaries: boundaries(), Pools: pools.live(), Chains: chains.live(), Traces: traces.live(),
			Buffers: counts.Exported, Bytes: offheap.Live(), Files: openFiles(), Goroutines: runtime.NumGoroutine(),
			Tensors: counts.Imported, FailedFree: counts.Failed,
		}
		text, err := json.Marshal(now)
		return string(text), err
	})
}

// boundaries is the number of boundaries in all stores.
func boundaries() int {
	total := 0
	stores.objects.Range(func(_, store any) bool {
		total += store.(*boundary.Store).Len()
		return true
	})
	return total
}

func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	// The folder itself was open while it was read.
	return len(entries) - 1
}

// LoadTorch looks up torch's operators in the libtorch_cpu at that path, which must be in the process already. Passes need them only
// for tensors that are not in host memory.
func LoadTorch(path string) error {
	return guard(func() error { return libtorch.Open(path, false) })
}

// DrainReleases runs the queued deleters on the calling thread and gives their number.
func DrainReleases() (int64, error) {
	return value(func() (int64, error) { return int64(drain()), nil })
}

// AtForkChild marks this process as a forked child: from now on every call fails and deleters do nothing.
func AtForkChild() error {
	dlpack.AtForkChild()
	return nil
}
