//go:build gpu

package lowlatency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
)

// BenchmarkAllReduce times rounds of calls that are started back to back, of NCCL
// and of each algorithm in turn, and reports the medians: "us" with ordinary memory,
// "alloc-us" with that of Alloc, "host-us" what one Start takes the host. Use
// -benchtime 200x for 200 rounds of each.
func BenchmarkAllReduce(b *testing.B) {
	g := needGPUs(b, 2)
	for _, size := range g.sizes() {
		comms := g.group(b, size, forced(TwoShot))
		for _, d := range []backend.DType{backend.F32, backend.BF16} {
			for nbytes := 1 << 10; nbytes <= 128<<20; nbytes *= 4 {
				b.Run(fmt.Sprintf("ranks=%d/%v/bytes=%d", size, d, nbytes), func(b *testing.B) { alternate(b, comms, d, nbytes) })
			}
		}
	}
}

// contest is what is timed in turn.
type contest struct {
	name string
	use  Algorithm
	call backend.Collective
	own  bool // memory of Alloc
	host bool // time the host
}

func contests(nbytes int) []contest {
	list := []contest{{"nccl-us", Inner, sum, false, false}, {"nccl-host-us", Inner, sum, false, true}}
	for _, a := range []Algorithm{Flagged, OneShot, TwoShot} {
		if a == Flagged && nbytes > flaggedBytes {
			continue
		}
		list = append(list, contest{a.String() + "-us", a, sum, false, false},
			contest{a.String() + "-alloc-us", a, sum, true, false},
			contest{a.String() + "-host-us", a, sum, false, true})
	}
	return list
}

func alternate(b *testing.B, comms []*Communicator, d backend.DType, nbytes int) {
	var all []backend.Communicator
	for _, c := range comms {
		all = append(all, c)
	}
	list := contests(nbytes)
	times := make([][]time.Duration, len(list))
	b.SetBytes(int64(nbytes))
	backendtest.Each(b, all, func(comm backend.Communicator) error {
		c := comm.(*Communicator)
		plain, err := c.Device().Alloc(nbytes)
		if err != nil {
			return err
		}
		own, err := c.Alloc(nbytes) // together, after everyone has its memory
		if err != nil {
			return err
		}
		for range b.N {
			for i, x := range list {
				memory := plain
				if x.own {
					memory = own
				}
				took, err := x.round(c, memory.As(d))
				if err != nil {
					return fmt.Errorf("%s: %w", x.name, err)
				}
				if c.Rank() == 0 {
					times[i] = append(times[i], took)
				}
			}
		}
		return c.Device().Free(plain)
	})
	for i, x := range list {
		slices.Sort(times[i])
		b.ReportMetric(float64(times[i][len(times[i])/2].Nanoseconds())/1e3, x.name)
	}
	b.ReportMetric(0, "ns/op")
}

// round returns the time of one call of many.
func (x contest) round(c *Communicator, memory backend.Buffer) (time.Duration, error) {
	const calls = 50
	var communicator backend.Communicator = c
	if x.use == Inner {
		communicator = c.inner
	}
	start := func() error {
		if x.use == Inner {
			_, err := communicator.Start(nil, x.call, memory, memory)
			return err
		}
		_, err := c.carry(nil, x.use, x.call, memory, memory)
		return err
	}
	q := c.Device().Default()
	// The first call brings the ranks together.
	if err := errors.Join(start(), drain(context.Background(), q)); err != nil {
		return 0, err
	}
	began := time.Now()
	for range calls {
		if err := start(); err != nil {
			return 0, err
		}
	}
	host := time.Since(began)
	err := drain(context.Background(), q)
	if x.host {
		return host / calls, err
	}
	return time.Since(began) / calls, err
}
