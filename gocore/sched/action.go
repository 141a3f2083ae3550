package sched

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Kind says what an action does. The zero value is no kind.
type Kind uint8

// The kinds, named as they print. For KindS, KindL, KindD, KindP and the four messages the action's number is a boundary's; for KindB it
// is the number of blocks; for the others a block's.
const (
	KindF  Kind = iota + 1 // forward, graph kept
	KindC                  // forward, graph not kept, input boundary kept
	KindN                  // forward, graph not kept, input boundary not kept
	KindR                  // rebuild
	KindV                  // full VJP
	KindI                  // VJP for the input only
	KindW                  // VJP for the weights only
	KindP                  // adjoint passes at this boundary
	KindG                  // gradient passes for this block's parameters
	KindU                  // update this block's parameters
	KindS                  // store: start moving a boundary to its tier
	KindL                  // load: start bringing it back
	KindD                  // drop a boundary
	KindB                  // boundary operator: the loss and the adjoint of the output (paper, eq. 7-13)
	KindXF                 // send an activation
	KindYF                 // receive an activation
	KindXB                 // send an adjoint
	KindYB                 // receive an adjoint
	kindEnd
)

var kindNames = [kindEnd]string{
	"?", "F", "C", "N", "R", "V", "I", "W", "P", "G", "U", "S", "L", "D", "B", "XF", "YF", "XB", "YB",
}

// String is the kind's letters, "?" for no kind.
func (k Kind) String() string {
	if k >= kindEnd {
		k = 0
	}
	return kindNames[k]
}

// ParseKind is the inverse of [Kind.String]; anything else is ErrSchedule.
func ParseKind(s string) (Kind, error) {
	for k := Kind(1); k < kindEnd; k++ {
		if kindNames[k] == s {
			return k, nil
		}
	}
	return 0, errs.E(errs.ErrSchedule, "unknown kind %q", s)
}

func (k Kind) isForward() bool { return k == KindF || k == KindC || k == KindN }

// All is the microbatch number of an action that covers every microbatch; it prints as "*".
const All = -1

// Action is one step of a schedule: a kind, the block or boundary that it works on, and the microbatch (or [All]).
type Action struct {
	Block int
	Kind  Kind
	Micro int
}

// String prints block, kind, microbatch: "3R1", "4B*".
func (a Action) String() string {
	return string(a.append(nil))
}

func (a Action) append(b []byte) []byte {
	b = strconv.AppendInt(b, int64(a.Block), 10)
	b = append(b, a.Kind.String()...)
	if a.Micro == All {
		return append(b, '*')
	}
	return strconv.AppendInt(b, int64(a.Micro), 10)
}

// maxNumber bounds block and microbatch numbers in text, so that they fit an int everywhere.
const maxNumber = 1<<31 - 1

// Parse is the inverse of [Action.String]. It accepts only what String prints (no sign, no leading zero); anything else is ErrSchedule
// naming the token and the byte at which it goes wrong.
func Parse(token string) (Action, error) {
	at := span(token, 0, isDigit)
	block, err := number(token[:at])
	if err != nil {
		return Action{}, badToken(token, 0, "a block number is expected: "+err.Error())
	}
	end := span(token, at, isUpper)
	kind, err := ParseKind(token[at:end])
	if err != nil {
		return Action{}, badToken(token, at, err.Error())
	}
	if token[end:] == "*" {
		return Action{block, kind, All}, nil
	}
	micro, err := number(token[end:])
	if err != nil {
		return Action{}, badToken(token, end, "a microbatch number or * is expected: "+err.Error())
	}
	return Action{block, kind, micro}, nil
}

func badToken(token string, at int, why string) error {
	if len(token) > 40 {
		token = token[:40] + "..."
	}
	return errs.E(errs.ErrSchedule, "bad action %q at byte %d: %s", token, at, why)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }
func isUpper(c byte) bool { return 'A' <= c && c <= 'Z' }

// span gives the end of the run of bytes that satisfy ok, starting at from.
func span(s string, from int, ok func(byte) bool) int {
	for from < len(s) && ok(s[from]) {
		from++
	}
	return from
}

func number(s string) (int, error) {
	if s == "" {
		return 0, fmt.Errorf("nothing there")
	}
	if span(s, 0, isDigit) != len(s) {
		return 0, fmt.Errorf("not a number")
	}
	if len(s) > 1 && s[0] == '0' {
		return 0, fmt.Errorf("leading zero")
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n > maxNumber {
		return 0, fmt.Errorf("number too large")
	}
	return int(n), nil
}

// Schedule is a list of actions that one rank runs in order.
type Schedule []Action

// String prints the actions separated by single spaces.
func (s Schedule) String() string {
	b := make([]byte, 0, 5*len(s))
	for i, a := range s {
		if i > 0 {
			b = append(b, ' ')
		}
		b = a.append(b)
	}
	return string(b)
}

// ParseSchedule is the inverse of [Schedule.String]; it accepts any run of white space between actions. An error is ErrSchedule naming the token
// and its place in the list, counted from 1. The empty text is the empty schedule.
func ParseSchedule(text string) (Schedule, error) {
	var out Schedule
	for i, token := range strings.Fields(text) {
		a, err := Parse(token)
		if err != nil {
			return nil, errs.E(errs.ErrSchedule, "action %d: %w", i+1, err)
		}
		out = append(out, a)
	}
	return out, nil
}
