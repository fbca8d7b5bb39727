package main

import (
	"errors"
	"math"

	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/vm"
)

// waits is how many steps run one by one to see what they wait for, after one that is not counted.
// It is odd, so that no median is a geometric mean: a wait may be 0.
const waits = 5

// overlap is what the exchanges of ranks that train together cost them.
type overlap struct {
	one        float64  // the time of a step of one rank alone
	Efficiency float64  `json:"efficiency,omitempty"` // that by the time of a step of the ranks
	ExposedUS  *float64 `json:"exposed_us,omitempty"` // the sum of those of the buckets
	Buckets    []bucket `json:"buckets,omitempty"`
}

// bucket is the exchange of a bucket.
type bucket struct {
	Bucket    int     `json:"bucket"`
	MiB       float64 `json:"mib"`
	Products  int     `json:"products"`   // beside it
	ExposedUS float64 `json:"exposed_us"` // the median
}

// stepOf returns the time of a step on one rank.
func (o options) stepOf(m model, p vm.Precision, on rank) (step float64, err error) {
	machine, _, err := m.machine(p, on)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, machine.Close()) }()
	times, _, err := o.time(machine, on, nil)
	if err != nil {
		return 0, err
	}
	return bench.Median(times), nil
}

// exposed measures how long the steps of a rank wait for each bucket. All ranks call it.
func (on rank) exposed(machine *vm.Machine) (all []bucket, err error) {
	if on.comm == nil {
		return nil, nil
	}
	var times [][]float64 // by bucket
	for i := range 1 + waits {
		if err := on.meet(); err != nil {
			return nil, err
		}
		buckets, err := machine.Exposed()
		if err != nil {
			return nil, err
		}
		if i == 0 {
			times, all = make([][]float64, len(buckets)), make([]bucket, len(buckets))
			continue
		}
		for j, b := range buckets {
			times[j] = append(times[j], micros(b.Exposed))
			all[j] = bucket{Bucket: b.Bucket, Products: b.Products,
				MiB: math.Round(float64(b.Bytes)/(1<<20)*1e3) / 1e3}
		}
	}
	for j := range all {
		all[j].ExposedUS = round1(bench.Median(times[j]))
	}
	return all, nil
}

// sumOf adds up the waits.
func sumOf(all []bucket) (sum float64) {
	for _, b := range all {
		sum += b.ExposedUS
	}
	return round1(sum)
}

// count takes the waits of the rank that waited longest in all, and the efficiency.
func (o *overlap) count(all []measurement, step float64) {
	if len(all) == 1 {
		return
	}
	o.Efficiency = math.Round(o.one/step*1e3) / 1e3
	for _, of := range all {
		if sum := sumOf(of.waited); o.ExposedUS == nil || sum > *o.ExposedUS {
			o.ExposedUS, o.Buckets = &sum, of.waited
		}
	}
}
