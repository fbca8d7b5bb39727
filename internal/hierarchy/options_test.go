package hierarchy

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestOptionsAreParsed(t *testing.T) {
	for text, want := range map[string]Options{
		"":                   {},
		"auto":               {Mode: Auto},
		"always":             {Mode: Always},
		"never, spans=4096":  {Mode: Never, Spans: 4096},
		"exchange=bf16":      {Exchange: backend.BF16},
		"slots=2,slice=4096": {Slots: 2, SliceBytes: 4096},
		"always,exchange=f16,slice=1,slots=2,spans=3": {Mode: Always, Exchange: backend.F16,
			SliceBytes: 1, Slots: 2, Spans: 3},
	} {
		require.Equal(t, text, require.Got(ParseOptions(text, false))(t), want)
	}
	for text, want := range map[string]Mode{"": Always, "spans=1": Always, "auto": Auto,
		"never": Never} {
		require.Equal(t, fmt.Sprintf("%q where a topology is declared", text),
			require.Value(ParseOptions(text, true))(t).Mode, want)
	}
	for text, say := range map[string]string{
		"yes":             `no mode or option is called "yes"`,
		"always,":         `is called ""`,
		"always,auto":     "the mode is there twice",
		"spans=1,spans=2": "the spans is there twice",
		"exchange=f32":    `an exchange in "f32"`,
		"exchange":        `an exchange in ""`,
		"spans=many":      `spans is "many"`,
		"slots=-1":        `slots is "-1"`,
	} {
		_, err := ParseOptions(text, false)
		require.Fails(t, text, err, backend.ErrArgument, say, "use auto, always or never",
			"EURYALE_HIERARCHY")
	}
}

func TestOptionsFollowFromTheSetting(t *testing.T) {
	t.Setenv(string(env.Tuning), filepath.Join(t.TempDir(), "tuning.json"))
	real, declared := tenth(), tenth()
	declared.Step = 77 * time.Microsecond
	grid := Grid(2, 2)
	for _, m := range []Measurement{{"m", 2, 2, false, *real, "machines"},
		{"m", 2, 2, true, *declared, "one machine"}} {
		require.NoError(t, require.Err(m.Keep()))
	}
	together, round := *declared, DefaultLinks()
	together.Between = together.Inside
	round.Between = round.Inside
	for _, test := range []struct {
		s      Setting
		mode   Mode
		links  Links
		source string
	}{
		{Setting{Layout: grid, Model: "m"}, Auto, *real, "measured: machines"},
		{Setting{Layout: grid, Model: "m", Declared: true}, Always, *declared,
			"measured: one machine"},
		{Setting{Layout: grid, Model: "m", Declared: true, Together: true}, Always, together,
			"between declared machines as inside"},
		{Setting{Layout: grid, Model: "n", Declared: true, Together: true}, Always, round,
			"round numbers"},
		{Setting{Layout: Grid(4, 1), Model: "m"}, Auto, DefaultLinks(),
			"round numbers"},
	} {
		o, source, err := test.s.Options("")
		require.Check(t, err == nil && o.Mode == test.mode && *o.Links == test.links &&
			strings.Contains(source,
				test.source), "%+v: %+v, links %+v, %s, %v", test.s, o, o.Links, source, err)
	}
	o, _, err := (Setting{Layout: grid, Declared: true}).Options("auto,spans=2")
	require.Check(t, err == nil && o.Mode == Auto && o.Spans == 2, "%+v, %v", o, err)
}

// What a user writes by mistake is an error, and no attempt to get the memory.
func TestFoundSlotsTakeAllMemory(t *testing.T) {
	for _, text := range []string{"always,slots=99999999", "always,spans=99999999999",
		"always,slots=1024,slice=999999999999"} {
		o := require.Value(ParseOptions(text, true))(t)
		require.Fails(t, text, require.Err(NewPlan(Grid(2, 2), o)), backend.ErrArgument)
	}
}
