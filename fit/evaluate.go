package fit

import (
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/vm"
)

// evaluation is data, and a machine that evaluates them. A nil one has the loss of the training.
type evaluation struct {
	machine *vm.Machine
	data    Data
	metrics []Metric
}

// has reports whether there is a metric of a name.
func (e *evaluation) has(name string) bool {
	return e != nil && (name == "loss" && e.data.Loss != nil ||
		slices.ContainsFunc(e.metrics, func(m Metric) bool { return m.Name == name }))
}

// less reports whether smaller values of a metric are better.
func (e *evaluation) less(name string) bool {
	if e == nil {
		return true
	}
	i := slices.IndexFunc(e.metrics, func(m Metric) bool { return m.Name == name })
	return i < 0 || e.metrics[i].Less
}

// run evaluates, each rank a part of the samples. full is what the graph divides the loss of a
// sample by, beside the samples of a run.
func (e *evaluation) run(comm backend.Communicator, readers int, full float64) (
	map[string]float64, error) {
	local, err := e.data.check()
	err = errors.Join(err, backend.Given("fit.Metric", "Add or Value", e.functions()))
	n := 0
	if err == nil {
		n = e.data.Set.Len()
		if whole := local * comm.Size(); e.data.Loss != nil && e.data.Weights == nil && n%whole > 0 {
			err = fmt.Errorf("%w: %d samples to evaluate are no whole batches of %d, so that the "+
				"mean loss would count padding: give Data.Weights, or no Loss", backend.ErrArgument, n,
				whole)
		}
	}
	if err := autograd.Agree(comm, fmt.Sprintf("%d metrics\n", len(e.metrics)), err); err != nil {
		return nil, err
	}
	shares, err := autograd.Evaluation(comm, n, local)
	if err != nil {
		return nil, err
	}
	full *= float64(local)
	l := load(e.data, readers, e.jobs(shares, 1/full))
	defer l.close()
	sums, err := e.add(l, shares, full, n)
	if err := autograd.Agree(comm, "", err); err != nil {
		return nil, fmt.Errorf("evaluate: %w", err)
	}
	all := slices.Concat(sums...)
	numbers := make([]*float64, len(all))
	for i := range all {
		numbers[i] = &all[i]
	}
	if err := autograd.Sum(comm, numbers...); err != nil {
		return nil, err
	}
	return e.values(all, sums, n), nil
}

// functions returns what a metric must have.
func (e *evaluation) functions() (all []any) {
	for _, m := range e.metrics {
		if m.Value == nil || m.Add == nil && m.Sums != nil {
			all = append(all, nil)
		}
	}
	return all
}

func (e *evaluation) jobs(shares [][]int, weight float64) iter.Seq[job] {
	return func(yield func(job) bool) {
		for _, share := range shares {
			if !yield(job{samples: share, weight: weight}) {
				return
			}
		}
	}
}

// add returns the sums of this rank: of the loss, and of each metric. After an error it goes on
// running, since other ranks may wait for this one in the graph.
func (e *evaluation) add(l *loader, shares [][]int, full float64, n int) (sums [][]float64,
	err error) {
	sums = append(sums, make([]float64, 1))
	for _, m := range e.metrics {
		size := 0
		if m.Sums != nil {
			size = m.Sums(n)
		}
		sums = append(sums, make([]float64, size))
	}
	for _, share := range shares {
		err = errors.Join(err, l.next())
		if wrong := e.machine.RunAll(); wrong != nil || err != nil {
			err = errors.Join(err, wrong)
			continue
		}
		if e.data.Loss != nil {
			sums[0][0] += number(e.data.Loss, 0) * full
		}
		for k, m := range e.metrics {
			if m.Add != nil {
				err = errors.Join(err, m.Add(sums[k+1], share))
			}
		}
	}
	return sums, err
}

// values returns the metrics by the sums of all ranks, which have the lengths of this rank's.
func (e *evaluation) values(all []float64, lengths [][]float64, n int) map[string]float64 {
	found := map[string]float64{}
	loss := all[0] / float64(n)
	if e.data.Loss != nil && finite(loss) {
		found["loss"] = loss
	}
	at := 1
	for k, m := range e.metrics {
		to := at + len(lengths[k+1])
		if x := m.Value(all[at:to], loss); finite(x) {
			found[m.Name] = x
		}
		at = to
	}
	return found
}
