package api

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/boundary"
)

// specs are the stores that the whole suite runs on.
func specs(t *testing.T) map[string]string {
	dir := t.TempDir()
	return map[string]string{
		"device":     `{}`,
		"host":       `{"tier": "host"}`,
		"host async": `{"tier": "host", "async": true}`,
		"disk":       fmt.Sprintf(`{"tier": "disk", "dir": %q}`, dir),
		"disk async": fmt.Sprintf(`{"tier": "disk", "dir": %q, "async": true}`, dir),
	}
}

func TestABoundaryComesBack(t *testing.T) {
	for name, spec := range specs(t) {
		t.Run(name, func(t *testing.T) {
			host := newHost(t)
			h, err := StoreNew(spec, 0)
			require.NoError(t, err)
			key := int64(7 + 3<<20)
			require.NoError(t, StorePut(h, key, host.give(1, 2, 3)))
			for _, start := range []func(int64, int64) (bool, error){StoreMove, StoreLoad} {
				done, err := start(h, key)
				for ; !done; done, err = StoreSettle(h, key, 100) {
					require.NoError(t, err)
				}
				require.NoError(t, err)
			}
			for ready := false; !ready; {
				ready, err = StoreWait(h, key, 100)
				require.NoError(t, err)
			}
			got, err := StoreGet(h, key)
			require.NoError(t, err)
			keys, err := StoreKeys(h)
			require.NoError(t, err)
			require.Equal(t, fmt.Sprint(key), keys)
			require.NoError(t, StoreDrop(h, key))
			has, err := StoreHas(h, key)
			require.NoError(t, err)
			require.False(t, has)
			require.Equal(t, []float32{1, 2, 3}, host.take(got), "what was got outlives the drop")
			require.NoError(t, StoreClose(h))
			require.NoError(t, StoreClose(h), "a second close does nothing")
			_, err = StoreMove(h, key)
			code(t, err, "ClosedError")
			_, err = StoreSettle(h, key, 0)
			code(t, err, "ClosedError")
		})
	}
}

func TestAWaitStartsTheLoad(t *testing.T) {
	for name, spec := range specs(t) {
		t.Run(name, func(t *testing.T) {
			host := newHost(t)
			h, err := StoreNew(spec, 0)
			require.NoError(t, err)
			require.NoError(t, StorePut(h, 1, host.give(4)))
			_, err = StoreMove(h, 1)
			require.NoError(t, err)
			for ready := false; !ready; {
				ready, err = StoreWait(h, 1, 100)
				require.NoError(t, err)
			}
			got, err := StoreGet(h, 1)
			require.NoError(t, err)
			require.Equal(t, []float32{4}, host.take(got))
			require.NoError(t, StoreClose(h))
		})
	}
}

func TestBoundariesOfSeveralTensors(t *testing.T) {
	host := newHost(t)
	h, err := StoreNew("{}", 0)
	require.NoError(t, err)
	require.NoError(t, StorePutN(h, 1, formatInts([]int64{host.give(1), host.give(2, 3)})))
	require.NoError(t, StoreCopy(h, 2, host.give(5, 6)))
	require.Equal(t, 1, host.freed, "a copy gives the original back at once")

	text, err := StoreGetN(h, 1)
	require.NoError(t, err)
	addresses, err := parseInts(text)
	require.NoError(t, err)
	require.Len(t, addresses, 2)
	require.Equal(t, []float32{1}, host.take(addresses[0]))
	require.Equal(t, []float32{2, 3}, host.take(addresses[1]))

	n, err := StoreLen(h)
	require.NoError(t, err)
	require.EqualValues(t, 2, n)
	bytes, err := StoreBytes(h)
	require.NoError(t, err)
	require.EqualValues(t, 20, bytes)
	_, err = StoreGet(h, 1)
	code(t, err, "BridgeError")

	text, err = StoreStats(h)
	require.NoError(t, err)
	var stats boundary.Stats
	require.NoError(t, json.Unmarshal([]byte(text), &stats))
	require.EqualValues(t, 2, stats.Puts)
	require.NoError(t, StoreClear(h))
	require.NoError(t, StoreClose(h))
}

func TestManyBoundariesAtOnce(t *testing.T) {
	host := newHost(t)
	h, err := StoreNew("{}", 0)
	require.NoError(t, err)
	pairs := fmt.Sprintf("1:%d,%d:%d", host.give(1, 2), 1<<20, host.give(3))
	require.NoError(t, StorePutAll(h, pairs))
	n, err := StoreLen(h)
	require.NoError(t, err)
	require.EqualValues(t, 2, n)
	address, err := StoreGet(h, 1<<20)
	require.NoError(t, err)
	require.Equal(t, []float32{3}, host.take(address))

	code(t, StorePutAll(h, fmt.Sprintf("2:%d,x:1,3:0,4:%d", host.give(4), host.give(5))), "ConfigError")
	n, err = StoreLen(h)
	require.NoError(t, err)
	require.EqualValues(t, 4, n, "what is right is stored")
	code(t, StorePutAll(-1, fmt.Sprintf("1:%d", host.give(6))), "BridgeError")
	require.NoError(t, StoreClose(h))
	code(t, StorePutAll(h, fmt.Sprintf("1:%d", host.give(7))), "ClosedError")
}

func TestTensorsAreTakenOverAlsoOnFailure(t *testing.T) {
	host := newHost(t)
	h, err := StoreNew(`{"max_bytes": 4}`, 0)
	require.NoError(t, err)
	code(t, StorePut(h, 1, host.give(1, 2)), "StoreError")
	code(t, StorePut(-1, 1, host.give(1)), "BridgeError")
	code(t, StorePutN(-1, 1, formatInts([]int64{host.give(1), host.give(2)})), "BridgeError")
	code(t, StorePutN(h, 1, formatInts([]int64{host.give(1), 0, host.give(2)})), "BridgeError")
	code(t, StoreCopy(-1, 1, host.give(1)), "BridgeError")
	code(t, StorePut(h, 1, 0), "BridgeError")
	require.NoError(t, StoreClose(h))
	code(t, StorePut(h, 1, host.give(1)), "ClosedError")
}

func TestStoreErrorsHaveTheirClass(t *testing.T) {
	newHost(t)
	_, err := StoreNew(`{"tier": "tape"}`, 0)
	code(t, err, "ConfigError")
	h, err := StoreNew("{}", 0)
	require.NoError(t, err)
	_, err = StoreGet(h, 5)
	code(t, err, "StoreKeyError")
	_, err = StoreGetN(h, 5)
	code(t, err, "StoreKeyError")
	_, err = StoreWait(h, 5, 0)
	code(t, err, "StoreKeyError")
	code(t, StoreDrop(h, 5), "StoreKeyError")
	_, err = StoreLoad(h, 5)
	code(t, err, "StoreKeyError")
	code(t, StorePutN(h, 1, "one"), "ConfigError")
	require.NoError(t, StoreClose(h))
	for name, call := range map[string]func() error{
		"has":   func() error { _, err := StoreHas(h, 1); return err },
		"len":   func() error { _, err := StoreLen(h); return err },
		"bytes": func() error { _, err := StoreBytes(h); return err },
		"keys":  func() error { _, err := StoreKeys(h); return err },
		"stats": func() error { _, err := StoreStats(h); return err },
		"clear": func() error { return StoreClear(h) },
	} {
		t.Run(name, func(t *testing.T) { code(t, call(), "ClosedError") })
	}
}
