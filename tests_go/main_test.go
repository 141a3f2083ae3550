//go:build !gotorch

package tests

import (
	"testing"

	"go.uber.org/goleak"
)

// With gotorch in the process there is a TestMain of its own, see oracle_test.go.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
