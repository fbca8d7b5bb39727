package fit

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
)

// job is what a run of a machine needs.
type job struct {
	samples []int   // of this rank, fewer than the inputs have room for at the end of an epoch
	weight  float64 // of each
	stream  uint64  // of random numbers: the seed and the epoch
	augment bool
}

// batch is memory for the samples of a run.
type batch struct {
	job
	tensors []*tensor.Dense // of the inputs, and of the weights if there are any
	rows    [][]any         // of each sample
	err     error
	filled  chan struct{}
}

// loader fills batches ahead of a machine.
type loader struct {
	data    Data
	free    chan *batch
	work    chan *batch
	ordered chan *batch // as next returns them
	quit    chan struct{}
	all     sync.WaitGroup
	bound   *batch // that the inputs have
}

// check returns an error unless the inputs are variables with a common first axis, which it
// returns.
func (d Data) check() (local int, err error) {
	err = backend.Given("fit.Data", "Set", d.Set, "Inputs", d.Inputs)
	if err != nil {
		return 0, err
	}
	if len(d.Inputs) == 0 {
		return 0, fmt.Errorf("%w: fit.Data has no Inputs", backend.ErrArgument)
	}
	for _, n := range d.Inputs {
		if n.Dims() == 0 || !n.IsVar() || n.Shape()[0] != d.Inputs[0].Shape()[0] {
			return 0, fmt.Errorf("%w: the input %s has the shape %v: inputs are variables, whose "+
				"first axis is the batch", backend.ErrArgument, n.Name(), n.Shape())
		}
	}
	local = d.Inputs[0].Shape()[0]
	if w := d.Weights; w != nil && !w.IsScalar() && !slices.Equal(w.Shape(), tensor.Shape{local}) {
		return 0, fmt.Errorf("%w: the weights %s have the shape %v: it must be [%d] or []",
			backend.ErrArgument, w.Name(), w.Shape(), local)
	} else if w != nil && w.Dtype() != tensor.Float32 && w.Dtype() != tensor.Float64 {
		return 0, fmt.Errorf("%w: the weights %s are %v: use Float32 or Float64",
			backend.ErrArgument, w.Name(), w.Dtype())
	}
	return local, nil
}

// load starts goroutines that fill batches for jobs, in their order.
func load(d Data, readers int, jobs iter.Seq[job]) *loader {
	n := max(1, readers) + 2 // one is bound, and one is ready
	l := &loader{data: d, free: make(chan *batch, n), ordered: make(chan *batch, n),
		work: make(chan *batch), quit: make(chan struct{})}
	for range n {
		l.free <- d.newBatch()
	}
	l.all.Go(func() {
		defer close(l.ordered)
		defer close(l.work)
		for j := range jobs {
			select {
			case b := <-l.free:
				b.job, b.filled, b.err = j, make(chan struct{}), nil
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
				b.fill(d)
				close(b.filled)
			}
		})
	}
	return l
}

// close ends the goroutines.
func (l *loader) close() {
	close(l.quit)
	l.all.Wait()
}

// nodes returns what a batch is bound to: the inputs, and the weights if there are any.
func (d Data) nodes() gorgonia.Nodes {
	if d.Weights == nil {
		return d.Inputs
	}
	return append(slices.Clone(d.Inputs), d.Weights)
}

func (d Data) newBatch() *batch {
	local := d.Inputs[0].Shape()[0]
	b := &batch{rows: make([][]any, local)}
	for k, n := range d.nodes() {
		shape := n.Shape().Clone()
		if n.IsScalar() {
			shape = tensor.Shape{1}
		}
		t := tensor.New(tensor.Of(n.Dtype()), tensor.WithShape(shape...))
		b.tensors = append(b.tensors, t)
		if k == len(d.Inputs) {
			break
		}
		elements := reflect.ValueOf(t.Data())
		size := elements.Len() / local
		for i := range b.rows {
			b.rows[i] = append(b.rows[i], elements.Slice(i*size, (i+1)*size).Interface())
		}
	}
	return b
}

// fill reads the samples of a job.
func (b *batch) fill(d Data) {
	for _, t := range b.tensors {
		t.Zero()
	}
	for i, row := range b.rows {
		if i >= len(b.samples) {
			if d.Pad != nil {
				d.Pad(row)
			}
			continue
		}
		sample := b.samples[i]
		if err := d.Set.Read(sample, row); err != nil && b.err == nil {
			b.err = fmt.Errorf("sample %d: %w", sample, err)
		}
		if b.augment && d.Augment != nil {
			d.Augment(rand.New(rand.NewPCG(b.stream, uint64(sample))), row)
		}
	}
	if d.Weights != nil {
		b.weigh(d.Weights)
	}
}

// weigh writes the weights of the samples, or of all together.
func (b *batch) weigh(weights *gorgonia.Node) {
	t := b.tensors[len(b.tensors)-1]
	n, x := len(b.samples), b.weight
	if weights.IsScalar() {
		n, x = 1, b.weight*float64(n)
	}
	for i := range n {
		switch to := t.Data().(type) {
		case []float32:
			to[i] = float32(x)
		case []float64:
			to[i] = x
		}
	}
}

// next binds the next batch to the inputs: none after the last one. It waits until the batch is
// filled. The batch of before stays as it is until then.
func (l *loader) next() error {
	b, ok := <-l.ordered
	if !ok {
		return nil
	}
	<-b.filled
	if b.err != nil {
		return b.err
	}
	for k, n := range l.data.nodes() {
		var value any = b.tensors[k]
		if n.IsScalar() {
			value = reflect.ValueOf(b.tensors[k].Data()).Index(0).Interface()
		}
		if err := gorgonia.Let(n, value); err != nil {
			return err
		}
	}
	if l.bound != nil {
		l.free <- l.bound
	}
	l.bound = b
	return nil
}
