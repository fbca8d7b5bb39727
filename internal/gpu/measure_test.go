package gpu

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/env"
	peers "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// unmeasuredRig is a machine for whose devices no row is shipped.
func unmeasuredRig(t *testing.T) *rig {
	g := newRig(t)
	g.wires = func(rank int) wiring { return switched(make([]int, 16)...)[rank].with(7) }
	return g
}

// fresh are options without a table.
func fresh() Options { return Options{Staging: 4 << 10} }

func TestRanksMeasureWhatTheTableLacksAndKeepIt(t *testing.T) {
	path := noFile(t)
	g := unmeasuredRig(t)
	comms := g.group(t, 2, same(fresh()))
	var tables [2]Table
	each(t, comms, func(c *Communicator) error {
		tables[c.Rank()] = c.plan.Table
		if text := c.Explain(sum, backend.BF16, 1024); !strings.Contains(text,
			"measured (as ranks connected, ") {
			return errors.New(text)
		}
		if got := c.Usage(); got != (Usage{}) {
			return fmt.Errorf("%+v count as calls of the program", got)
		}
		return nil
	})
	require.Check(t, reflect.DeepEqual(tables[0], tables[1]), "ranks go by %v and %v", tables[0],
		tables[1])
	kept := require.Value(Measured())(t)
	m := comms[0].plan.machine()
	for _, k := range []backend.Kind{backend.AllReduce, backend.ReduceScatter, backend.AllGather,
		backend.AllToAll} {
		r := kept.find(m, k, backend.F16)
		require.Check(t, r != nil && r.Quick && r.NVLinks == 7 && len(r.Samples) == 4 &&
			r.Samples[0].NCCL > 0 && max(r.Samples[3].OneShot, r.Samples[3].Push) > 0,
			"%s has %+v for %v", path, r, k)
	}
	before := require.Value(os.ReadFile(path))(t)
	again := g.group(t, 2, same(fresh()))
	after, err := os.ReadFile(path)
	require.Check(t, err == nil && string(after) == string(before) &&
		reflect.DeepEqual(again[1].plan.Table, kept), "what was kept is measured again: %v", err)
}

func TestRanksMeasureOnlyWhereTheyMayAndMust(t *testing.T) {
	forced, off := fresh(), fresh()
	forced.Force, off.Off = byOneShot, true
	for name, test := range map[string]struct {
		o     Options
		file  string
		links int
	}{
		"the table has their kind": {fresh(), "", 18}, "EURYALE_TUNING=off": {fresh(), "off", 7},
		"a table is given": {options(), "", 7}, "an algorithm is forced": {forced, "", 7},
		"kernels are switched off": {off, "", 7},
	} {
		t.Run(name, func(t *testing.T) {
			path := noFile(t)
			if test.file != "" {
				t.Setenv(string(env.Tuning), test.file)
			}
			g := unmeasuredRig(t)
			g.wires = func(rank int) wiring {
				return switched(make([]int, 16)...)[rank].with(test.links)
			}
			g.group(t, 2, same(test.o))
			require.Check(t, len(g.seen) == 0, "%d ranks have measured", len(g.seen))
			_, err := os.Stat(path)
			require.Check(t, err != nil, "%s is written", path)
			if _, err := os.Stat("off"); err == nil {
				t.Error("a file off is written")
			}
		})
	}
}

// Ranks whose users have different files and variables decide as rank 0 does.
func TestRankZeroDecidesWhetherRanksMeasure(t *testing.T) {
	noFile(t)
	row := rowFor(0, byOneShot)
	row.Ranks, row.Capability, row.NVLinks = 3, 90, 7
	for _, measuring := range []bool{true, false} {
		comms := unmeasuredRig(t).group(t, 3, func(rank int) Options {
			o := fresh()
			if (rank > 0) == measuring {
				o.Table = Table{row}
			}
			return o
		})
		each(t, comms, func(c *Communicator) error {
			r := c.row(backend.AllReduce, backend.F32)
			if r == nil || r.Quick != measuring || !reflect.DeepEqual(c.plan.Table,
				comms[0].plan.Table) {
				return fmt.Errorf("rank %d goes by %+v", c.Rank(), r)
			}
			return nil
		})
	}
}

func TestPartsGoByWhatTheGroupMeasured(t *testing.T) {
	noFile(t)
	comms := unmeasuredRig(t).group(t, 2, same(fresh()))
	each(t, comms, func(c *Communicator) error {
		part := testranks.Must(c.Split(0, 0))
		defer part.Close()
		if r := part.(*Communicator).row(backend.AllReduce, backend.F32); r == nil || !r.Quick {
			return fmt.Errorf("the part goes by %+v", r)
		}
		return nil
	})
}

func TestRowsThatCannotBeKeptServeTheProcess(t *testing.T) {
	t.Setenv(string(env.Tuning), "/proc/euryale/tuning.json") // where nobody makes a directory
	b := unmeasuredRig(t).backend(fresh())
	var said []string
	b.Notice = func(text string) { said = append(said, text) }
	for range 2 {
		group := require.Value(backendtest.Over(b)(2, time.Minute))(t)
		for _, c := range group.Comms {
			r := c.(*Communicator).row(backend.AllReduce, backend.F32)
			require.Check(t, r != nil && r.Quick, "%+v", r)
		}
		each(t, []*Communicator{group.Comms[0].(*Communicator), group.Comms[1].(*Communicator)},
			(*Communicator).Close)
		require.Report(t, group.Close())
	}
	require.Check(t, len(said) == 1 && strings.Contains(said[0],
		"name another file in EURYALE_TUNING"), "%q", said)
}

func TestRanksWithoutTimeToMeasureGoByNCCL(t *testing.T) {
	path := noFile(t)
	b := unmeasuredRig(t).backend(fresh())
	b.quick.time = 0
	group := require.Value(backendtest.Over(b)(2, time.Minute))(t)
	comms := []*Communicator{group.Comms[0].(*Communicator), group.Comms[1].(*Communicator)}
	for _, c := range comms {
		if text := c.Explain(sum, backend.F32, 1024); !strings.Contains(text,
			"0s were too short to measure") {
			t.Error(text)
		}
	}
	each(t, comms, (*Communicator).Close)
	_, statErr := os.Stat(path)
	require.Check(t, group.Close() == nil && statErr != nil, "%s is written", path)
}

// failingDriver launches no kernel that exchanges data.
type failingDriver struct{}

var errDriver = errors.New("as the test wants")

func (failingDriver) Launch(peers.Launch) error { return errDriver }

// Nothing that happens while ranks measure is an error of Connect.
func TestErrorWhileRanksMeasureLeavesCallsToNCCL(t *testing.T) {
	for name, spoil := range map[string]func(g *rig){
		"memory": func(g *rig) {
			g.fault = func(rank int, doing string) error {
				if rank == 1 && doing == "alloc to measure" {
					return errDriver
				}
				return nil
			}
		},
		"a kernel": func(g *rig) { g.driver = failingDriver{} },
	} {
		t.Run(name, func(t *testing.T) {
			path := noFile(t)
			g := unmeasuredRig(t)
			spoil(g)
			comms := g.group(t, 2, same(fresh()))
			each(t, comms, func(c *Communicator) error {
				text := c.Explain(sum, backend.F32, 1024)
				for _, part := range []string{": nccl\n", "could not measure", errDriver.Error()} {
					if !strings.Contains(text, part) {
						return fmt.Errorf("no %q in %q", part, text)
					}
				}
				x := make([]float32, 1000)
				return holding(c, x, func(b backend.Buffer) error {
					return backend.Run(c, sum, b, b)
				})
			})
			_, err := os.Stat(path)
			require.Check(t, err != nil, "%s is written", path)
		})
	}
}
