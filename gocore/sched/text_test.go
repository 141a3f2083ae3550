package sched

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/eae-runtime/eae-runtime/gocore/errs"
)

func anAction() *rapid.Generator[Action] {
	return rapid.Custom(func(t *rapid.T) Action {
		return Action{
			Block: rapid.IntRange(0, maxNumber).Draw(t, "block"),
			Kind:  Kind(rapid.IntRange(1, int(kindEnd)-1).Draw(t, "kind")),
			Micro: rapid.IntRange(All, maxNumber).Draw(t, "micro"),
		}
	})
}

func aProgram() *rapid.Generator[Program] {
	list := rapid.SliceOfN(anAction(), 0, 6)
	return rapid.Custom(func(t *rapid.T) Program {
		p := make(Program, rapid.IntRange(1, 4).Draw(t, "ranks"))
		for r := range p {
			p[r] = Phases{list.Draw(t, "forward"), list.Draw(t, "reverse")}
		}
		return p
	})
}

func TestActionsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := anAction().Draw(t, "action")
		back, err := Parse(a.String())
		require.NoError(t, err)
		assert.Equal(t, a, back)
	})
}

func TestProgramsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := aProgram().Draw(t, "program").String()
		p, err := ParseProgram(text)
		require.NoError(t, err)
		assert.Equal(t, text, p.String())
		csv, err := ToCSV(text)
		require.NoError(t, err)
		back, err := FromCSV(csv)
		require.NoError(t, err)
		assert.Equal(t, text, back)
	})
}

func TestPrinting(t *testing.T) {
	assert.Equal(t, "3R1", Action{3, KindR, 1}.String())
	assert.Equal(t, "4B*", Action{4, KindB, All}.String())
	assert.Equal(t, "2XF0", Action{2, KindXF, 0}.String())
	assert.Equal(t, "0?0", Action{}.String())
	assert.Equal(t, "?", Kind(200).String())
}

func TestCSV(t *testing.T) {
	csv, err := ToCSV("0C0 1XF0\n1YB0 0R0 0V0 0D0\n1YF0 1F0\n2B0 1V0 1XB0")
	require.NoError(t, err)
	assert.Equal(t, "0C0,1XF0,|,1YB0,0R0,0V0,0D0\n1YF0,1F0,|,2B0,1V0,1XB0\n", csv)
	for _, c := range []struct{ name, csv, text string }{
		{"idle cells and spaces", "0C0,, 1F0 ,|,,2B0\n", "0C0 1F0\n2B0"},
		{"no mark: cut at the first reverse action", "0C0,0S0,1F0,2B0,1V0\n", "0C0 0S0 1F0\n2B0 1V0"},
		{"a rank without actions", "0F0,|,1B0\n|\n", "0F0\n1B0\n\n"},
	} {
		text, err := FromCSV(c.csv)
		require.NoError(t, err, c.name)
		assert.Equal(t, c.text, text, c.name)
	}
}

// TestBadText: each error names the place and the token.
func TestBadText(t *testing.T) {
	for _, c := range []struct {
		in   string
		from func(string) error
		want []string
	}{
		{"0C0 1C0 2Q0", refusedText, []string{`line 1`, `action 3`, `"2Q0"`, `byte 1`, `unknown kind "Q"`}},
		{"0C0\n1B0 C0", refusedText, []string{`line 2`, `action 2`, `"C0"`, `byte 0`, `block number`}},
		{"0C", refusedText, []string{`"0C"`, `byte 2`, `microbatch number or *`}},
		{"0C-1", refusedText, []string{`"0C-1"`, `not a number`}},
		{"00C0", refusedText, []string{`leading zero`}},
		{"0C99999999999999999999", refusedText, []string{`too large`}},
		{"0", refusedText, []string{`unknown kind ""`}},
		{"0C0\n0B0\n0C0", refusedText, []string{`two lines a rank`, `3 lines`}},
		{strings.Repeat("7", 500), refusedText, []string{`7...`}},
		{"0C0,|,|", refusedCSV, []string{`row 1`, `cell 3`, `second "|"`}},
		{"0C0\n0C0,x", refusedCSV, []string{`row 2`, `cell 2`, `"x"`}},
		{"", refusedCSV, []string{`no row`}},
		{`0C0,"`, refusedCSV, []string{`row 1`, `quote`}},
	} {
		err := c.from(c.in)
		require.ErrorIs(t, err, errs.ErrSchedule, "%q", c.in)
		for _, w := range c.want {
			assert.ErrorContains(t, err, w)
		}
	}
}

func refusedText(s string) error { _, err := ToCSV(s); return err }
func refusedCSV(s string) error  { _, err := FromCSV(s); return err }

func FuzzParse(f *testing.F) {
	for _, s := range []string{"0C0 1C0 2F0\n3B0 2V0", "4B*", "2XF0", "0?0", "\n\n", "1 C0", "0C00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParseProgram(s)
		if err != nil {
			require.ErrorIs(t, err, errs.ErrSchedule)
			return
		}
		again, err := ParseProgram(p.String())
		require.NoError(t, err)
		assert.Equal(t, p, again)
	})
}

func FuzzFromCSV(f *testing.F) {
	for _, s := range []string{"0C0,1F0,|,2B0,1V0\n", "0C0,,2B0\n|\n", "\"0C0\",|", "a,b", "|,|"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		text, err := FromCSV(s)
		if err != nil {
			require.ErrorIs(t, err, errs.ErrSchedule)
			return
		}
		csv, err := ToCSV(text)
		require.NoError(t, err)
		again, err := FromCSV(csv)
		require.NoError(t, err)
		assert.Equal(t, text, again)
	})
}

// FuzzValidate: no spec and no text brings the validator down.
func FuzzValidate(f *testing.F) {
	f.Add(`{"blocks":[{},{}]}`, "0C0 1F0\n2B0 1V0 0R0 0V0 0D0")
	f.Add(`{"blocks":[{},{}],"world":2,"tier":"host"}`, "0C0 1XF0\n1YB0\n1YF0\n")
	f.Fuzz(func(t *testing.T, spec, text string) {
		if s, err := ParseSpec(spec); err == nil && // small ones: large specs only take longer
			(s.Len()+1)*s.Microbatches*s.World < 1<<12 {
			if p, err := ParseProgram(text); err == nil {
				_ = Check(s, p)
			}
		}
	})
}
