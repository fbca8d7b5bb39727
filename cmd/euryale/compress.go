package main

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/bench"
)

// compression returns the wrapper that the command line names, nil for "none".
func compression(name string) (func(backend.Communicator) (backend.Communicator, error), error) {
	if name == "none" {
		return nil, nil
	}
	if name == "f16" || name == "bf16" {
		dtype, err := backend.ParseDType(name)
		return half.Wrap(dtype), err
	}
	how, err := sparse.ParseSelection(name)
	if err != nil {
		return nil, fmt.Errorf("--compress %s: use none, f16, bf16, topk=0.01 or threshold=2.5: %w",
			name, err)
	}
	return sparse.Wrap(how), nil
}

// compressions returns the names to compare, of which the dense one is the first.
func (b *benchCmd) compressions() ([]string, error) {
	names := []string{"none"}
	for _, name := range b.Compress {
		if _, err := compression(name); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		if name != "none" {
			names = append(names, name)
		}
	}
	if b.Collective != "allreduce" || b.DType != "f32" || b.Op != "sum" && b.Op != "avg" {
		return nil, fmt.Errorf("bench: --compress is for sums and averages of f32 by allreduce, "+
			"not for %s of %s by %s", b.Op, b.DType, b.Collective)
	}
	return names, nil
}

// compressed is the result of one candidate.
type compressed struct {
	Compress string  `json:"compress"`
	Ranks    int     `json:"ranks"`
	Bytes    int     `json:"bytes"` // of the operand
	Op       string  `json:"op"`
	Micros   float64 `json:"us"`
	OfDense  float64 `json:"of_dense"` // time, as a share of the dense call's
	OfBytes  float64 `json:"of_bytes"` // bytes sent by a rank, as a share of the dense call's
	Dense    float64 `json:"dense"`    // the share of calls that fell back to dense
	Why      string  `json:"why,omitempty"`
	Machine  string  `json:"machine"`
	Version  string  `json:"version"`
}

// String is a row of the table.
func (c compressed) String() string {
	row := fmt.Sprintf(" %11d %16s %12.2f %9.3f %9.4f %7.2f\n", c.Bytes, c.Compress, c.Micros,
		c.OfDense, c.OfBytes, c.Dense)
	if c.Why != "" {
		row += "#     " + c.Why + "\n"
	}
	return row
}

// compressedTitles is the head of the table.
const compressedTitles = "#%11s %16s %12s %9s %9s %7s\n"

// compare times the candidates on the same all-reduce, on every rank.
func (s *output) compare(comm backend.Communicator, c bench.Config) error {
	t := tuner{output: s, Config: c, rank: comm.Rank(), size: comm.Size()}
	names, err := s.cmd.compressions()
	if err == nil {
		err = t.beginCompare(comm)
	}
	if err != nil {
		return err
	}
	ways := make([]*candidate, len(names))
	for i, name := range names {
		if ways[i], err = newCandidate(name, comm); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	comparison, err := bench.NewComparison(comm, operands*max(int(c.Max), 4), nil)
	if err != nil {
		return err
	}
	for _, size := range t.sizes() {
		if err = t.compareAt(comparison, ways, max(1, size/4)); err != nil {
			err = fmt.Errorf("bench: %w", err)
			break
		}
	}
	errs := []error{err, comparison.Close()}
	for _, w := range ways {
		errs = append(errs, w.comm.Close())
	}
	return errors.Join(errs...)
}

// beginCompare writes the method.
func (t *tuner) beginCompare(comm backend.Communicator) error {
	if t.rank != 0 { // and may share the output
		return nil
	}
	t.device = modelOf(comm.Device())
	lines := t.head([]string{
		fmt.Sprintf("euryale bench --compress: %v of f32, %v to %v, factor %d, backend %s",
			t.Collective, t.Min, t.Max, t.Factor, t.backendName()),
		"ranks: " + t.ranks(t.size),
		"method: two operands of a normal distribution (deviation 1) take turns; residuals are " +
			"kept; rounds in which the ways",
		"  take turns, each with a batch of calls started one behind the other (2 ms, or one " +
			"call if that takes longer);",
		fmt.Sprintf("  as many rounds as fit %v (11 to 201); medians, of the slowest rank; "+
			"results have the same bits on all ranks", t.Budget),
	})
	if !t.cmd.JSON {
		lines += fmt.Sprintf(compressedTitles, "size", "compress", "call (us)", "of dense",
			"of bytes", "dense")
	}
	return t.note("%s", lines)
}

// lent is a communicator that its wrapper must not close.
type lent struct{ backend.Base }

// Close does nothing: the owner closes it.
func (lent) Close() error { return nil }

// StartChecked implements [backend.CheckedStarter].
func (l lent) StartChecked(q backend.Queue, what backend.Collective, count int, dst,
	src backend.Buffer) (backend.Work, error) {
	return l.Pass(q, what, count, dst, src)
}

// candidate is one way to compress.
type candidate struct {
	name string
	comm backend.Communicator
}

func newCandidate(name string, inner backend.Communicator) (*candidate, error) {
	w := &candidate{name, lent{backend.Wrap(inner)}}
	wrap, err := compression(name)
	if err != nil || wrap == nil {
		return w, err
	}
	w.comm, err = wrap(w.comm)
	return w, err
}

// slot is the State of the operand. It is the same for all lengths: residuals are reset
// between lengths.
const slot = 1

// traffic is what a candidate has sent so far.
type traffic struct{ sent, dense, calls, denseCalls int64 }

func (w *candidate) traffic() traffic {
	switch c := w.comm.(type) {
	case *half.Communicator:
		n := c.Counters()
		return traffic{n.Bytes, n.Dense, n.Calls, 0}
	case *sparse.Communicator:
		n := c.Counters()
		return traffic{n.Bytes, n.DenseBytes, n.Calls, n.Dense}
	}
	return traffic{}
}

// operands is how many buffers a comparison needs: two sources and a result.
const operands = 3

// compareAt times the candidates for n elements.
func (t *tuner) compareAt(comparison *bench.Comparison, ways []*candidate, n int) error {
	all := comparison.Buffer().As(backend.F32)
	xs, y := [2]backend.Buffer{all.Slice(0, n), all.Slice(n, 2*n)}, all.Slice(2*n, 3*n)
	for i := range xs {
		if err := fillNormal(ways[0].comm.Device(), xs[i], t.rank, i); err != nil {
			return err
		}
	}
	what := backend.Collective{Kind: backend.AllReduce, Op: t.Collective.Op, State: slot}
	var calls []func() (backend.Work, error)
	var before []traffic
	for _, w := range ways {
		turn := 0
		calls = append(calls, func() (backend.Work, error) {
			turn++
			return w.comm.Start(nil, what, y, xs[turn%2])
		})
		before = append(before, w.traffic())
	}
	micros, err := comparison.Race(t.Budget, calls...)
	if err != nil {
		return fmt.Errorf("%d elements: %w", n, err)
	}
	for i, w := range ways {
		if err := w.agree(what, y, xs[0]); err != nil {
			return fmt.Errorf("%s of %d elements: %w", w.name, n, err)
		}
		r := w.since(before[i])
		r.Ranks, r.Bytes, r.Op = t.size, 4*n, what.Op.String()
		r.Micros, r.OfDense = micros[i], micros[i]/micros[0]
		r.Machine, r.Version = t.machine(), bench.Version()
		for _, x := range []*float64{&r.Micros, &r.OfDense, &r.OfBytes, &r.Dense} {
			*x = math.Round(*x*1e4) / 1e4
		}
		if err := t.result(r.String(), r); err != nil {
			return err
		}
	}
	return nil
}

// since returns what was sent since before, and why. It resets residuals.
func (w *candidate) since(before traffic) compressed {
	now := w.traffic()
	r := compressed{Compress: w.name, OfBytes: 1, Dense: 1}
	if w.name != "none" {
		r.OfBytes, r.Dense = share(now.sent-before.sent, now.dense-before.dense),
			share(now.denseCalls-before.denseCalls, now.calls-before.calls)
	}
	if c, ok := w.comm.(*sparse.Communicator); ok {
		r.Why = c.Explain(slot)
		c.Reset()
	}
	return r
}

func share(a, b int64) float64 { return float64(a) / float64(max(b, 1)) }

// fillNormal fills device memory with numbers that differ between ranks.
func fillNormal(d backend.Device, to backend.Buffer, rank, i int) error {
	rng := rand.New(rand.NewPCG(uint64(rank), uint64(i)))
	x := make([]float32, to.Len())
	for j := range x {
		x[j] = float32(rng.NormFloat64())
	}
	return moved(d, to, backend.Of(x))
}

// moved copies between the host and a device, and waits for it.
func moved(d backend.Device, dst, src backend.Buffer) error {
	q := d.Default()
	if err := q.Move(dst, src); err != nil {
		return err
	}
	done, err := q.Record()
	if err != nil {
		return err
	}
	return bench.Await(done)
}

// agree makes a call whose result must have the same bits on all ranks.
func (w *candidate) agree(what backend.Collective, y, x backend.Buffer) error {
	if err := backend.Run(w.comm, what, y, x); err != nil {
		return err
	}
	result := make([]float32, y.Len())
	if err := moved(w.comm.Device(), backend.Of(result), y); err != nil {
		return err
	}
	sum := int64(crc32.Checksum(backend.Of(result).Bytes(), crc32.MakeTable(crc32.Castagnoli)))
	memory, err := w.comm.Alloc(16)
	if err != nil {
		return err
	}
	bounds := []int64{sum, -sum}
	words := memory.As(backend.I64)
	if err := moved(w.comm.Device(), words, backend.Of(bounds)); err != nil {
		return err
	}
	if err := backend.Run(w.comm, backend.Collective{Kind: backend.AllReduce, Op: backend.Max},
		words, words); err != nil {
		return err
	}
	if err := moved(w.comm.Device(), backend.Of(bounds), words); err != nil {
		return err
	}
	if bounds[0] != -bounds[1] {
		return errors.New("the results differ between ranks: this compression must not be used " +
			"on this machine")
	}
	return nil
}
