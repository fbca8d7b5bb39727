//go:build gpu

package hierarchy

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// bucketCount is how many buckets an operation of the benchmark all-reduces.
const bucketCount = 64

// What runs compare: as many slices as the model chooses with other numbers of them, and
// what it costs to time phases.
var (
	sliceCounts = flag.String("slices", "", "numbers of slices that BenchmarkGPUBuckets "+
		"compares, such as 1,2,7")
	keepSpans = flag.Int("spans", 1<<12, "Options.Spans of BenchmarkGPUBuckets")
)

// BenchmarkGPUBuckets all-reduces the buckets of a large model, hierarchical and
// flat, with some of them in flight. Of the last operation, by the device's clock:
// "overlaps" counts pairs of phases of different buckets that were under way at the same
// time on different kinds of links, and "in-bucket" those of different slices of one
// bucket; "inside-ms" and "between-ms" are for how long each kind of link was in use, and
// "both-ms" for how long both were. "start-ms" is what the host took to start all calls. Buckets in
// flight one at a time follow each other on one queue: they overlap by no more than a phase's stamp
// comes after its end. Two GPUs, as 2x1, have one kind of link, and so no overlaps either.
func BenchmarkGPUBuckets(b *testing.B) {
	ranks := bucketsOnGPUs(b, needGPUs(b))
	for _, inFlight := range []int{1, 4} {
		for _, way := range ranks.ways(b) {
			b.Run(fmt.Sprintf("%s/inflight=%d", way.name, inFlight), func(b *testing.B) {
				backendtest.Each(b, ranks.comms, func(c backend.Communicator) error {
					x := ranks.all[c.Rank()]
					x.c.plan.Options.SliceBytes = way.sliceBytes
					return x.measure(b, way.flat, inFlight)
				})
			})
		}
	}
}

// way is what the buckets are all-reduced by.
type way struct {
	name       string
	flat       bool
	sliceBytes int
}

// ways are flat, hierarchical, and hierarchical in other slices. There are none where
// slots have been made for the first ones.
func (g bucketGroup) ways(b *testing.B) []way {
	x := g.all[0]
	all := []way{{name: "hierarchical"}, {name: "flat", flat: true}}
	if *sliceCounts == "" || x.c.plan.needsSlots(backend.AllReduce) {
		return all
	}
	for _, text := range strings.Split(*sliceCounts, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			b.Fatalf("-slices %q", *sliceCounts)
		}
		line := cacheLine * x.c.Size()
		all = append(all, way{name: "hierarchical/slices=" + text,
			sliceBytes: (x.total.NBytes()/n + line) / line * line})
	}
	return all
}

// bucketLength is 25 MiB of elements, where sources and results of all buckets have
// room. They do not on emulated devices.
func bucketLength(d *cuda.Device) (int, error) {
	const n = 25 << 20 / 4
	free, _, err := d.FreeMemory()
	if free < 2*(bucketCount+4)*4*n {
		return 64 << 10, err
	}
	return n, err
}

// bucketGroup is the ranks of the benchmark.
type bucketGroup struct {
	comms []backend.Communicator
	all   []*bucketRank
}

// bucketRank is one of them. Bucket i of rank r is the pattern plus r+i.
type bucketRank struct {
	c          *Communicator
	qs         []backend.Queue
	srcs, dsts []backend.Buffer
	results    backend.Buffer // of all buckets
	total      backend.Buffer // the sum of the pattern over the ranks
	wrong      fuse.Loop      // see extremesOf
	scratch    backend.Buffer // of wrong
	ends       backend.Buffer // the extremes of each bucket, see verify
	starting   time.Duration  // what the last operation took the host
	close      func() error   // the queues, and frees the memory
}

// bucketsOnGPUs has its queues and memory before ranks wait for each other.
func bucketsOnGPUs(b *testing.B, g gpus) bucketGroup {
	ranks := bucketGroup{all: make([]*bucketRank, len(g))}
	for r, d := range g {
		x := require.Value(bucketsOn(d))(b)
		b.Cleanup(func() {
			require.NoError(b, x.close())
		})
		ranks.all[r] = x
	}
	ranks.comms = g.connected(b, g.layouts()[0], bucketOptions(b, g), group.Compared)
	backendtest.Each(b, ranks.comms, func(c backend.Communicator) error {
		x := ranks.all[c.Rank()]
		x.c = c.(*Communicator)
		return x.fill()
	})
	return ranks
}

// bucketOptions has the links that were measured here, as Init does, and by default room
// for the spans of an operation.
func bucketOptions(b *testing.B, g gpus) Options {
	o := Options{Mode: Always, Spans: *keepSpans}
	m, found, err := Measured(g[0].Model(), g.layouts()[0], true)
	require.NoError(b, err)
	if found {
		o.Links = &m.Links
	}
	return o
}

// bucketsOn takes queues and memory of a device.
func bucketsOn(d *cuda.Device) (*bucketRank, error) {
	n, err := bucketLength(d)
	if err != nil {
		return nil, err
	}
	wrong, err := extremesOf(d.Default().(fuse.Queue), n)
	if err != nil {
		return nil, err
	}
	scratch := (wrong.Scratch() + 3) / 4
	memory, err := d.Alloc(4 * (2*bucketCount*n + n + scratch + 2*bucketCount))
	if err != nil {
		return nil, err
	}
	x := bucketsIn(memory.As(backend.F32), n, scratch)
	x.wrong = wrong
	for range 4 {
		q, err := d.NewQueue()
		if err != nil {
			return nil, err
		}
		x.qs = append(x.qs, q)
	}
	x.close = func() error {
		var err error
		for _, q := range x.qs {
			err = errors.Join(err, q.Close())
		}
		return errors.Join(err, d.Free(memory))
	}
	return x, nil
}

// extremesOf returns the program that folds the difference between a result of n elements and the
// pattern to its extremes.
func extremesOf(q fuse.Queue, n int) (fuse.Loop, error) {
	p := &fuse.Program{Shape: []int{n}, Reduced: []bool{true}}
	wrong := p.Do(fuse.Sub, p.Load(backend.F32, 1), p.Load(backend.F32, 1))
	p.Fold(backend.Min, wrong, backend.F32, 0)
	p.Fold(backend.Max, wrong, backend.F32, 0)
	return q.Fuse(p)
}

// bucketsIn divides the memory of a rank.
func bucketsIn(memory backend.Buffer, n, scratch int) *bucketRank {
	take := func(n int) (head backend.Buffer) {
		head, memory = memory.Slice(0, n), memory.Slice(n, memory.Len())
		return head
	}
	srcs := take(bucketCount * n)
	x := &bucketRank{results: take(bucketCount * n), total: take(n), scratch: take(scratch),
		ends: take(2 * bucketCount)}
	for i := range bucketCount {
		x.srcs, x.dsts = append(x.srcs, equalPart(srcs, i, bucketCount)),
			append(x.dsts, equalPart(x.results, i, bucketCount))
	}
	return x
}

// fill makes the sources. All sums of them are exact.
func (x *bucketRank) fill() error {
	pattern := make([]float32, x.total.Len())
	for i := range pattern {
		pattern[i] = float32(i % 1009)
	}
	q := x.c.Device().Default()
	k := q
	err := k.Move(x.total, backend.Of(pattern))
	P := x.c.Size()
	for i, src := range x.srcs {
		added := slices.Clone(pattern)
		for j := range added {
			added[j] += float32(x.c.Rank() + i)
		}
		err = errors.Join(err, k.Move(src, backend.Of(added)))
	}
	return errors.Join(err, k.Reduce(backend.Sum, x.total, slices.Repeat(
		[]backend.Buffer{x.total}, P)...), drained(q))
}

// measure verifies results, too.
func (x *bucketRank) measure(b *testing.B, flat bool, inFlight int) error {
	comm := backend.Communicator(x.c)
	if flat {
		comm = x.c.Communicator
	}
	testranks.NoError(x.warm(comm, inFlight))
	if x.c.Rank() == 0 {
		b.ResetTimer()
	}
	for range b.N {
		testranks.NoError(x.reduce(comm, inFlight))
	}
	testranks.NoError(backend.Barrier(comm))
	if x.c.Rank() == 0 {
		b.StopTimer()
		x.report(b, flat)
	}
	return x.verify()
}

// warm all-reduces once, since NCCL connects at the first call of each kind.
func (x *bucketRank) warm(comm backend.Communicator, inFlight int) error {
	q := x.c.Device().Default()
	return errors.Join(x.reduce(comm, inFlight), q.Zero(x.results), drained(q),
		backend.Barrier(comm))
}

// reduce all-reduces all buckets, each queue one at a time.
func (x *bucketRank) reduce(comm backend.Communicator, inFlight int) error {
	var works []backend.Work
	began := time.Now()
	for i, dst := range x.dsts {
		w, err := comm.Start(x.qs[i%inFlight], allReduce, dst, x.srcs[i])
		if err != nil {
			return err
		}
		works = append(works, w)
	}
	x.starting = time.Since(began)
	for _, w := range works {
		if err := w.Join(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

func (x *bucketRank) report(b *testing.B, flat bool) {
	b.SetBytes(int64(x.results.NBytes()))
	b.ReportMetric(1e3*b.Elapsed().Seconds()/float64(b.N), "ms/op")
	b.ReportMetric(1e3*x.starting.Seconds(), "start-ms")
	if flat {
		return
	}
	spans := x.lastSpans()
	links := linksIn(spans)
	b.ReportMetric(float64(links.Overlaps), "overlaps")
	b.ReportMetric(float64(links.InBucket), "in-bucket")
	b.ReportMetric(float64(x.c.plan.Choose(allReduce, backend.F32, x.total.Len()).Slices), "slices")
	b.ReportMetric(1e3*links.Inside.Seconds(), "inside-ms")
	b.ReportMetric(1e3*links.Between.Seconds(), "between-ms")
	b.ReportMetric(1e3*links.Both.Seconds(), "both-ms")
	b.Log(averages(spans))
}

// lastSpans returns those of the last operation.
func (x *bucketRank) lastSpans() []Span {
	spans, last := spansOf(x.c), 0
	for _, s := range spans {
		last = max(last, s.Call)
	}
	return slices.DeleteFunc(spans, func(s Span) bool { return s.Call <= last-bucketCount })
}

// linkUse is what BenchmarkGPUBuckets says of an operation's links.
type linkUse struct {
	Overlaps, InBucket    int
	Inside, Between, Both time.Duration
}

func linksIn(spans []Span) (u linkUse) {
	u.Overlaps = overlaps(spans, func(a, b Span) bool { return a.Call != b.Call })
	u.InBucket = overlaps(spans, func(a, b Span) bool {
		return a.Call == b.Call && a.Slice != b.Slice
	})
	u.Inside, u.Between, u.Both = busy(spans)
	return u
}

// averages says how long each phase of a slice was under way.
func averages(spans []Span) string {
	var number [phases]int
	var took [phases]time.Duration
	for _, s := range spans {
		number[s.Phase]++
		took[s.Phase] += s.End.Sub(s.Start)
	}
	var text []string
	for p, name := range phaseNames {
		if n := number[p]; n > 0 {
			text = append(text, fmt.Sprintf("%v %d x %v", name, n, (took[p]/time.Duration(n)).Round(
				100*time.Nanosecond)))
		}
	}
	return strings.Join(text, ", ")
}

// verify compares the extremes of what each bucket has added to the pattern. That does not take the
// data to the host.
func (x *bucketRank) verify() error {
	q, W := x.c.Device().Default(), x.c.Size()
	k := q
	var err error
	for i, dst := range x.dsts {
		ends := []backend.Buffer{x.ends.Slice(2*i, 2*i+1), x.ends.Slice(2*i+1, 2*i+2)}
		err = errors.Join(err, x.wrong.Run(ends, []backend.Buffer{dst, x.total},
			x.scratch.As(backend.U8)))
	}
	ends := make([]float32, x.ends.Len())
	if err := errors.Join(err, k.Move(backend.Of(ends), x.ends), drained(q)); err != nil {
		return err
	}
	for i, got := range ends {
		if want := float32(W*(W-1)/2 + W*(i/2)); got != want {
			return fmt.Errorf("bucket %d: an element is wrong by %v", i/2, got-want)
		}
	}
	return nil
}
