package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/gpu"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/tuning"
)

// tuned are the collectives and types that have kernels. All-gathers move bytes, so one
// row is for all types.
var tuned = []struct {
	kind   backend.Kind
	dtypes []backend.DType
}{
	{backend.AllReduce, []backend.DType{backend.F32, backend.F16, backend.BF16}},
	{backend.ReduceScatter, []backend.DType{backend.F32, backend.F16, backend.BF16}},
	{backend.AllGather, []backend.DType{0}},
	{backend.AllToAll, []backend.DType{0}},
}

// tune measures the candidates on every rank; rank 0 prints the times and keeps them.
func (s *output) tune(comm backend.Communicator, c bench.Config) error {
	kernels, reason := quick(comm)
	machines := hierarchical(comm)
	if kernels == nil && machines == nil {
		return fmt.Errorf("bench: there is nothing to tune: %s; and nothing goes machine by "+
			"machine: %s", reason, whyFlat(comm))
	}
	t := tuner{output: s, Config: c, rank: comm.Rank(), size: comm.Size()}
	if err := t.writeMethod(comm); err != nil {
		return err
	}
	if kernels != nil {
		if err := t.algorithms(comm, kernels); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	} else if err := t.note("# %s\n", reason); err != nil {
		return err
	}
	if machines == nil {
		return nil
	}
	if err := t.links(machines); err != nil {
		return fmt.Errorf("bench: links: %w", err)
	}
	return nil
}

// tunable returns an error, before ranks are started, if there is nothing to measure.
func tunable(chosen backend.Backend) error {
	if tuning.Off() {
		return fmt.Errorf("bench: --tune keeps what it measures, which %s=off forbids: name a "+
			"file there", env.Tuning)
	}
	if chosen.Name() != (host.Backend{}).Name() || env.Topology.Text(os.Getenv) != "" {
		return nil
	}
	return fmt.Errorf("bench: --tune measures GPUs and links between machines, and there are "+
		"neither%s. Shared memory of one machine needs no tuning. To pretend that there are two "+
		"machines: EURYALE_TOPOLOGY=2x2 euryale bench --tune -n 4", without(chosen.Name()))
}

// quick returns the layer with low-latency kernels, or why there is none.
func quick(comm backend.Communicator) (c *gpu.Communicator, reason string) {
	c, ok := backend.As[*gpu.Communicator](comm)
	switch {
	case !ok:
		return nil, fmt.Sprintf("backend %s has no low-latency kernels",
			comm.Capabilities().Backend) + without(comm.Capabilities().Backend)
	case c.Refused() != "":
		return nil, "low-latency kernels do not run here: " + c.Refused()
	}
	return c, ""
}

// without explains why ranks are not on GPUs, if they are not.
func without(chosen string) string {
	for _, b := range euryale.Backends() {
		if err := b.Available(); b.Name() == "nccl" && chosen != b.Name() && err != nil {
			reason, _, _ := strings.Cut(err.Error(), "\n")
			return ", and nccl is not available: " + reason
		}
	}
	return ""
}

// hierarchical returns the layer with machines, nil if there is one machine.
func hierarchical(comm backend.Communicator) *hierarchy.Communicator {
	if h, ok := backend.As[*hierarchy.Communicator](comm); ok && h.Layered() {
		return h
	}
	return nil
}

// whyFlat says why there is no layer with machines.
func whyFlat(comm backend.Communicator) string {
	h, ok := backend.As[*hierarchy.Communicator](comm)
	if !ok {
		return "there is one machine (EURYALE_TOPOLOGY declares several)"
	}
	why := h.Plan().Choose(backend.Collective{Kind: backend.AllReduce}, backend.F32, 1<<20).Reason
	return why + " (EURYALE_TOPOLOGY declares machines, EURYALE_HIERARCHY=always uses them)"
}

// tuner is one rank of a tuning.
type tuner struct {
	*output
	bench.Config
	rank, size int
}

// writeMethod writes the method.
func (t *tuner) writeMethod(comm backend.Communicator) error {
	if t.rank != 0 { // and may share the output
		return nil
	}
	t.device = modelOf(comm.Device())
	return t.note("%s", t.head([]string{
		fmt.Sprintf("euryale bench --tune: %v to %v, factor %d, backend %s", t.Min, t.Max, t.Factor,
			t.backendName()),
		"ranks: " + t.ranks(t.size),
		"method: in place, in ordinary memory; rounds in which the ways take turns, each with a " +
			"batch of calls",
		"  that are started one behind the other (20 to 400 calls or 2 ms), timed by the " +
			"device's clock if it has one;",
		fmt.Sprintf("  as many rounds as fit %v (11 to 201); medians, of the slowest rank",
			t.Budget),
	}))
}

// note prints text that is not a result, on rank 0.
func (t *tuner) note(format string, args ...any) error {
	to := t.out
	if t.cmd.JSON {
		to = t.err
	}
	return t.say(to, fmt.Sprintf(format, args...))
}

// result prints a result: text for a person, or a line of JSON.
func (t *tuner) result(text string, v any) error {
	if !t.cmd.JSON {
		return t.say(t.out, text)
	}
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return t.say(t.out, string(line)+"\n")
}

func (t *tuner) say(to io.Writer, text string) error {
	if t.rank != 0 {
		return nil
	}
	_, err := io.WriteString(to, text)
	return err
}

// keep lets rank 0 keep results.
func (t *tuner) keep(what interface{ Keep() (string, error) }) error {
	if t.rank != 0 {
		return nil
	}
	file, err := what.Keep()
	if err != nil {
		return err
	}
	return t.note("# kept in %s\n", file)
}

// source describes where the numbers come from.
func (t *tuner) source() string {
	engine := t.backend
	if text := t.library(); text != "" {
		engine, _, _ = strings.Cut(text, " (") // the rest says where it is
	}
	return fmt.Sprintf("euryale bench --tune, %s, %s, %s", time.Now().UTC().Format(time.DateOnly),
		t.ranks(t.size), engine)
}

// sizes returns the sizes to measure.
func (t *tuner) sizes() (all []int) {
	for n := int(t.Min); ; n *= t.Factor {
		all = append(all, n)
		if n > int(t.Max)/t.Factor {
			return all
		}
	}
}

// algorithms times the algorithms of the collectives for which there are kernels.
func (t *tuner) algorithms(comm backend.Communicator, c *gpu.Communicator) error {
	comparison, err := bench.NewComparison(comm, int(t.Max), nil)
	if err != nil {
		return err
	}
	race := func(ways []func() (backend.Work, error)) ([]float64, error) {
		return comparison.Race(t.Budget, ways...)
	}
	var table gpu.Table
	for _, k := range tuned {
		for _, d := range k.dtypes {
			row, err := c.Tune(k.kind, cmp.Or(d, backend.U8), t.sizes(), comparison.Buffer(), race)
			row.DType, row.Source = d, t.source()
			if err == nil {
				err = t.result(row.String(), row)
			}
			if err != nil {
				return errors.Join(err, comparison.Close())
			}
			table = append(table, row)
		}
	}
	if err := comparison.Close(); err != nil {
		return err
	}
	return t.keep(table)
}

// links measures the links inside and between machines, by which calls run flat or
// hierarchical. All machines, and then all rails, are busy at a time, as in a call. The slowest
// machine and the slowest rail count.
func (t *tuner) links(h *hierarchy.Communicator) (err error) {
	plan := h.Plan()
	l, links := plan.Layout, *plan.Options.Links
	if links.Between, err = t.slowest(h, h.Between()); err != nil {
		return err
	}
	links.Inside = links.Between // there is nothing inside machines of one device
	if l.Devices() != 1 {
		if links.Inside, err = t.slowest(h, h.Inside()); err != nil {
			return err
		}
	}
	if links.Step, err = handover(h.Device()); err != nil {
		return err
	}
	if links.Call, err = t.overhead(h, links); err != nil {
		return err
	}
	m := hierarchy.Measurement{
		Model: cmp.Or(modelOf(h.Device()), h.Device().Name()), Machines: l.Machines(),
		Devices:  l.Devices(),
		Declared: env.Topology.Text(os.Getenv) != "", Links: links, Source: t.source(),
	}
	machines := fmt.Sprintf("%d machines x %d devices", m.Machines, m.Devices)
	if m.Devices == 0 {
		machines = fmt.Sprintf("machines %v", l)
	}
	text := fmt.Sprintf("%s of %s: %v (%s)\n", machines, m.Model, links, m.Source)
	if err := t.result(text, m); err != nil {
		return err
	}
	return t.keep(m)
}

// slowest measures the links of all parts, of which this rank may be in none, and returns the
// longest latency and the lowest bandwidth.
func (t *tuner) slowest(h *hierarchy.Communicator, part backend.Communicator) (link hierarchy.Link,
	err error) {
	worst := []float64{0, 0} // seconds of a message, and for a byte
	if part != nil {
		if link, err = t.link(part); err != nil {
			return link, err
		}
		worst = []float64{link.Latency.Seconds(), 1 / link.Bandwidth}
	}
	if err := backend.Run(h, backend.Collective{Kind: backend.AllReduce, Op: backend.Max},
		backend.Of(worst), backend.Of(worst)); err != nil {
		return link, err
	}
	return hierarchy.Link{Latency: time.Duration(math.Round(worst[0] * float64(time.Second))),
		Bandwidth: 1 / worst[1]}, nil
}

// link measures the link between the ranks of a part by all-gathers, in which each rank sends every
// other one a message.
func (t *tuner) link(part backend.Communicator) (hierarchy.Link, error) {
	comparison, err := bench.NewComparison(part, int(t.Max), nil)
	if err != nil {
		return hierarchy.Link{}, err
	}
	P := part.Size()
	link, err := fitted(func() (calls []hierarchy.Timed, err error) {
		for _, size := range t.sizes() {
			n := size / P
			if n == 0 {
				continue
			}
			whole, own := comparison.Buffer().Slice(0, n*P), comparison.Buffer().Slice(
				part.Rank()*n, (part.Rank()+1)*n)
			gather := func() (backend.Work, error) {
				return part.Start(nil, backend.Collective{Kind: backend.AllGather}, whole, own)
			}
			micros, err := comparison.Race(t.Budget/sweeps, gather)
			if err != nil {
				return nil, err
			}
			took := time.Duration(micros[0] * float64(time.Microsecond))
			calls = append(calls, hierarchy.Timed{Steps: P - 1, Bytes: float64(n * (P - 1)),
				Took: took})
		}
		return calls, nil
	})
	return link, errors.Join(err, comparison.Close())
}

// Other programs make calls slower, and never faster. So each size counts with the fastest of
// several sweeps over all sizes. While no link explains the times, which takes a disturbance during
// every sweep, there are more, up to mostSweeps.
const (
	sweeps     = 3
	mostSweeps = 10
)

// fitted returns the link that explains the fastest of each call in several sweeps. Every sweep
// times the same calls.
func fitted(sweep func() ([]hierarchy.Timed, error)) (link hierarchy.Link, err error) {
	var least []hierarchy.Timed
	for i := 0; i < sweeps || err != nil && i < mostSweeps; i++ {
		calls, failed := sweep()
		if failed != nil {
			return link, failed
		}
		if i == 0 {
			least = calls
		}
		for c := range calls {
			least[c].Took = min(least[c].Took, calls[c].Took)
		}
		link, err = hierarchy.Fit(least)
	}
	return link, err
}

// smallCall is the elements of an all-reduce whose bytes take no time.
const smallCall = 1024

// overhead measures what a small hierarchical all-reduce takes more than a flat one, beyond what
// links predict of both; 0 if the plan runs it flat, as where EURYALE_HIERARCHY=auto says so.
func (t *tuner) overhead(h *hierarchy.Communicator, links hierarchy.Links) (time.Duration, error) {
	plan, what := h.Plan(), backend.Collective{Kind: backend.AllReduce}
	plan.Options.Links = &links
	predicted := plan.Choose(what, backend.F32, smallCall)
	if !h.Plan().Choose(what, backend.F32, smallCall).Hierarchical {
		return 0, nil
	}
	comparison, err := bench.NewComparison(h, 4*smallCall, nil)
	if err != nil {
		return 0, err
	}
	x, flat := comparison.Buffer().As(backend.F32), h.Unwrap()[0]
	micros, err := comparison.Race(t.Budget,
		func() (backend.Work, error) { return h.Start(nil, what, x, x) },
		func() (backend.Work, error) { return flat.Start(nil, what, x, x) })
	if err != nil {
		return 0, errors.Join(err, comparison.Close())
	}
	more := time.Duration((micros[0] - micros[1]) * float64(time.Microsecond))
	return max(more-(predicted.Layered-predicted.Flat), 0), comparison.Close()
}

// handovers is how many handovers are timed: enough to hide the wait at the end.
const handovers = 1000

// handover measures the time to start a small kernel on a queue that waits for another
// queue.
func handover(d backend.Device) (took time.Duration, err error) {
	word, err := d.Alloc(1)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.Free(word)) }()
	var queues [2]backend.Queue
	for i := range queues {
		if queues[i], err = d.NewQueue(); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, queues[i].Close()) }()
	}
	if _, err := pass(queues, word, 1); err != nil { // warms up
		return 0, err
	}
	took, err = pass(queues, word, handovers)
	return took / handovers, err
}

// pass hands over between two queues, a number of times.
func pass(queues [2]backend.Queue, word backend.Buffer, times int) (time.Duration, error) {
	began := time.Now()
	var last backend.Event
	for i := range times {
		q := queues[i%2]
		if last != nil {
			if err := q.Wait(last); err != nil {
				return 0, err
			}
		}
		if err := q.Zero(word); err != nil {
			return 0, err
		}
		var err error
		if last, err = q.Record(); err != nil {
			return 0, err
		}
	}
	err := last.Join(context.Background())
	return time.Since(began), err
}
