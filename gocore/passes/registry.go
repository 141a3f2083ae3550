package passes

import (
	"bytes"
	"encoding/json"
	"io"
	"sort"
	"sync"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

// Spec describes a kind of pass: its name, what it does in a sentence, its parameters, and how to make one.
type Spec struct {
	Name   string
	Help   string
	Params []ParamSpec
	New    func(Params) (Pass, error)
}

var (
	registryMu sync.RWMutex
	registry   = map[string]Spec{}
)

// Register makes a kind of pass known to NewChain. It returns errs.ErrValue for a name that is taken or empty and for a spec without New.
func Register(s Spec) error {
	registryMu.Lock()
	defer registryMu.Unlock()
	if s.Name == "" || s.New == nil {
		return errs.E(errs.ErrValue, "a pass needs a name and a constructor")
	}
	if _, taken := registry[s.Name]; taken {
		return errs.E(errs.ErrValue, "pass %q is registered already", s.Name)
	}
	registry[s.Name] = s
	return nil
}

// mustRegister is Register for the passes of this package, whose names are distinct.
func mustRegister(s Spec) {
	if err := Register(s); err != nil {
		panic(err)
	}
}

// Specs lists the registered passes by name.
func Specs() []Spec {
	registryMu.RLock()
	defer registryMu.RUnlock()
	specs := make([]Spec, 0, len(registry))
	for _, s := range registry {
		specs = append(specs, s)
	}
	sort.Slice(specs, func(i, j int) bool { return specs[i].Name < specs[j].Name })
	return specs
}

// New makes one pass from its name and the JSON object of its parameters (nil: all defaults). Errors are errs.ErrValue and name the pass, the
// parameter and what is allowed.
func New(name string, params map[string]json.RawMessage) (Pass, error) {
	registryMu.RLock()
	spec, known := registry[name]
	registryMu.RUnlock()
	if !known {
		specs := Specs()
		names := make([]string, len(specs))
		for i, s := range specs {
			names[i] = s.Name
		}
		return nil, errs.E(errs.ErrValue, "no pass is named %q, registered: %s", name, quoted(names))
	}
	checked, err := spec.check(params)
	if err != nil {
		return nil, err
	}
	return spec.New(checked)
}

// parse reads a chain's spec: a JSON list of {"name": ..., "params": {...}}.
func parse(spec string) ([]Pass, error) {
	var items []struct {
		Name   string                     `json:"name"`
		Params map[string]json.RawMessage `json:"params"`
	}
	decoder := json.NewDecoder(bytes.NewReader([]byte(spec)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&items); err != nil {
		return nil, errs.E(errs.ErrValue, "a chain is a JSON list of {\"name\", \"params\"}: %w", err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return nil, errs.E(errs.ErrValue, "something follows the JSON list of a chain")
	}
	list := make([]Pass, len(items))
	for i, item := range items {
		p, err := New(item.Name, item.Params)
		if err != nil {
			return nil, errs.E(errs.ErrValue, "chain item %d: %w", i, err)
		}
		list[i] = p
	}
	return list, nil
}
