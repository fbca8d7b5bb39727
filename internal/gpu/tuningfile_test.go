package gpu

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// noFile makes the user one without a file, and returns where it would be.
func noFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tuning.json")
	t.Setenv(string(env.Tuning), path)
	return path
}

// rowFor is a row by which every call is by one algorithm.
func rowFor(d backend.DType, use Algorithm) Row {
	s := Sample{Bytes: 1 << 20, NCCL: 9, LL: 9, LL128TwoShot: 9, OneShot: 9, TwoShot: 9}
	*s.time(use) = 1
	return Row{Model: h200, Link: FullyConnected, Ranks: 2, Kind: backend.AllReduce, DType: d,
		Source: "test", Samples: []Sample{s}}
}

func TestMeasuredRowsComeBeforeShippedOnes(t *testing.T) {
	path := noFile(t)
	if got, err := Measured(); err != nil || !reflect.DeepEqual(got, Shipped()) {
		t.Fatalf("without a file: %+v, %v", got, err)
	}
	rows := Table{rowFor(backend.F32, byOneShot), rowFor(backend.BF16, byOneShot)}
	require.NoError(t, require.Err(rows.Keep()))
	file, err := Table{rowFor(backend.F32, byTwoShot)}.Keep() // again
	if err != nil || file != path {
		t.Fatal(file, err)
	}
	table := require.Value(Measured())(t)
	shipped := Shipped().find(h200s(2), backend.AllReduce, backend.F16).best(4096)
	for d, want := range map[backend.DType]Algorithm{backend.F32: byTwoShot,
		backend.BF16: byOneShot, backend.F16: shipped} {
		got := table.find(h200s(2), backend.AllReduce, d).best(4096)
		require.Equal(t, d, got, want)
	}
}

// A quick measurement stands in for a table that lacks the machine, and for nothing else.
func TestQuickRowsComeLastAndGoFirst(t *testing.T) {
	noFile(t)
	m := Survey{Model: h200, Capability: 90, Link: FullyConnected, NVLinks: 18, Ranks: 2}
	row := func(ranks int, d backend.DType, quick bool) Row {
		return Row{Model: h200, Capability: 90, Link: FullyConnected, NVLinks: 18, Ranks: ranks,
			Kind: backend.AllReduce, DType: d, Quick: quick, Samples: []Sample{{Bytes: 8, NCCL: 1}}}
	}
	keep := func(rows ...Row) Table {
		require.NoError(t, require.Err(Table(rows).Keep()))
		return require.Value(Measured())(t)
	}
	table := keep(row(2, 0, true), row(8, 0, true))
	r := table.find(m, backend.AllReduce, backend.BF16)
	require.Check(t, !r.Quick, "%+v comes before what is shipped", r)
	m.Ranks = 8
	if r := table.find(m, backend.AllReduce, backend.BF16); r == nil || !r.Quick {
		t.Errorf("%+v, want what was measured quickly", r)
	}
	table = keep(row(8, backend.F32, false))
	if r := table.find(m, backend.AllReduce, backend.F32); r == nil || r.Quick {
		t.Errorf("%+v, want what was measured last", r)
	}
	if r := table.find(m, backend.AllReduce, backend.BF16); r != nil {
		t.Errorf("%+v is left", r)
	}
}

func TestTableOfRankZeroIsEveryRanksAndThatOfParts(t *testing.T) {
	noFile(t)
	require.NoError(t, require.Err((Table{rowFor(backend.F32, byOneShot)}).Keep()))
	g := newRig(t)
	comms := g.group(t, 3, func(rank int) Options {
		o := options()
		if o.Force, o.Table = byNCCL, nil; rank > 0 {
			o.Table = Table{rowFor(backend.F32, byTwoShot)}
		}
		return o
	})
	each(t, comms, func(c *Communicator) error {
		part := testranks.Must(c.Split(min(c.Rank(), 1), 0)) // of two, rank 1 is the first
		defer part.Close()
		if c.Rank() == 0 {
			return nil
		}
		if got := part.(*Communicator).choose(&sum, backend.F32, 4096); got != byOneShot {
			return errors.New("the part uses " + got.String())
		}
		return nil
	})
}

func TestBrokenFileIsAnErrorOfRankZero(t *testing.T) {
	path := noFile(t)
	require.NoError(t, os.WriteFile(path, []byte(`{"lowlatency": [{"link": "rope"}]}`), 0o600))
	_, err := newRig(t).newGroup(2, time.Minute, same(Options{}))
	for _, part := range []string{path, "rope", "delete it", "rank 0"} {
		require.Check(t, err != nil && strings.Count(err.Error(), part) >= 2,
			"no %q of both ranks in %v", part, err)
	}
	if _, err := (Options{Off: true}).measured(0); err != nil {
		t.Errorf("switched off: %v", err)
	}
}
