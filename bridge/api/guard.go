package api

import (
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/eae-runtime/eae-runtime/bridge/dlpack"
	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

const forkedText = "BridgeError|this process was forked after the Go core was loaded, so the core cannot be used in it; " +
	"start the process with multiprocessing's 'spawn' or 'forkserver' method instead"

var errForked = errors.New(forkedText)

// guard runs the body of one exported function: fork check, panic recovery, error text, deleters.
func guard(body func() error) (err error) {
	if dlpack.Forked() {
		return errForked
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("BridgeError|the core panicked (please report this): %v\n%s", p, debug.Stack())
		}
		drain()
	}()
	if fault := body(); fault != nil {
		return coded(fault)
	}
	return nil
}

// value is guard for a body with a result; on error the result is the zero value.
func value[T any](body func() (T, error)) (result T, err error) {
	err = guard(func() (fault error) {
		result, fault = body()
		return fault
	})
	if err != nil {
		var zero T
		return zero, err
	}
	return result, nil
}

func coded(err error) error { return fmt.Errorf("%s|%w", errs.Code(err), err) }

// drain runs what the stores' workers have left to this thread, and then the deleters of tensors from outside; it gives the number of these.
func drain() int {
	releases.Drain()
	return dlpack.Drain()
}
