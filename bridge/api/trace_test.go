package api

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// spansIn reads the names of a trace file's spans, sorted, by lane.
func spansIn(t *testing.T, path string) map[string][]string {
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var file struct {
		TraceEvents []struct {
			Ph, Name string
			Tid      int
			Args     map[string]any
		}
	}
	require.NoError(t, json.Unmarshal(text, &file))
	lanes, found := map[int]string{}, map[string][]string{}
	for _, e := range file.TraceEvents {
		if e.Name == "thread_name" {
			lanes[e.Tid] = e.Args["name"].(string)
		}
		if e.Ph == "X" {
			found[lanes[e.Tid]] = append(found[lanes[e.Tid]], e.Name)
		}
	}
	for _, names := range found {
		slices.Sort(names)
	}
	return found
}

// Moves and loads of boundary 7, microbatch 3, and two applications of a chain; what is not traced leaves nothing.
func TestStoresAndChainsRecordTheirWork(t *testing.T) {
	host := newHost(t)
	trace, err := TraceNew("")
	require.NoError(t, err)
	store, err := StoreNew(specs(t)["disk"], 0)
	require.NoError(t, err)
	chain, err := ChainNew(`[{"name": "clip"}]`, 0)
	require.NoError(t, err)
	key := int64(7 + 3<<20)
	round := func() {
		require.NoError(t, StorePut(store, key, host.give(1, 2, 3)))
		behind, err := stores.get(store)
		require.NoError(t, err)
		require.NoError(t, behind.Move(key))
		require.NoError(t, behind.Load(key))
		require.NoError(t, StoreDrop(store, key))
		made, err := ChainApply(chain, formatInts([]int64{host.give(3, 4)}), `{"block": 2, "microbatch": 1}`)
		require.NoError(t, err)
		addresses, err := parseInts(made)
		require.NoError(t, err)
		host.take(addresses[0])
	}
	round()
	for _, on := range []int64{trace, 0} {
		require.NoError(t, StoreTrace(store, on))
		require.NoError(t, ChainTrace(chain, on))
		round()
	}
	path := filepath.Join(t.TempDir(), "trace.json")
	require.NoError(t, TraceWrite(trace, path))
	require.Equal(t, map[string][]string{"store": {"7L3", "7S3"}, "passes": {"2P1"}}, spansIn(t, path))
	code(t, StoreTrace(store, chain), "(BridgeError|ClosedError)")
	code(t, ChainTrace(chain, store), "(BridgeError|ClosedError)")
	require.NoError(t, ChainClose(chain))
	require.NoError(t, StoreClose(store))
	require.NoError(t, TraceClose(trace))
}
