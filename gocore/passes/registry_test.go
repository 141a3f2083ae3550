package passes

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

func TestSpecsThatAreWrong(t *testing.T) {
	cases := []struct {
		spec string
		says []string
	}{
		{``, []string{"JSON list"}},
		{`{}`, []string{"JSON list"}},
		{`[{"name":"clip"}] x`, []string{"follows"}},
		{`[{"name":"clip","parms":{}}]`, []string{"parms"}},
		{`[{"name":"nope"}]`, []string{`"nope"`, `"clip"`, `"int8"`, `"gaussian_noise"`}},
		{`[{"name":"bf16"},{"name":"clip","params":{"norm":1}}]`, []string{"item 1", `"clip"`, `"norm"`, `"max_norm"`, `"per_tensor"`}},
		{`[{"name":"int8","params":{"x":1}}]`, []string{`"int8"`, `"x"`, "none"}},
		{`[{"name":"clip","params":{"max_norm":"1"}}]`, []string{`"clip"`, `"max_norm"`, "finite float >= 0"}},
		{`[{"name":"clip","params":{"max_norm":-1}}]`, []string{`"max_norm"`, "-1", ">= 0"}},
		{`[{"name":"clip","params":{"max_norm":1e999}}]`, []string{`"max_norm"`}},
		{`[{"name":"clip","params":{"max_norm":null}}]`, []string{`"max_norm"`, "null"}},
		{`[{"name":"clip","params":{"max_norm":true}}]`, []string{`"max_norm"`}},
		{`[{"name":"clip","params":{"per_tensor":1}}]`, []string{`"per_tensor"`, "true or false"}},
		{`[{"name":"fp8","params":{"format":"e3m4"}}]`, []string{`"fp8"`, `"format"`, `"e4m3fn", "e5m2"`}},
		{`[{"name":"fp8","params":{"format":3}}]`, []string{`"format"`}},
		{`[{"name":"gaussian_noise","params":{"seed":1.5}}]`, []string{`"seed"`, "1.5", "64-bit integer"}},
		{`[{"name":"gaussian_noise","params":{"std":-0.1}}]`, []string{`"std"`}},
		{`[{"name":"regularization","params":{"strength":[]}}]`, []string{`"strength"`, "a finite float"}},
	}
	for _, c := range cases {
		_, err := NewChain(c.spec)
		require.ErrorIs(t, err, errs.ErrValue, c.spec)
		require.Equal(t, "ConfigError", errs.Code(err))
		for _, word := range c.says {
			require.ErrorContains(t, err, word, c.spec)
		}
	}
}

func TestSpecsAreDocumentedAndDefaultsAllowed(t *testing.T) {
	names := []string{}
	for _, s := range Specs() {
		names = append(names, s.Name)
		require.NotEmpty(t, s.Help, s.Name)
		for _, p := range s.Params {
			require.NotEmpty(t, p.Help, "%s.%s", s.Name, p.Name)
			require.NotEmpty(t, p.Allowed())
		}
		p, err := New(s.Name, nil)
		require.NoError(t, err)
		require.Equal(t, s.Name, p.Name())
	}
	require.Equal(t, []string{"bf16", "clip", "fp16", "fp8", "gaussian_noise", "int8", "logging", "regularization"}, names)
}

func TestRegister(t *testing.T) {
	require.ErrorIs(t, Register(Spec{Name: "clip", New: func(Params) (Pass, error) { return BF16(), nil }}), errs.ErrValue)
	require.ErrorIs(t, Register(Spec{Name: "", New: func(Params) (Pass, error) { return BF16(), nil }}), errs.ErrValue)
	require.ErrorIs(t, Register(Spec{Name: "no constructor"}), errs.ErrValue)
	bounded := ParamSpec{Name: "p", Type: Float, Default: 0.5, Min: 0.25, Max: 0.75}
	require.Equal(t, "a float from 0.25 to 0.75", bounded.Allowed())
	for text, ok := range map[string]bool{"0.25": true, "0.75": true, "0.2": false, "1": false} {
		_, got := bounded.parse([]byte(text))
		require.Equal(t, ok, got, text)
	}
	c, err := NewChain(`[{"name":"gaussian_noise","params":{"seed":-9223372036854775808,"std":1}}]`)
	require.NoError(t, err)
	require.Equal(t, []string{"gaussian_noise"}, c.Names())
	c.Close()
}
