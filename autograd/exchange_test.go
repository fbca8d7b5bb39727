package autograd

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/half"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// TestExchange: gradients that are written into the slots come back as Sync would return them, and
// Sync is refused.
func TestExchange(t *testing.T) {
	testenv.Each(t, []testenv.Kind{testenv.Hosts, testenv.Staged},
		func(t *testing.T, k testenv.Kind) {
			allOn(t, k, 3, func(r rank) error {
				m := testranks.Must(newQuadratic(r))
				d := testranks.Must(New(r.comm, m.params, WithBuckets(1, 100)))
				defer d.Close()
				x := testranks.Must(d.Buckets(nil))
				if _, err := d.Sync(); !errors.Is(err, backend.ErrArgument) {
					return fmt.Errorf("Sync: %v", err)
				}
				for i, p := range d.params {
					slot := backend.View[float32](x.Slot(i, 0))
					if len(slot) != p.size {
						return fmt.Errorf("a slot of %d elements for %v", len(slot), p)
					}
					for j := range slot {
						slot[j] = float32(3*i + r.comm.Rank())
					}
				}
				var order []int
				for b, params := range x.Params() {
					w, err := x.Start(b, backend.AllReduce, backend.Buffer{},
						backend.Buffer{}, nil, false)
					if err == nil {
						err = x.Finish(b, w)
					}
					if err != nil {
						return err
					}
					order = append(order, params...)
				}
				if !slices.Equal(order, []int{3, 2, 1, 0}) {
					return fmt.Errorf("parameters leave in the order %v", order)
				}
				for i := range d.params {
					for _, got := range backend.View[float32](x.Slot(i, 0)) {
						if got != float32(3*i+1) {
							return fmt.Errorf("gradient %d is %v", i, got)
						}
					}
				}
				lost := errors.New("lost")
				if err := x.Fail(lost); !errors.Is(err, lost) || d.Err() == nil ||
					!errors.Is(x.Fail(errors.New("later")), lost) {
					return fmt.Errorf("Fail: %v, %v", err, d.Err())
				}
				return nil
			})
		})
}

// TestExchangeOfOneRank: there is nothing to exchange.
func TestExchangeOfOneRank(t *testing.T) {
	all(t, 1, func(r rank) error {
		m := testranks.Must(newQuadratic(r))
		d := testranks.Must(New(r.comm, m.params))
		defer d.Close()
		x, err := d.Buckets(nil)
		if err == nil && x.Params() != nil {
			err = fmt.Errorf("buckets %v", x.Params())
		}
		return err
	})
}

// TestAgree: a problem of one rank, and a difference, are errors of all.
func TestAgree(t *testing.T) {
	all(t, 3, func(r rank) error {
		broken := errors.New("no memory")
		mine := r.comm.Rank() == 1
		for _, test := range []struct {
			text    string
			problem error
			want    string
		}{{"a\nb", nil, ""}, {"a\nb", broken, "rank 1 cannot go on: no memory"}, {"a\nc", nil,
			"b on rank 0, but c on rank 1"}} {
			text, problem := "a\nb", error(nil)
			if mine {
				text, problem = test.text, test.problem
			}
			err := Agree(r.comm, text, problem)
			if test.want == "" && err != nil || test.want != "" &&
				(err == nil || !strings.Contains(err.Error(), test.want)) {
				return fmt.Errorf("%v, want %q", err, test.want)
			}
			if problem != nil && !errors.Is(err, problem) {
				return fmt.Errorf("%w is not the problem", err)
			}
		}
		return nil
	})
}

// TestHalve: the caller computes gradients in BF16 if that is what a compression without residuals
// sends of all of them; sums come back as means then.
func TestHalve(t *testing.T) {
	for name, test := range map[string]struct {
		ranks   int
		options []Option
		halves  bool
	}{
		"alone": {1, []Option{WithCompression(half.Wrap(backend.BF16))}, false},
		"plain": {2, nil, false},
		"bf16":  {2, []Option{WithCompression(half.Wrap(backend.BF16)), WithSum()}, true},
		"f16":   {2, []Option{WithCompression(half.Wrap(backend.F16))}, false},
		"sparse of bf16": {2, []Option{WithCompression(func(c backend.Communicator) (
			backend.Communicator, error) {
			c, err := half.Wrap(backend.BF16)(c)
			if err != nil {
				return nil, err
			}
			return sparse.Wrap(sparse.TopK(0.5))(c)
		})}, false},
	} {
		t.Run(name, func(t *testing.T) {
			all(t, test.ranks, func(r rank) error {
				m := testranks.Must(newQuadratic(r))
				d := testranks.Must(New(r.comm, m.params, test.options...))
				defer d.Close()
				x := testranks.Must(d.Buckets(nil))
				want, scale, weight := backend.F32, 1.0, 1/float64(test.ranks)
				if test.halves {
					want, scale, weight = backend.BF16, 2, 1
				}
				if got := x.Halve(); got != test.halves || x.Slot(0, 0).DType() != want ||
					x.Scale() != scale || x.Weight() != weight {
					return fmt.Errorf("%v: %v, scale %v, weight %v", got, x.Slot(0, 0).DType(),
						x.Scale(), x.Weight())
				}
				return nil
			})
		})
	}
}
