package backendtest

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// sizes returns the lengths of operands that are boundaries of something, but
// for the largest.
func sizes(P int) []int {
	all := []int{0, 1, 2, 7, 8, 31, P - 1, P, P + 1, 255, 256, 257, 511, 1000, 4095, 65537}
	slices.Sort(all)
	return slices.Compact(all)
}

// large is the largest length.
const large = 1<<20 + 3

// The columns of the product.
const (
	colKind = iota
	colDType
	colOp
	colSize
	colAlgorithm
	colInPlace
	colOffset
	colWhere
	colSplits
	colRoot
	colPattern
	colQueue
	columns
)

// wheres are the ways to place sources and destinations in plain and shared
// memory.
var wheres = []func(rank int) (src, dst int){
	func(int) (int, int) { return plain, plain },
	func(int) (int, int) { return shared, shared },
	func(int) (int, int) { return shared, plain },
	func(int) (int, int) { return plain, shared },
	func(r int) (int, int) { return r % 2, r % 2 },
	func(r int) (int, int) { return min(r, 1), 1 - min(r, 1) },
}

var algorithms = []backend.Algorithm{backend.Auto, backend.OneShot, backend.TwoShot}

func dims(P int) []int {
	d := make([]int, columns)
	d[colKind] = len(backend.Kinds())
	d[colDType] = len(backend.DTypes())
	d[colOp] = len(backend.ReduceOps())
	d[colSize] = len(sizes(P))
	d[colAlgorithm] = len(algorithms)
	d[colInPlace] = 2
	d[colOffset] = 16
	d[colWhere] = len(wheres)
	d[colSplits] = splitModes
	d[colRoot] = min(P, 3)
	d[colPattern] = int(patterns)
	d[colQueue] = 2
	return d
}

// product is every row of the columns that name different code, the other
// columns taking turns.
func product(P int) [][]int {
	d := dims(P)
	var rows [][]int
	turn := 0
	for _, kind := range backend.Kinds() {
		every := []int{colDType, colSize, colInPlace}
		if kind.Reduces() {
			every = append(every, colOp, colAlgorithm)
		}
		if kind.Rooted() {
			every = append(every, colRoot)
		}
		if chunked(kind) {
			every = append(every, colSplits)
		}
		row := make([]int, columns)
		row[colKind] = int(kind - backend.AllReduce)
		for more := true; more; more = next(row, every, d) {
			turn++
			for col := range row {
				if col != colKind && !slices.Contains(every, col) {
					row[col] = turn / (col + 1) % d[col]
				}
			}
			rows = append(rows, slices.Clone(row))
		}
	}
	return rows
}

// next counts up the given columns of a row.
func next(row, every, dims []int) bool {
	for _, col := range every {
		if row[col]++; row[col] < dims[col] {
			return true
		}
		row[col] = 0
	}
	return false
}

func chunked(k backend.Kind) bool {
	switch k {
	case backend.AllReduce, backend.Broadcast, backend.Reduce:
		return false
	}
	return true
}

// The ways to divide an operand.
const (
	even     = iota // nil splits, the length rounded up to a multiple of P
	balanced        // as even as whole elements allow
	zeros           // nothing for every other rank
	one             // everything for one rank
	random
	splitModes
)

// divide returns the splits and the count of an operand of about n elements.
func divide(kind backend.Kind, mode, n, P int, rng *rand.Rand) (splits []int, count int) {
	switch {
	case !chunked(kind):
		return nil, n
	case mode == even:
		return nil, (n + P - 1) / P
	case kind == backend.AllToAll:
		for s := range P {
			row := weights(mode, n/P, P, rng)
			for r := range P {
				splits = append(splits, row[(r+s)%P])
			}
		}
	default:
		splits = weights(mode, n, P, rng)
	}
	return splits, total(splits)
}

// weights divides n elements among P ranks.
func weights(mode, n, P int, rng *rand.Rand) []int {
	w := make([]int, P)
	switch mode {
	case balanced:
		for i := range n % P {
			w[i]++
		}
		for i := range w {
			w[i] += n / P
		}
	case zeros:
		for i := 1; i < P; i += 2 {
			w[i] = n / (P / 2)
		}
	case one:
		w[P-1] = n
	default:
		for left := n; left > 0; {
			k := 1 + rng.IntN(left)
			w[rng.IntN(P)] += k
			left -= k
		}
	}
	return w
}

// trial makes the trial of a row.
func (s *suite) trial(row []int, P, n int, seed uint64) *trial {
	rng := rand.New(rand.NewPCG(seed, 1))
	what := backend.Collective{
		Kind: backend.Kinds()[row[colKind]], Op: backend.ReduceOps()[row[colOp]],
		Root: []int{0, P - 1, P / 2}[row[colRoot]], Algorithm: algorithms[row[colAlgorithm]],
	}
	var count int
	what.Splits, count = divide(what.Kind, row[colSplits], n, P, rng)
	d := backend.DTypes()[row[colDType]]
	p := pattern(row[colPattern])
	if s.OwnOrder && d.Float() && what.Kind.Reduces() && what.Op <= backend.Prod {
		p = integers // where every order gives the same
	}
	t := newTrial(what, d, P, count, p, seed).expect()
	t.offset, t.inPlace, t.where = row[colOffset], row[colInPlace] == 1, wheres[row[colWhere]]
	op := what.Op
	if !what.Kind.Reduces() {
		op = backend.Sum
	}
	t.unsupported = s.Unsupported(what.Kind, d, op)
	return t
}

// meanings is every kind with every reduction, dtype and pattern, on operands of
// one length, the other columns taking turns.
func meanings(P int) [][]int {
	d := dims(P)
	var rows [][]int
	row := make([]int, columns)
	for more := true; more; more = next(row, []int{colKind, colOp, colDType, colPattern}, d) {
		if row[colOp] > 0 && !backend.Kinds()[row[colKind]].Reduces() {
			continue
		}
		for _, col := range []int{colInPlace, colOffset, colWhere, colAlgorithm, colRoot,
			colQueue} {
			row[col] = len(rows) / (col + 1) % d[col]
		}
		row[colSize] = slices.Index(sizes(P), 257)
		rows = append(rows, slices.Clone(row))
	}
	return rows
}

// results runs every meaning, and every pair of values or the full product. Under the race detector
// the meanings have numbers of one pattern: others take the same memory in the same order.
func (s *suite) results(P int) error {
	rows := meanings(P)
	if proctest.Race {
		rows = slices.DeleteFunc(rows, func(row []int) bool {
			return row[colPattern] != int(normals)
		})
	}
	rows = append(rows, pairwise(dims(P))...)
	if s.full {
		rows = product(P)
	}
	return s.bench(P, 65537, func(b *bench) error {
		for i, row := range rows {
			t := s.trial(row, P, sizes(P)[row[colSize]], uint64(i))
			if err := b.run(t, row[colQueue] == 1); err != nil {
				return err
			}
		}
		return nil
	})
}

// largeResults runs every kind and dtype, though not every pair of them, with
// the largest operand.
func (s *suite) largeResults(P int) error {
	some, large := 1, large // one in so many
	if proctest.Race {      // which makes every element slow
		large >>= 3
	}
	if !s.full {
		if P != 3 && (P != 2 || slices.Contains(s.Sizes, 3)) {
			return errSkip("one group size is enough for a sample: EURYALE_FULL=1 runs all")
		}
		some = 7
	}
	return s.bench(P, large, func(b *bench) error {
		for i, kind := range backend.Kinds() {
			for j := range backend.DTypes() {
				if (i+j)%some != 0 {
					continue
				}
				row := make([]int, columns)
				row[colKind], row[colDType], row[colOffset], row[colSplits] = int(
					kind-backend.AllReduce), j, i, (i+j)%splitModes
				row[colWhere], row[colAlgorithm] = (i+j)%2, j%len(algorithms)
				if err := b.run(s.trial(row, P, large, uint64(i*j)), false); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// bench is a group with memory and a queue for every rank.
type bench struct {
	comms  []backend.Communicator
	ms     []*memory
	qs     []backend.Queue
	before string // the last call, for messages
}

// bench runs f with memory for operands of n elements of eight bytes.
func (s *suite) bench(P, n int, f func(b *bench) error) error {
	// Source and destination, each rounded up to chunks and guarded.
	room := 2 * (8*(n+2*P+16) + 4*guardBytes)
	return s.with(P, patient, func(g *Group) error {
		b := &bench{comms: g.Comms, ms: make([]*memory, P), qs: make([]backend.Queue, P)}
		err := s.each(g.Comms, func(c backend.Communicator) (err error) {
			b.qs[c.Rank()] = testranks.Must(c.Device().NewQueue())
			b.ms[c.Rank()], err = s.newMemory(c, room, min(room, 32<<20/P))
			return err
		})
		if err == nil {
			err = f(b)
		}
		return errors.Join(err, b.close())
	})
}

func (b *bench) close() (err error) {
	for r := range b.qs {
		if b.qs[r] != nil {
			err = errors.Join(err, b.qs[r].Close())
		}
		if b.ms[r] != nil {
			err = errors.Join(err, b.ms[r].free())
		}
	}
	return err
}

// run runs a trial on the default queue or on the ranks' own.
func (b *bench) run(t *trial, queued bool) error {
	var qs []backend.Queue
	if queued {
		qs = b.qs
	}
	desc := fmt.Sprintf("%v by %v of %v, count %d, splits %v, offset %d, in place %v, queued %v",
		t.what, t.what.Algorithm, t.dtype, t.count, t.what.Splits, t.offset, t.inPlace, queued)
	if err := t.run(b.comms, b.ms, qs); err != nil {
		return fmt.Errorf("%s (after %s): %w", desc, b.before, err)
	}
	b.before = desc
	return nil
}

// rounding checks sums of normal numbers against float64: the error is at most
// half a unit in the last place for each addition, and one for the rounding.
func (s *suite) rounding(P int) error {
	unit := map[backend.DType]float64{backend.F16: 0x1p-11, backend.BF16: 0x1p-8,
		backend.F32: 0x1p-24}
	return s.bench(P, 4095, func(b *bench) error {
		for _, d := range backend.DTypes() { // in the same order on every rank
			u, rounds := unit[d]
			if !rounds || s.Unsupported(backend.AllReduce, d, backend.Sum) {
				continue
			}
			t := newTrial(backend.Collective{Kind: backend.AllReduce}, d, P, 4095, normals,
				uint64(d))
			if err := b.run(t, false); err != nil {
				return err
			}
			xs := decodeAll(d, t.srcs)
			for i, got := range decode(d, t.gots[b.comms[0].Rank()]) {
				want, size := 0.0, 0.0
				for _, x := range xs {
					want += float64(x[i])
					size += math.Abs(float64(x[i]))
				}
				if bound := float64(P+1)*u*size + 0x1p-24; math.Abs(float64(got)-want) > bound {
					return fmt.Errorf("%v: element %d is %v, want %v ± %v", d, i, got, want, bound)
				}
			}
		}
		return nil
	})
}

// algorithms runs the same data by every algorithm.
func (s *suite) algorithms(P int) error {
	lengths := []int{1, 1000}
	if s.full {
		lengths = append(lengths, 65537/P)
	}
	return s.bench(P, 65537, func(b *bench) error {
		for _, kind := range []backend.Kind{backend.AllReduce, backend.Reduce,
			backend.ReduceScatter} {
			for _, d := range backend.DTypes() {
				for _, n := range lengths {
					if s.Unsupported(kind, d, backend.Sum) {
						continue
					}
					_, count := divide(kind, even, n*P, P, nil)
					t := newTrial(backend.Collective{Kind: kind}, d, P, count, normals, uint64(n))
					if err := b.sameByAll(t); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}

// sameByAll runs a trial by every algorithm and compares the bits.
func (b *bench) sameByAll(t *trial) error {
	var first [][]byte
	for _, a := range algorithms {
		t.what.Algorithm = a
		if err := b.run(t, false); err != nil {
			return err
		}
		if first == nil {
			first = slices.Clone(t.gots)
		}
		for r := range t.gots {
			if !bytes.Equal(t.gots[r], first[r]) {
				return fmt.Errorf("%v of %d %v: %v gives other bits than %v on rank %d", t.what,
					t.count, t.dtype, a, backend.Auto, r)
			}
		}
	}
	return nil
}

// reducePart reduces a part of an operand alone.
func (s *suite) reducePart(P int) error {
	if s.OwnOrder {
		return errSkip("it adds in its own order")
	}
	const n, from, to = 20480, 0, 16640
	return s.bench(P, n, func(b *bench) error {
		for _, d := range []backend.DType{backend.F16, backend.BF16, backend.F32, backend.F64} {
			what := backend.Collective{Kind: backend.AllReduce}
			if s.Unsupported(what.Kind, d, what.Op) {
				continue
			}
			all := newTrial(what, d, P, n, normals, 4)
			if err := b.run(all, false); err != nil {
				return err
			}
			// the same seed gives the same first elements
			few := newTrial(what, d, P, to-from, normals, 4)
			if err := b.run(few, false); err != nil {
				return err
			}
			first := b.comms[0].Rank()
			if err := differ(d, few.gots[first], all.gots[first][:len(few.gots[first])]); err !=
				nil {
				return fmt.Errorf("part of %v alone and within the whole: %w", d, err)
			}
		}
		return nil
	})
}

// average checks that the sum of an average may exceed the dtype.
func (s *suite) average(P int) error {
	if s.Unsupported(backend.AllReduce, backend.F16, backend.Avg) {
		return errSkip("AVG of f16 is not offered")
	}
	return s.bench(P, 1000, func(b *bench) error {
		t := newTrial(backend.Collective{Kind: backend.AllReduce, Op: backend.Avg}, backend.F16, P,
			1000, integers, 1)
		for r := range t.srcs {
			t.srcs[r] = encode(backend.F16, slices.Repeat([]float32{40000, -40000}, 500))
		}
		t.wants = slices.Clone(t.srcs)
		return b.run(t, false)
	})
}

// sameBits runs random trials. Running one compares the results of the ranks of a process, and at
// the end each rank compares its own with those of rank 0.
func (s *suite) sameBits(P int) error {
	d := dims(P)
	rng := rand.New(rand.NewPCG(uint64(P), 3))
	sums := make([][]int64, P)
	return s.bench(P, 1000, func(b *bench) error {
		for i := range s.times(1000) {
			row := make([]int, columns)
			for col := range row {
				row[col] = rng.IntN(d[col])
			}
			row[colKind], row[colPattern] = 0, int(normals)
			t := s.trial(row, P, rng.IntN(1001), uint64(i))
			if err := b.run(t, row[colQueue] == 1); err != nil {
				return err
			}
			for _, c := range b.comms {
				sums[c.Rank()] = append(sums[c.Rank()], int64(crc32.ChecksumIEEE(t.gots[c.Rank()])))
			}
		}
		return s.each(b.comms, func(c backend.Communicator) error {
			testranks.NoError(s.tell("its bits", c.Rank(), sums[c.Rank()]...))
			first := testranks.Must(s.hear("its bits", 0))
			for i, sum := range sums[c.Rank()] {
				if sum != first[i] {
					return fmt.Errorf("in trial %d rank %d has other bits than rank 0", i, c.Rank())
				}
			}
			return nil
		})
	})
}
