package fit

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"iter"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// job is what a run of a machine reads.
type job struct {
	samples []int   // of this rank, fewer than the inputs have room for at the end of an epoch
	weight  float64 // of each
	stream  uint64  // of random numbers: the seed and the epoch
	augment func(r *rand.Rand, row []any)
}

// batch is memory for the samples of a run.
type batch struct {
	job
	tensors []*tensor.Dense // of the inputs, and of the weights if there are any
	rows    [][]any         // of each sample
	err     error
	filled  chan struct{}
}

// loader fills batches ahead of a machine. A batch goes from free to ordered and work, and back.
type loader struct {
	nodes               gorgonia.Nodes // of the tensors of a batch
	free, work, ordered chan *batch
	quit                chan struct{}
	all                 sync.WaitGroup
	current, bound      *batch       // the one after the last next, and that of the nodes
	ready               atomic.Int64 // batches that are filled and not current
}

// checkIncomplete returns an error if n samples do not fill batches of a size, and the missing ones
// would change what a machine computes.
func (d Data) checkIncomplete(m *vm.Machine, comm backend.Communicator, n, batch int) error {
	if n%batch == 0 {
		return nil
	}
	var row []any
	for _, in := range d.Inputs {
		of := reflect.SliceOf(in.Dtype().Type)
		size := in.Shape().TotalSize() / in.Shape()[0]
		row = append(row, reflect.MakeSlice(of, size, size).Interface())
	}
	if d.Pad != nil {
		d.Pad(row)
	}
	err := m.CheckIncomplete(vm.Incomplete{Inputs: d.Inputs, Missing: row, Weights: d.Weights,
		Loss: d.Loss, Comm: comm})
	if err != nil {
		err = fmt.Errorf("%d samples do not fill batches of %d: %w", n, batch, err)
	}
	return err
}

// compared is into how many parts a table is divided, of which ranks compare the contents. So many
// samples are read for that at most, and so many numbers: a few milliseconds.
const (
	compared        = 16
	comparedSamples = 1 << 16
	comparedNumbers = 1 << 20
)

// some yields the samples of a table that are looked at before a training: all, or as many at equal
// distances.
func (d Data) some(columns int) iter.Seq[int] {
	return func(yield func(int) bool) {
		n := d.Set.Len()
		most := min(comparedSamples, max(comparedNumbers/(columns+1), compared))
		for i, every := 0, (n+most-1)/most; i < n && yield(i); i += every {
		}
	}
}

// same returns an error on all ranks if they have been given other samples, of which each would
// read its part. It compares the first one, where that can be read and is the same each time, and
// of a table most.
func (d Data) same(comm backend.Communicator) error {
	if comm.Size() == 1 {
		return nil
	}
	row := newBatch(d.Inputs, len(d.Inputs)).rows[0]
	var text []byte
	read := func(i int, before uint64) uint64 {
		h := fnv.New64a()
		if d.Set.Read(i, slices.Clone(row)) != nil { // who needs it says so
			return 0
		}
		text = numbersOf(binary.LittleEndian.AppendUint64(text[:0], before), row)
		h.Write(text)
		return h.Sum64()
	}
	var parts [1 + compared]uint64
	parts[0] = read(0, 0)
	for range 15 { // a mirrored picture, say, is often the same twice
		if parts[0] != 0 && parts[0] != read(0, 0) {
			parts[0] = 0
		}
	}
	n := d.Set.Len()
	if columns := len(d.mapping().Columns); columns > 0 && parts[0] != 0 {
		for i := range d.some(columns) {
			part := &parts[1+i*compared/n]
			*part = read(i, *part)
		}
	}
	sums := []float64{}
	for _, part := range parts {
		sums = append(sums, float64(part>>12)) // which a float64 holds
	}
	all, err := autograd.Gather(comm, append(sums, float64(n))...)
	for r := 1; r < len(all) && err == nil; r++ {
		err = different(all, r)
	}
	return err
}

// different returns an error if a rank has other samples than one before it.
func different(all [][]float64, r int) error {
	const length = 1 + compared
	for part, sum := range all[r][:length] {
		of := slices.IndexFunc(all[:r], func(one []float64) bool {
			return one[part] != 0 && one[length] == all[r][length]
		})
		if sum == 0 || of < 0 || all[of][part] == sum {
			continue
		}
		which := "the first sample"
		if n := int(all[r][length]); part > 0 {
			which = fmt.Sprintf("a sample from %d to %d", ((part-1)*n+compared-1)/compared,
				(part*n-1)/compared)
		}
		return refused("%s of rank %d is not that of rank %d: give all ranks the same files, of "+
			"which each reads its part", which, r, of)
	}
	return nil
}

// numbersOf appends the elements of a sample.
func numbersOf(text []byte, row []any) []byte {
	for _, x := range row {
		if ints, ok := x.([]int); ok { // of no fixed size
			for _, k := range ints {
				text = binary.LittleEndian.AppendUint64(text, uint64(k))
			}
		} else if more, err := binary.Append(text, binary.LittleEndian, x); err == nil {
			text = more
		}
	}
	return text
}

// load starts goroutines that fill batches for jobs, in their order.
func load(d Data, readers int, jobs func(yield func(job) bool)) *loader {
	n := max(1, readers) + 3 // the nodes have one, one is next, and one is ready
	l := &loader{nodes: slices.Clone(d.Inputs), free: make(chan *batch, n), work: make(chan *batch),
		ordered: make(chan *batch, n), quit: make(chan struct{})}
	if d.Weights != nil {
		l.nodes = append(l.nodes, d.Weights)
	}
	for range n {
		l.free <- newBatch(l.nodes, len(d.Inputs))
	}
	l.all.Go(func() {
		defer close(l.ordered)
		defer close(l.work)
		for j := range jobs {
			select {
			case b := <-l.free:
				b.job, b.filled = j, make(chan struct{})
				l.ordered <- b
				l.work <- b
			case <-l.quit:
				return
			}
		}
	})
	for range max(1, readers) {
		l.all.Go(func() {
			for b := range l.work {
				b.err = b.fill(d)
				l.ready.Add(1)
				close(b.filled)
			}
		})
	}
	return l
}

// close ends the goroutines; there are none if it is nil.
func (l *loader) close() {
	if l == nil {
		return
	}
	close(l.quit)
	l.all.Wait()
}

// newBatch makes tensors for nodes, and the rows of the first ones, the inputs.
func newBatch(nodes gorgonia.Nodes, inputs int) *batch {
	b := &batch{rows: make([][]any, nodes[0].Shape()[0])}
	for k, n := range nodes {
		shape := n.Shape().Clone()
		if n.IsScalar() {
			shape = tensor.Shape{1}
		}
		t := tensor.New(tensor.Of(n.Dtype()), tensor.WithShape(shape...))
		b.tensors = append(b.tensors, t)
		all, size := reflect.ValueOf(t.Data()), shape.TotalSize()/len(b.rows)
		for i := 0; i < len(b.rows) && k < inputs; i++ {
			b.rows[i] = append(b.rows[i], all.Slice(i*size, (i+1)*size).Interface())
		}
	}
	return b
}

// fill reads the samples of a job, and writes their weights.
func (b *batch) fill(d Data) error {
	for _, t := range b.tensors {
		t.Zero()
	}
	for i := range b.rows {
		row, of := slices.Clone(b.rows[i]), "Data.Pad"
		switch {
		case i < len(b.samples):
			of = fmt.Sprintf("sample %d", b.samples[i])
			if err := d.Set.Read(b.samples[i], row); err != nil {
				return fmt.Errorf("%s: %w", of, err)
			}
			if b.augment != nil {
				b.augment(rand.New(rand.NewPCG(b.stream, uint64(b.samples[i]))), row)
			}
		case d.Pad != nil:
			d.Pad(row)
		}
		if err := b.take(i, row); err != nil {
			return fmt.Errorf("%s: %w", of, err)
		}
	}
	if d.Weights == nil {
		return nil
	}
	n, x := len(b.samples), b.weight
	if d.Weights.IsScalar() { // of all together
		n, x = 1, b.weight*float64(n)
	}
	for i := range n {
		to := reflect.ValueOf(b.tensors[len(d.Inputs)].Data()).Index(i)
		to.SetFloat(x)
	}
	return nil
}

// take copies what Read, Augment or Pad have put in the place of a slice of row i.
func (b *batch) take(i int, row []any) error {
	for k, x := range row {
		to, from := reflect.ValueOf(b.rows[i][k]), reflect.ValueOf(x)
		if !from.IsValid() || from.Type() != to.Type() || from.Len() != to.Len() {
			length := 0
			if from.IsValid() && from.Kind() == reflect.Slice {
				length = from.Len()
			}
			return fmt.Errorf("%w: row[%d] was replaced by a %T of %d: write to the %v of %d that "+
				"is there", backend.ErrArgument, k, x, length, to.Type(), to.Len())
		}
		if from.UnsafePointer() != to.UnsafePointer() {
			reflect.Copy(to, from)
		}
	}
	return nil
}

// next waits until the next batch is filled: there is none after the last one.
func (l *loader) next() error {
	b, ok := <-l.ordered
	if !ok {
		return nil
	}
	<-b.filled
	l.ready.Add(-1)
	l.current = b
	return b.err
}

// ahead returns how many batches are ready for next, and how many there can be.
func (l *loader) ahead() (ready, capacity int) { return int(l.ready.Load()), cap(l.free) - 2 }

// bind gives the nodes the values of the batch. An evaluation may have given them others. The batch
// that they had is filled anew from here on, and no sooner: hooks may read the nodes.
func (l *loader) bind() (err error) {
	for k := 0; k < len(l.nodes) && err == nil; k++ {
		var value any = l.current.tensors[k]
		if l.nodes[k].IsScalar() {
			value = reflect.ValueOf(l.current.tensors[k].Data()).Index(0).Interface()
		}
		err = gorgonia.Let(l.nodes[k], value)
	}
	if l.bound != nil && l.bound != l.current {
		l.free <- l.bound
	}
	l.bound = l.current
	return err
}
