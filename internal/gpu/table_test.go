package gpu

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

const h200 = "NVIDIA H200"

// h200s is that many H200, as a user names them: with NVLinks between each two, without their
// number.
func h200s(ranks int) Survey { return Survey{Model: h200, Link: FullyConnected, Ranks: ranks} }

// rowOf returns the row of the prototype for a number of ranks, 2 or 4.
func rowOf(ranks int) *Row {
	return prototype().find(h200s(ranks), backend.AllReduce, backend.F32)
}

func TestTableChooses(t *testing.T) {
	for _, test := range []struct {
		ranks, nbytes int
		want          Algorithm
	}{
		{2, 1, byLL}, {2, 64 << 10, byLL}, {2, 256 << 10, byLL}, {2, 1 << 20, byTwoShot},
		{2, 32 << 20, byTwoShot}, {2, 32<<20 + 1, byNCCL},
		{4, 4, byLL}, {4, 256 << 10, byLL}, {4, 1 << 20, byTwoShot}, {4, 10 << 20, byTwoShot},
		{4, 32 << 20, byNCCL}, {4, 1 << 30, byNCCL},
	} {
		if got := pick(rowOf(test.ranks).limits(), test.nbytes); got != test.want {
			t.Errorf("%d ranks, %d bytes: %v, want %v", test.ranks, test.nbytes, got, test.want)
		}
	}
}

// Thresholds are in bytes, and nothing is chosen that was measured to be slower, but
// for a few percent where times cross between two samples.
func TestThresholdsFollowTheSamples(t *testing.T) {
	for _, r := range append(prototype(), Shipped()...) {
		limits := r.limits()
		for _, s := range r.Samples {
			for _, n := range []int{s.Bytes - 1, s.Bytes, s.Bytes + 1} {
				used, nccl := r.at(pick(limits, n), n), r.at(byNCCL, n)
				if used > 1.03*nccl {
					t.Errorf("%v, %d bytes: %v takes %.1f us, NCCL %.1f", r, n, pick(limits, n),
						used, nccl)
				}
			}
		}
		for i, l := range limits[1:] {
			require.Check(t, l.upTo > limits[i].upTo && l.use != limits[i].use, "limits %v", limits)
		}
	}
}

func TestShippedTableIsForH200(t *testing.T) {
	table := require.Value(parseTable(shipped))(t)
	for _, ranks := range []int{2, 4} {
		for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			if r := table.find(h200s(ranks), backend.AllReduce, d); r == nil ||
				r.best(1024) == byNCCL {
				t.Errorf("all-reduces of %v among %d ranks: %v", d, ranks, r)
			}
		}
	}
	for _, r := range table {
		require.Check(t, r.Capability != 0 && (r.NVLinks == 0) == (r.Link == PCIe) && !r.Quick,
			"devices of its kind do not find the row of %v of %v among %d ranks of %s", r.Kind,
			r.DType, r.Ranks, r.Model)
	}
}

func TestOtherMachinesLeaveCallsToNCCL(t *testing.T) {
	table := prototype()
	for name, r := range map[string]*Row{
		"model": table.find(Survey{Model: "NVIDIA H100", Link: FullyConnected, Ranks: 2},
			backend.AllReduce, backend.F32),
		"link": table.find(Survey{Model: h200, Link: PCIe, Ranks: 2}, backend.AllReduce,
			backend.F32),
		"ranks": table.find(h200s(3), backend.AllReduce, backend.F32),
		"kind":  table.find(h200s(2), backend.AllGather, backend.F32),
	} {
		require.Check(t, r == nil && pick(r.limits(), 1024) == byNCCL &&
			strings.Contains(r.explain(h200, 1024), "tune"), "another %s: %+v", name, r)
	}
}

func TestDevicesTakeTheRowOfTheirModelElseOfTheirKind(t *testing.T) {
	row := func(m Survey, d backend.DType) Row {
		return Row{Model: m.Model, Capability: m.Capability, Link: m.Link, NVLinks: m.NVLinks,
			Ranks: m.Ranks, Kind: backend.AllReduce, DType: d}
	}
	kind := func(model string, capability int, l Link, nvlinks int) Survey {
		return Survey{Model: model, Capability: capability, Link: l, NVLinks: nvlinks, Ranks: 2}
	}
	table := Table{
		row(kind(h200, 90, FullyConnected, 18), backend.F32),
		row(kind("H100", 90, FullyConnected, 18), 0),
		row(kind("A100", 0, FullyConnected, 0), 0), // of an older file
		row(kind("L40", 89, PCIe, 0), 0),
	}
	three := kind("H100", 90, FullyConnected, 18)
	three.Ranks = 3
	for name, test := range map[string]struct {
		m    Survey
		want string
	}{
		"the model":               {kind(h200, 90, FullyConnected, 18), h200},
		"the model, not the type": {kind("H100", 90, FullyConnected, 18), "H100"},
		"another of its kind":     {kind("GH200", 90, FullyConnected, 18), h200},
		"on PCIe":                 {kind("L4", 89, PCIe, 0), "L40"},
		"a model alone":           {kind("H100", 0, FullyConnected, 0), "H100"},
		"an older file's":         {kind("A100", 80, FullyConnected, 12), "A100"},
		"not of its kind":         {kind("A800", 80, FullyConnected, 8), ""},
		"fewer links":             {kind("H100 NVL", 90, FullyConnected, 12), ""},
		"fewer links, the model":  {kind(h200, 90, FullyConnected, 12), ""},
		"another link":            {kind(h200, 90, PCIe, 0), ""},
		"newer":                   {kind("B200", 100, FullyConnected, 18), ""},
		"more ranks":              {three, ""},
	} {
		r := table.find(test.m, backend.AllReduce, backend.F32)
		require.Check(t, (r == nil) == (test.want == "") && (r == nil || r.Model == test.want) &&
			table.serves(test.m) == (r != nil), "%s: %+v", name, r)
		if text := r.explain(test.m.Model, 1024); r != nil && strings.Contains(text,
			"measured on "+r.Model) != (r.Model != test.m.Model) {
			t.Errorf("%s: %s", name, text)
		}
	}
}

func TestRowOfATypeComesFirst(t *testing.T) {
	row := func(d backend.DType) Row {
		return Row{Model: h200, Link: PCIe, Ranks: 2, Kind: backend.AllReduce, DType: d}
	}
	for _, table := range []Table{{row(0), row(backend.BF16)}, {row(backend.BF16), row(0)}} {
		m := Survey{Model: h200, Link: PCIe, Ranks: 2}
		r := table.find(m, backend.AllReduce, backend.BF16)
		require.Check(t, r.DType == backend.BF16, "bf16 finds the row of %v", r.DType)
		if r := table.find(m, backend.AllReduce, backend.F32); r.DType != 0 {
			t.Errorf("f32 finds the row of %v", r.DType)
		}
	}
}

func TestExplanationShowsAllTimes(t *testing.T) {
	text := rowOf(4).explain(h200, 2<<20)
	for _, part := range []string{"two-shot 19.0 us", "nccl 26.0 us", "one-shot", "ll up to",
		"then nccl", "prototype"} {
		require.Check(t, strings.Contains(text, part), "%q is not in %q", part, text)
	}
	if text := rowOf(4).explain(h200, 1<<30); !strings.Contains(text, "not measured at this size") {
		t.Error(text)
	}
}

// Of halves of an all-reduce the largest operand counts, and what the table says of their kind.
func TestCopyEnginesRunLargeCallsBesideProducts(t *testing.T) {
	const most = besideBytes
	plain := func(kind backend.Kind) backend.Collective {
		return backend.Collective{Kind: kind, Beside: true}
	}
	uneven := plain(backend.ReduceScatter)
	uneven.Splits = []int{most/4 - 1, 1}
	alone, shown, tree := uneven, plain(backend.AllGather), plain(backend.AllReduce)
	alone.Beside, shown.Algorithm, tree.Splits = false, backend.OneShot, []int{1, 1}
	tree.Association = backend.Tree
	const never, early = backend.BF16, backend.F16
	table := Table{{Model: h200, Link: FullyConnected, Ranks: 2, Kind: backend.AllGather,
		DType: never, CopyEngines: -1}, {Model: h200, Link: FullyConnected, Ranks: 2,
		Kind: backend.AllGather, DType: early, CopyEngines: most / 2}}
	for _, test := range []struct {
		what   backend.Collective
		d      backend.DType
		nbytes int
		want   bool
	}{
		{plain(backend.AllReduce), backend.F32, most, true},
		{plain(backend.AllReduce), backend.F32, most - 4, false},
		{plain(backend.AllReduce), backend.F64, most, false},
		{plain(backend.ReduceScatter), backend.F32, most / 2, true},
		{plain(backend.ReduceScatter), backend.F32, most/2 - 4, false},
		{plain(backend.ReduceScatter), backend.I64, most, false},
		{plain(backend.AllGather), backend.I64, most / 2, true},
		{plain(backend.AllGather), backend.I64, most/2 - 8, false},
		{plain(backend.AllGather), never, 16 * most, false},
		{plain(backend.AllGather), early, most / 4, true},
		{plain(backend.AllGather), early, most/4 - 2, false},
		{uneven, backend.F32, most, true},
		{uneven, backend.F32, most - 4, false},
		{alone, backend.F32, most, false},
		{shown, backend.F32, most, false},
		{tree, backend.F32, most, false},
		{plain(backend.Broadcast), backend.F32, most, false},
	} {
		p, why := decide(Options{Link: FullyConnected, Table: table}.settings(), h200s(2).ranks())
		got := newChoice(p, why).choose(&test.what, test.d, test.nbytes)
		require.Check(t, (got == byCopyEngines) == test.want, "%v of %d bytes of %v: %v", test.what,
			test.nbytes, test.d, got)
	}
	text, err := json.Marshal(table)
	if got, wrong := parseTable(text); err != nil || wrong != nil || !reflect.DeepEqual(got,
		table) {
		t.Errorf("%s is read as %+v: %v, %v", text, got, err, wrong)
	}
}

func TestTablesAreRead(t *testing.T) {
	text := require.Value(json.Marshal(Shipped()))(t)
	if got, err := parseTable(text); err != nil || !reflect.DeepEqual(got, Shipped()) {
		t.Errorf("%+v, %v", got, err)
	}
	row := func(rest string) string {
		return `[{"model": "m", "link": "pcie", "ranks": 2, "collective": "allreduce"` + rest + "}]"
	}
	require.Report(t, require.Err(parseTable([]byte(row("")))))
	old, err := parseTable([]byte(row(
		`, "samples": [{"bytes": 8, "inner_us": 5, "flagged_us": 3, ` +
			`"flagged_two_shot_us": 4}]`)))
	require.Check(t, err == nil && reflect.DeepEqual(old[0].Samples, []Sample{{Bytes: 8, NCCL: 5,
		LL: 3, LL128TwoShot: 4}}), "a file with older names: %+v, %v", old, err)
	for _, wrong := range []string{
		"", "{", `[{}]`, row(`, "link": "rope"`), row(`, "collective": "sum"`),
		row(`, "dtype": "f7"`),
		row(`, "samples": [{"bytes": 2}, {"bytes": 1}]`), row(`, "samples": [{"bytes": 0}]`),
		row(`, "samples": [{"bytes": 8, "nccl_us": -1}]`),
	} {
		if _, err := parseTable([]byte(wrong)); err == nil {
			t.Errorf("%q is read", wrong)
		}
	}
}

func TestRowsThatAreCoveredAreLeftOut(t *testing.T) {
	row := func(ranks int, d backend.DType, source string) Row {
		return Row{Model: h200, Link: FullyConnected, Ranks: ranks, Kind: backend.AllReduce,
			DType: d, Source: source}
	}
	own := Table{row(2, backend.F32, "own"), row(4, 0, "own")}
	base := Table{row(2, 0, "base"), row(4, 0, "base"), row(4, backend.F32, "base"),
		row(2, backend.F32, "base")}
	table := own.over(base)
	for _, test := range []struct {
		ranks int
		dtype backend.DType
		want  string
	}{{2, backend.F32, "own"}, {2, backend.BF16, "base"}, {4, backend.F32, "own"}, {4, backend.F16,
		"own"}} {
		if r := table.find(h200s(test.ranks), backend.AllReduce,
			test.dtype); r.Source != test.want {
			t.Errorf("%d ranks, %v: the row is %s's, want %s's", test.ranks, test.dtype, r.Source,
				test.want)
		}
	}
	require.Check(t, len(table) == 3, "%+v", table)
}

// prototype is a table that tests can rely on: the times of other kernels with the
// data flow of this module's.
func prototype() Table {
	const source = "a prototype"
	return Table{
		{Model: "NVIDIA H200", Link: FullyConnected, Ranks: 2, Kind: backend.AllReduce,
			Source: source, Samples: []Sample{
				{Bytes: 1 << 10, NCCL: 6.5, LL: 3.1, OneShot: 6.5, TwoShot: 6.4},
				{Bytes: 16 << 10, NCCL: 7.3, LL: 3.5, OneShot: 7.2, TwoShot: 6.6},
				{Bytes: 64 << 10, NCCL: 7.6, LL: 3.8, OneShot: 7.5, TwoShot: 7.3},
				{Bytes: 256 << 10, NCCL: 8.8, LL: 5.0, OneShot: 8.4, TwoShot: 7.5},
				{Bytes: 1 << 20, NCCL: 13.8, LL: 11.3, OneShot: 13.2, TwoShot: 10.0},
				{Bytes: 4 << 20, NCCL: 32, OneShot: 30.6, TwoShot: 19.9},
				{Bytes: 10 << 20, NCCL: 54, OneShot: 64, TwoShot: 38.8},
				{Bytes: 32 << 20, NCCL: 140, OneShot: 190, TwoShot: 108},
			}},
		{Model: "NVIDIA H200", Link: FullyConnected, Ranks: 4, Kind: backend.AllReduce,
			Source: source, Samples: []Sample{
				{Bytes: 1 << 10, NCCL: 9.5, LL: 4.2, OneShot: 6.5, TwoShot: 6.5},
				{Bytes: 16 << 10, NCCL: 10.7, LL: 4.4, OneShot: 7.3, TwoShot: 6.8},
				{Bytes: 64 << 10, NCCL: 11.1, LL: 5.3, OneShot: 8.2, TwoShot: 8.8},
				{Bytes: 256 << 10, NCCL: 11.4, LL: 8.6, OneShot: 13.4, TwoShot: 9.0},
				{Bytes: 1 << 20, NCCL: 17.1, LL: 26, OneShot: 18.4, TwoShot: 12.9},
				{Bytes: 4 << 20, NCCL: 39.6, OneShot: 48.5, TwoShot: 28.1},
				{Bytes: 10 << 20, NCCL: 73, OneShot: 107, TwoShot: 60.3},
				{Bytes: 32 << 20, NCCL: 171, OneShot: 334, TwoShot: 171},
			}},
	}
}
