// Package errs holds the sentinel errors of the core. Each one mirrors a class of the Python exception tree; [Code] names it.
package errs

import (
	"errors"
	"fmt"
)

var (
	// ErrPlan is returned when no schedule can satisfy what was asked for.
	ErrPlan = errors.New("plan error")
	// ErrSchedule is returned when a schedule breaks a rule: an action uses what does not exist yet or is gone already.
	ErrSchedule = errors.New("schedule error")
	// ErrStore is returned when a boundary cannot be stored or loaded: no space, a damaged file, a cap reached.
	ErrStore = errors.New("store error")
	// ErrStoreKey is returned when a boundary is asked for that was never stored or has been dropped.
	ErrStoreKey = errors.New("no such boundary")
	// ErrPass is returned when a pass fails, panics, or is given a gradient that it cannot transform.
	ErrPass = errors.New("pass error")
	// ErrBridge is returned when a tensor cannot cross the bridge or a handle is unknown.
	ErrBridge = errors.New("bridge error")
	// ErrTimeout is returned when a wait for a tier ran past its deadline.
	ErrTimeout = errors.New("timeout")
	// ErrClosed is returned when a closed object is used.
	ErrClosed = errors.New("closed")
	// ErrValue is returned when an argument or option has a value that is not allowed.
	ErrValue = errors.New("bad value")
)

// codes pairs each sentinel with the Python class that it becomes. The first match wins, so the more specific ones stand first.
var codes = []struct {
	err  error
	code string
}{
	{ErrStoreKey, "StoreKeyError"},
	{ErrTimeout, "StoreTimeoutError"},
	{ErrClosed, "ClosedError"},
	{ErrValue, "ConfigError"},
	{ErrPlan, "PlanError"},
	{ErrSchedule, "ScheduleError"},
	{ErrStore, "StoreError"},
	{ErrPass, "PassError"},
	{ErrBridge, "BridgeError"},
}

// E makes an error of the given kind whose text is the formatted message alone; errors.Is(err, kind) holds, and a %w in the
// format keeps its own chain.
func E(kind error, format string, args ...any) error {
	return &kinded{kind: kind, err: fmt.Errorf(format, args...)}
}

type kinded struct{ kind, err error }

func (k *kinded) Error() string   { return k.err.Error() }
func (k *kinded) Unwrap() []error { return []error{k.kind, k.err} }

// Code names the Python exception class for err; an error that is of no known kind is a "BridgeError".
func Code(err error) string {
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return "BridgeError"
}
