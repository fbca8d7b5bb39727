package gpu

import (
	"fmt"
	"math"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Tune measures a collective by every algorithm and returns a row for a table, whose
// Source is left to the caller. sizes are the bytes of its largest operand, in order;
// memory is the device's, zeroed, as long as the largest of them. Calls are in place, but for
// all-to-alls, which have half of it.
// race times ways to start a call against each other, so that what disturbs one disturbs all,
// and returns the microseconds of each, the same on every rank, or none where it has no time left,
// on every rank: the row ends there. Tune is collective.
//
// Errors: ErrUnsupported if there are no kernels to choose from, and errors of race.
func (c *Communicator) Tune(k backend.Kind, d backend.DType, sizes []int, memory backend.Buffer,
	race func(ways []func() (backend.Work, error)) (micros []float64, err error)) (Row, error) {
	what := backend.Collective{Kind: k}
	switch {
	case c.why != "":
		return Row{}, fmt.Errorf("%w: %s: there is nothing to tune: %s", backend.ErrUnsupported,
			backend.RankOf(c), c.why)
	case !eligible(&what, d):
		return Row{}, fmt.Errorf("%w: %s: there are no kernels for %v of %v",
			backend.ErrUnsupported, backend.RankOf(c), what, d)
	}
	m := c.plan.machine()
	row := Row{Model: m.Model, Capability: m.Capability, Link: m.Link, NVLinks: m.NVLinks,
		Ranks: m.Ranks, Kind: k, DType: d}
	for _, size := range sizes {
		t := c.trial(what, memory.As(d), size/d.Size())
		if n := len(row.Samples); t.bytes == 0 || n > 0 && row.Samples[n-1].Bytes == t.bytes {
			continue
		}
		s, err := t.measure(race)
		if err != nil {
			return Row{}, err
		}
		if s == nil {
			break
		}
		row.Samples = append(row.Samples, *s)
	}
	return row, nil
}

// trial is a call to be measured.
type trial struct {
	*Communicator
	what     backend.Collective
	dst, src backend.Buffer
	bytes    int // as a Sample counts them
}

// trial returns the call in place whose largest operand has n elements, or a few less
// where chunks are even.
func (c *Communicator) trial(what backend.Collective, memory backend.Buffer, n int) trial {
	whole := memory.Slice(0, n)
	if what.Kind == backend.AllReduce {
		return trial{c, what, whole, whole, whole.NBytes()}
	}
	n /= c.Size()
	if what.Kind == backend.AllToAll { // of half of the size, since it is never in place
		n /= 2
		all := n * c.Size()
		return trial{c, what, memory.Slice(all, 2*all), memory.Slice(0, all),
			n * memory.DType().Size()}
	}
	whole = memory.Slice(0, n*c.Size())
	own := memory.Slice(c.Rank()*n, (c.Rank()+1)*n)
	if what.Kind == backend.ReduceScatter {
		return trial{c, what, own, whole, own.NBytes()}
	}
	return trial{c, what, whole, own, own.NBytes()}
}

// measure returns nil where there is no time left.
func (t trial) measure(
	race func(ways []func() (backend.Work, error)) (micros []float64, err error)) (*Sample, error) {
	s := &Sample{Bytes: t.bytes}
	var at []*float64
	var ways []func() (backend.Work, error)
	for _, a := range t.Link().Algorithms() {
		if t.can(a) {
			at = append(at, s.time(a))
			ways = append(ways, func() (backend.Work, error) { return t.by(a) })
		}
	}
	micros, err := race(ways)
	if err != nil {
		return nil, fmt.Errorf("measure %v of %s: %w", t.what, size(t.bytes), err)
	}
	if micros == nil {
		return nil, nil
	}
	for i, us := range micros {
		*at[i] = math.Round(us*100) / 100 // the resolution of the clock
	}
	return s, nil
}

// can reports whether an algorithm is what is used when it is asked for.
func (t trial) can(a Algorithm) bool {
	asked := choice{plan: t.plan, size: t.size}
	asked.plan.Force = a
	return asked.choose(&t.what, t.what.DType(t.dst, t.src), t.bytes) == a
}

// by starts the call by an algorithm.
func (t trial) by(a Algorithm) (backend.Work, error) {
	return t.startBy(nil, a, t.what, t.dst, t.src)
}

// String returns the row for a person to read: the times and what is used.
func (r Row) String() string {
	dtype := "any type"
	if r.DType != 0 {
		dtype = r.DType.String()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%v of %s among %d ranks of %s, %v (%s)\n%12s", r.Kind, dtype, r.Ranks, r.Model,
		r.Link, r.Source, "bytes")
	for _, a := range r.Link.Algorithms() {
		fmt.Fprintf(&b, " %16v", a)
	}
	fmt.Fprintf(&b, " %16s  (us)\n", "used")
	for _, s := range r.Samples {
		fmt.Fprintf(&b, "%12d", s.Bytes)
		for _, a := range r.Link.Algorithms() {
			if us := *s.time(a); us > 0 {
				fmt.Fprintf(&b, " %16.2f", us)
			} else {
				fmt.Fprintf(&b, " %16s", "-")
			}
		}
		fmt.Fprintf(&b, " %16v\n", r.best(s.Bytes))
	}
	return b.String()
}
