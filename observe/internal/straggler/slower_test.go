package straggler

import (
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// A level is slower once three steps in a row are, by a quarter of three fast ones in a row.
func TestALevelIsSlowerAfterThreeSteps(t *testing.T) {
	for _, test := range []struct{ steps, more []time.Duration }{
		{[]time.Duration{9, 9, 9, 18, 18, 18, 9}, []time.Duration{0, 0, 0, 0, 0, 9, 0}},
		{[]time.Duration{8, 8, 8, 20, 8, 20, 20}, make([]time.Duration, 7)}, // two are noise
		{[]time.Duration{8, 8, 8, 9, 9, 9, 9}, make([]time.Duration, 7)},
		{[]time.Duration{90, 8, 90, 9, 10, 30, 20, 20}, []time.Duration{0, 0, 0, 0, 0, 0, 0, 0}},
		{[]time.Duration{90, 8, 8, 8, 30, 20, 20}, []time.Duration{0, 0, 0, 0, 0, 0, 12}},
	} {
		var l Level
		var got, want []time.Duration
		for i, d := range test.steps {
			got, want = append(got, l.Add(d*ms)), append(want, test.more[i]*ms)
		}
		require.Slices(t, "how much slower", got, want)
	}
}

func TestWhatBecomesSlowerIsNamed(t *testing.T) {
	const layer = 12345
	slow := Slower{GPU: 6 * ms, Layer: layer, InIt: 4 * ms}
	bucket := func(n int, d time.Duration) Slower { return Slower{Bucket: n, OfIt: d} }
	for name, test := range map[string]struct {
		change func(s []Sample)
		want   []string
	}{
		"no rank waits for it": {func(s []Sample) { s[2].Slower = slow },
			[]string{"rank 2: its GPU takes 6 ms longer than it did, mostly in h.3, 20 % of a " +
				"step: compare"}},
		"a layer alone": {func(s []Sample) { s[2].Slower = Slower{Layer: layer, InIt: 4 * ms} },
			[]string{"rank 2: its GPU takes 4 ms longer than it did, mostly in h.3, 13 % of a " +
				"step: compare"}},
		"all layers": {func(s []Sample) {
			s[2].Slower = Slower{GPU: 6 * ms, Layer: layer, InIt: 3 * ms}
		}, []string{"rank 2: its GPU takes 6 ms longer than it did, 20 % of a step: compare"}},
		"the others wait": {func(s []Sample) {
			lateBy(s, 2, 6*ms)
			for r := range s {
				s[r].Slower = bucket(1, 6*ms)
			}
			s[2].Slower, s[2].Noted[Device] = slow, 6*ms
		}, []string{"rank 2 was late by 6 ms a step"}},
		"another cause": {func(s []Sample) {
			lateBy(s, 2, 20*ms)
			s[2].Noted[Loader] = 20 * ms
			for r := range s {
				s[r].Slower = bucket(1, 20*ms)
			}
			s[2].Slower = Slower{}
		}, []string{"rank 2 was late by 20 ms a step"}},
		"a bucket": {func(s []Sample) {
			for r := range s {
				s[r].Slower = bucket(3, time.Duration(5+r)*ms)
			}
		}, []string{"all ranks: bucket 2 takes 5 ms longer than it did, 17 % of a step: compare " +
			"its links"}},
		"two buckets": {func(s []Sample) {
			for r := range s {
				s[r].Slower = bucket(1+r, 5*ms)
			}
		}, nil},
		"little": {func(s []Sample) {
			for r := range s {
				s[r].Slower = bucket(3, ms)
			}
			s[1].GPU = ms
		}, nil},
	} {
		all := Tally{Layer: func(number float64) string {
			return map[float64]string{layer: "h.3"}[number]
		}}
		add(step(4, test.change), &all)
		got := all.Verdicts()
		require.Equal(t, name+": verdicts", len(got), len(test.want))
		for i, v := range got {
			require.Check(t, strings.HasPrefix(v.String(), test.want[i]), "%s: %v", name, v)
			require.Check(t, v.Late == 0 || name == "another cause" || strings.HasSuffix(v.String(),
				"what else runs there; its GPU takes 6 ms longer than it did, mostly in h.3"),
				"%s: %v", name, v)
		}
	}
}
