package fit

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// evaluation is data, and a machine that evaluates them.
type evaluation struct {
	machine *vm.Machine
	data    Data
	metrics []Metric
}

// metric returns the metric of a name, nil if there is none.
func (e *evaluation) metric(name string) *Metric {
	for i := 0; e != nil && i < len(e.metrics); i++ {
		if e.metrics[i].Name == name {
			return &e.metrics[i]
		}
	}
	return nil
}

// parts says which parts of an evaluation a rank does: n of all, from number first on. The sums of
// all parts are added in order, whichever ranks do them.
type parts struct{ first, n, all int }

// evenly has each rank do one part.
func evenly(comm backend.Communicator) parts { return parts{comm.Rank(), 1, comm.Size()} }

// ready returns an error unless all of it can be, in so many parts.
func (e *evaluation) ready(comm backend.Communicator, all int) error {
	if err := e.check(); err != nil {
		return err
	}
	n, whole := e.data.Set.Len(), e.data.Inputs[0].Shape()[0]*all
	if e.data.Loss != nil && e.data.Weights == nil && n%whole > 0 {
		return refused("%d samples do not fill whole batches of %d, so the loss would count "+
			"padding: set Data.Weights, or leave Data.Loss out", n, whole)
	}
	if err := e.data.fills(whole); err != nil {
		return err
	}
	if err := e.data.checkIncomplete(e.machine, comm, n, whole); err != nil {
		return fmt.Errorf("%w: evaluate samples that fill batches", err)
	}
	return nil
}

// run evaluates, each rank its parts of the samples. The graph divides the loss of a sample by full
// times the samples of a run. A rank with an error takes part until all ranks know of it.
func (e *evaluation) run(comm backend.Communicator, p parts, readers int, full float64,
	wrong error) (map[string]float64, error) {
	err := wrong
	if err == nil {
		err = e.ready(comm, p.all)
	}
	text := ""
	if e.data.Set != nil && len(e.data.Inputs) > 0 {
		text = fmt.Sprintf("the evaluation has %d samples\na share has up to %d\n",
			e.data.Set.Len(), e.data.Inputs[0].Shape()[0])
	}
	for _, m := range e.metrics {
		text += fmt.Sprintf("a metric is %q\n", m.Name)
	}
	if err := autograd.Agree(comm, text, err); err != nil {
		return nil, err
	}
	if err := e.data.same(comm); err != nil {
		return nil, err
	}
	n, local := e.data.Set.Len(), e.data.Inputs[0].Shape()[0]
	steps, err := autograd.Evaluation(autograd.Solo(), n, local*p.all)
	if err != nil {
		return nil, err
	}
	full *= float64(local)
	var sums [][]float64 // of the last part here; then of all
	var own []float64    // of the parts here, one after the other
	for part := p.first; part < p.first+p.n; part++ {
		var shares [][]int
		for _, step := range steps {
			from, to := min(part*local, len(step)), min(part*local+local, len(step))
			shares = append(shares, step[from:to])
		}
		var wrong error
		sums, wrong = e.add(readers, shares, full, n)
		own, err = append(own, slices.Concat(sums...)...), errors.Join(err, wrong)
	}
	if err := autograd.Agree(comm, "", err); err != nil {
		return nil, fmt.Errorf("evaluate: %w", err)
	}
	if err := p.add(comm, own, sums); err != nil {
		return nil, err
	}
	loss, found := math.NaN(), map[string]float64{}
	if e.data.Loss != nil {
		loss = sums[0][0] / float64(n)
	}
	if finite(loss) {
		found["loss"] = loss
	}
	for k, m := range e.metrics {
		if x := m.Value(sums[k+1], loss); finite(x) {
			found[m.Name] = x
		}
	}
	return found, nil
}

// add makes sums the ones of all parts, given the ones of this rank's parts.
func (p parts) add(comm backend.Communicator, own []float64, sums [][]float64) error {
	at, of := 0, len(own)/p.n
	all := own
	if p.all != comm.Size() { // ranks have several: the others' are zeros here
		all = make([]float64, p.all*of)
		copy(all[p.first*of:], own)
	}
	numbers := make([]*float64, len(all))
	for i := range all {
		numbers[i] = &all[i]
	}
	if err := autograd.Sum(comm, numbers...); err != nil {
		return err
	}
	for _, s := range sums {
		for i := range s {
			s[i] = 0
			for part := at; part < len(all); part += of {
				s[i] += all[part]
			}
			at++
		}
	}
	return nil
}

// add returns the sums of a part: of the loss, and of each metric. After an error it keeps
// running the graph, since other ranks may wait for this one in it.
func (e *evaluation) add(readers int, shares [][]int, full float64, n int) (sums [][]float64,
	err error) {
	l := load(e.data, readers, func(yield func(job) bool) {
		for _, share := range shares {
			if !yield(job{samples: share, weight: 1 / full}) {
				return
			}
		}
	})
	defer l.close()
	sums = append(sums, make([]float64, 1))
	for _, m := range e.metrics {
		sums = append(sums, nil)
		if m.Sums != nil {
			sums[len(sums)-1] = make([]float64, m.Sums(n))
		}
	}
	for _, share := range shares {
		err = errors.Join(err, l.next(), l.bind())
		if wrong := e.machine.RunAll(); wrong != nil || err != nil {
			if wrong != nil && err == nil {
				err = l.current.blame(e.data.Inputs)
			}
			err = errors.Join(err, wrong)
			continue
		}
		if e.data.Loss != nil && !finite(lossOf(e.data)) {
			err = l.current.blame(e.data.Inputs)
		}
		if l := e.data.Loss; l != nil && len(numbers(l)) != 1 {
			err = fmt.Errorf("%w: the machine does not keep the loss, or it is no single number: "+
				"use vm.Keep", backend.ErrArgument)
			continue
		} else if l != nil {
			sums[0][0] += lossOf(e.data) * full
		}
		for k, m := range e.metrics {
			if m.Add != nil {
				err = errors.Join(err, m.Add(sums[k+1], slices.Clone(share)))
			}
		}
	}
	return sums, err
}
