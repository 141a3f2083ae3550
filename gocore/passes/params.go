package passes

import (
	"encoding/json"
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// ParamType is the type of a parameter's value.
type ParamType string

// The parameter types. A float accepts an integer literal; an int does not accept a fraction.
const (
	Float  ParamType = "float"
	Int    ParamType = "int"
	Bool   ParamType = "bool"
	String ParamType = "string"
)

// ParamSpec documents and checks one parameter. Default holds a float64, int64, bool or string, as Type says.
type ParamSpec struct {
	Name    string
	Type    ParamType
	Default any
	// Min and Max bound a float, both inclusive; both 0 means that any finite number will do.
	Min, Max float64
	// OneOf lists the values of a string.
	OneOf []string
	Help  string
}

// Allowed says in words which values the parameter takes.
func (p ParamSpec) Allowed() string {
	switch {
	case p.Type == String:
		return "one of " + quoted(p.OneOf)
	case p.Type == Float && p.bounded() && p.Max == math.MaxFloat64:
		return fmt.Sprintf("a finite float >= %v", p.Min)
	case p.Type == Float && p.bounded():
		return fmt.Sprintf("a float from %v to %v", p.Min, p.Max)
	case p.Type == Float:
		return "a finite float"
	case p.Type == Int:
		return "a 64-bit integer"
	default:
		return "true or false"
	}
}

func (p ParamSpec) bounded() bool { return p.Min != 0 || p.Max != 0 }

// parse reads and checks a JSON value; ok is false when it is not allowed.
func (p ParamSpec) parse(raw json.RawMessage) (value any, ok bool) {
	text := strings.TrimSpace(string(raw))
	switch p.Type {
	case Float:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsInf(f, 0) || math.IsNaN(f) || (p.bounded() && (f < p.Min || f > p.Max)) {
			return nil, false
		}
		return f, true
	case Int:
		i, err := strconv.ParseInt(text, 10, 64)
		return i, err == nil
	case Bool:
		return text == "true", text == "true" || text == "false"
	default:
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return nil, false
		}
		for _, allowed := range p.OneOf {
			if s == allowed {
				return s, true
			}
		}
		return nil, false
	}
}

// Params are the checked parameters of one pass, defaults filled in.
type Params struct{ values map[string]any }

// Float is the value of a float parameter; like its siblings it panics when the spec has no such parameter of that type.
func (p Params) Float(name string) float64 { return p.values[name].(float64) }

// Int is the value of an int parameter.
func (p Params) Int(name string) int64 { return p.values[name].(int64) }

// Bool is the value of a bool parameter.
func (p Params) Bool(name string) bool { return p.values[name].(bool) }

// String is the value of a string parameter.
func (p Params) String(name string) string { return p.values[name].(string) }

// check turns the raw parameters of a pass into Params, or says what is wrong and what would be right.
func (s Spec) check(raw map[string]json.RawMessage) (Params, error) {
	values := make(map[string]any, len(s.Params))
	for _, spec := range s.Params {
		values[spec.Name] = spec.Default
		text, given := raw[spec.Name]
		if !given {
			continue
		}
		value, ok := spec.parse(text)
		if !ok {
			return Params{}, errs.E(errs.ErrValue, "pass %q: parameter %q is %s, allowed is %s", s.Name, spec.Name, text, spec.Allowed())
		}
		values[spec.Name] = value
	}
	for name := range raw {
		if _, known := values[name]; !known {
			return Params{}, errs.E(errs.ErrValue, "pass %q has no parameter %q, allowed: %s", s.Name, name, s.paramNames())
		}
	}
	return Params{values}, nil
}

func (s Spec) paramNames() string {
	if len(s.Params) == 0 {
		return "none"
	}
	names := make([]string, len(s.Params))
	for i, p := range s.Params {
		names[i] = p.Name
	}
	return quoted(names)
}

func quoted(names []string) string {
	sorted := append([]string(nil), names...)
	sort.Strings(sorted)
	for i, n := range sorted {
		sorted[i] = strconv.Quote(n)
	}
	return strings.Join(sorted, ", ")
}
