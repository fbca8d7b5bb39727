package lowlatency

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
)

const h200 = "NVIDIA H200"

func shippedRow(t *testing.T, ranks int) *Row {
	t.Helper()
	r := Shipped().find(h200, FullyConnected, ranks, backend.AllReduce, backend.F32)
	if r == nil {
		t.Fatalf("nothing is shipped for %d ranks", ranks)
	}
	return r
}

func TestShippedTableChooses(t *testing.T) {
	for _, test := range []struct {
		ranks, nbytes int
		want          Algorithm
	}{
		{2, 1, Flagged}, {2, 64 << 10, Flagged}, {2, 256 << 10, Flagged}, {2, 1 << 20, TwoShot}, {2, 32 << 20, TwoShot}, {2, 32<<20 + 1, Inner},
		{4, 4, Flagged}, {4, 256 << 10, Flagged}, {4, 1 << 20, TwoShot}, {4, 10 << 20, TwoShot}, {4, 32 << 20, Inner}, {4, 1 << 30, Inner},
	} {
		if got := pick(shippedRow(t, test.ranks).limits(), test.nbytes); got != test.want {
			t.Errorf("%d ranks, %d bytes: %v, want %v", test.ranks, test.nbytes, got, test.want)
		}
	}
}

// Thresholds are in bytes, and nothing is chosen that was measured to be slower.
func TestThresholdsFollowTheSamples(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		r := shippedRow(t, ranks)
		limits := r.limits()
		for _, s := range r.Samples {
			for _, n := range []int{s.Bytes - 1, s.Bytes, s.Bytes + 1} {
				used, inner := r.at(pick(limits, n), n), r.at(Inner, n)
				if used > inner {
					t.Errorf("%d ranks, %d bytes: %v takes %.1f us, inner %.1f", ranks, n, pick(limits, n), used, inner)
				}
			}
		}
		for i, l := range limits[1:] {
			if l.upTo <= limits[i].upTo || l.use == limits[i].use {
				t.Errorf("limits %v", limits)
			}
		}
	}
}

func TestOtherMachinesLeaveCallsToInner(t *testing.T) {
	table := Shipped()
	for name, r := range map[string]*Row{
		"model": table.find("NVIDIA H100", FullyConnected, 2, backend.AllReduce, backend.F32),
		"link":  table.find(h200, PCIe, 2, backend.AllReduce, backend.F32),
		"ranks": table.find(h200, FullyConnected, 3, backend.AllReduce, backend.F32),
		"kind":  table.find(h200, FullyConnected, 2, backend.AllGather, backend.F32),
	} {
		if r != nil || pick(r.limits(), 1024) != Inner || !strings.Contains(r.explain(1024), "tune") {
			t.Errorf("another %s: %+v", name, r)
		}
	}
}

func TestRowOfATypeComesFirst(t *testing.T) {
	row := func(d backend.DType) Row {
		return Row{Model: h200, Link: PCIe, Ranks: 2, Kind: backend.AllReduce, DType: d}
	}
	for _, table := range []Table{{row(0), row(backend.BF16)}, {row(backend.BF16), row(0)}} {
		if r := table.find(h200, PCIe, 2, backend.AllReduce, backend.BF16); r.DType != backend.BF16 {
			t.Errorf("bf16 finds the row of %v", r.DType)
		}
		if r := table.find(h200, PCIe, 2, backend.AllReduce, backend.F32); r.DType != 0 {
			t.Errorf("f32 finds the row of %v", r.DType)
		}
	}
}

func TestExplanationShowsTheRivals(t *testing.T) {
	text := shippedRow(t, 4).explain(2 << 20)
	for _, part := range []string{"two-shot 19.0 us", "inner 26.0 us", "one-shot", "flagged up to", "then inner", "prototype"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is not in %q", part, text)
		}
	}
	if text := shippedRow(t, 4).explain(1 << 30); !strings.Contains(text, "not measured at this size") {
		t.Error(text)
	}
}

func TestTablesAreRead(t *testing.T) {
	text, err := json.Marshal(Shipped())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseTable(text); err != nil || !reflect.DeepEqual(got, Shipped()) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, wrong := range []string{"", "{", `[{"Kind": 77}]`, `[{"Kind": 1, "Samples": [{"Bytes": 2}, {"Bytes": 1}]}]`} {
		if _, err := ParseTable([]byte(wrong)); err == nil {
			t.Errorf("%q is read", wrong)
		}
	}
}
