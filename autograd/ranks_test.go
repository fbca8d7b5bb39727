package autograd

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

func TestMeanSumAndAnyAreTheSameOnAllRanks(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, size := range []int{1, 2, 3} {
			allOn(t, k, size, func(r rank) error {
				own, P := float64(r.comm.Rank()), float64(size)
				a, b := own, 1e300*(own+1)
				testranks.NoError(errors.Join(Mean(r.comm, &a, &b), Mean(r.comm)))
				if a != (P-1)/2 || b != 1e300*P*(P+1)/2/P {
					return fmt.Errorf("the means are %v and %v", a, b)
				}
				a = own
				if err := Sum(r.comm, &a); err != nil || a != P*(P-1)/2 {
					return fmt.Errorf("the sum is %v: %v", a, err)
				}
				all, err := Gather(r.comm, own, 7)
				for rank, numbers := range all {
					if !slices.Equal(numbers, []float64{float64(rank), 7}) {
						return fmt.Errorf("gathered are %v", all)
					}
				}
				if none, noneErr := Gather(r.comm); errors.Join(err, noneErr) != nil ||
					len(all) != size || len(none) != size {
					return fmt.Errorf("gathered are %v and %v: %v, %v", all, none, err, noneErr)
				}
				for who := range size + 1 { // one more than there is: none
					got, err := Any(r.comm, r.comm.Rank() == who)
					if err != nil || got != (who < size) {
						return fmt.Errorf("any of rank %d is %v: %v", who, got, err)
					}
					ctx, told := context.WithCancelCause(t.Context())
					if r.comm.Rank() == who {
						told(exit.Stopped(exit.Signal + who + 1))
					}
					if r.comm.Rank() == who-1 {
						told(nil) // a signal says more
					}
					stop, err := Stopped(ctx, r.comm)
					told(nil)
					if want := exit.Signal + who + 1; err != nil || who < size &&
						exit.Of(stop) != want || who == size && exit.Of(stop) != exit.Unfinished {
						return fmt.Errorf("rank %d was told to stop: %v, %v", who, stop, err)
					}
				}
				return nil
			})
		}
	})
}

func TestMeanKeepsItsNumbersAfterAnError(t *testing.T) {
	errs := each(t, 2, func(r rank) error {
		if r.comm.Rank() == 1 {
			return errors.New("on purpose")
		}
		x := 3.0
		err := Mean(r.comm, &x)
		require.Check(r, err != nil && x == 3, "the number is %v, the error %v", x, err)
		return nil
	})
	require.Fails(t, "rank 1 did not fail", errs[1])
}

func TestRowsGathersAnyDtype(t *testing.T) {
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64, tensor.Int, tensor.Int64,
		tensor.Uint8, tensor.Bool, tensor.Complex128} {
		for _, shape := range [][]int{{5}, {5, 3}, {5, 2, 3}} {
			src := tensor.New(tensor.WithShape(shape...), tensor.Of(dt))
			for i := range src.Raw {
				src.Raw[i] = byte(i % 2) // a bool is 0 or 1
			}
			for i := range shape[0] {
				src.Raw[i*len(src.Raw)/shape[0]] = byte(i % 2)
			}
			shape[0] = 4
			dst := tensor.New(tensor.WithShape(shape...), tensor.Of(dt))
			for i := range dst.Raw {
				dst.Raw[i] = 1
			}
			rows := []int{4, 0, 4}
			require.NoError(t, Rows(dst, src, rows))
			n := len(dst.Raw) / 4
			var want []byte
			for _, row := range rows {
				want = append(want, src.Raw[row*n:(row+1)*n]...)
			}
			if want = append(want, make([]byte, n)...); !slices.Equal(dst.Raw, want) {
				t.Errorf("%v%v: %v, want %v", dt, shape, dst.Raw, want)
			}
		}
	}
}

func TestRowsRefusesWhatDoesNotFit(t *testing.T) {
	dense := func(dt tensor.Dtype, shape ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(shape...), tensor.Of(dt))
	}
	f32 := tensor.Float32
	transposed := dense(f32, 3, 5)
	require.NoError(t, transposed.T())
	column := require.Value(dense(f32, 5, 3).Slice(nil, tensor.S(1)))(t)
	for want, tt := range map[string]struct {
		dst, src *tensor.Dense
		rows     []int
	}{
		"row 1 of the batch is number 5: there are 5, from 0": {dense(f32, 2, 3),
			dense(f32, 5, 3), []int{4, 5}},
		"row 0 of the batch is number -1": {dense(f32, 2, 3),
			dense(f32, 5, 3), []int{-1}},
		"3 rows for a tensor (2, 3), which has room for 2": {dense(f32, 2, 3),
			dense(f32, 5, 3), []int{0, 1, 2}},
		"rows of float32(3) for rows of float32(4): they must be ali": {dense(f32, 2, 4),
			dense(f32, 5, 3), []int{0}},
		"rows of float64(3) for rows of float32(3)": {dense(f32, 2, 3),
			dense(tensor.Float64, 5, 3), []int{0}},
		"a tensor (5, 3) is a scalar, a view or transposed": {dense(f32, 2, 3),
			transposed, []int{0}},
		"a tensor (5) is a scalar, a view or transposed": {dense(f32, 2),
			column.(*tensor.Dense), []int{0}},
		"a tensor () is a scalar": {tensor.New(
			tensor.FromScalar(float32(1))), dense(f32, 5, 3), []int{0}},
		"a tensor of string: numbers and bool are supported": {dense(tensor.String, 2),
			dense(tensor.String, 5), []int{0}},
	} {
		if tt.dst.Dtype() == f32 && tt.dst.Dims() > 0 {
			tt.dst.Float32s()[0] = 7
		}
		err := Rows(tt.dst, tt.src, tt.rows)
		require.Fails(t, "Rows", err, backend.ErrArgument, want)
		require.Check(t, tt.dst.Dtype() != f32 || tt.dst.Dims() <= 0 || tt.dst.Float32s()[0] == 7,
			"%s: dst has changed", want)
	}
}

func TestRowsAllocatesNothing(t *testing.T) {
	src, dst := tensor.New(tensor.WithShape(100, 64), tensor.Of(tensor.Float32)),
		tensor.New(tensor.WithShape(10, 64), tensor.Of(tensor.Float32))
	rows := []int{1, 3, 5, 7, 9, 11, 13, 15, 17, 19}
	if n := testing.AllocsPerRun(100, func() {
		require.Report(t, Rows(dst, src, rows))
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestEvaluationSeesEverySampleOnce(t *testing.T) {
	for _, n := range []int{0, 1, 7, 16, 17, 23} {
		for _, size := range []int{1, 2, 3, 5} {
			for _, local := range []int{1, 4, math.MaxInt} {
				seen, steps := map[int]int{}, 0
				for r := range size {
					shares := require.Value(evaluation(r, size, n, local))(t)
					if r == 0 {
						steps = len(shares)
					}
					require.Check(t, len(shares) == steps,
						"%d samples: rank %d has %d steps, rank 0 has %d", n, r, len(shares), steps)
					for _, share := range shares {
						require.Check(t, len(share) <= local, "a share of %d, want %d at most",
							len(share), local)
						for _, i := range share {
							seen[i]++
						}
					}
				}
				for i := range n {
					if seen[i] != 1 {
						t.Errorf("%d samples on %d ranks: sample %d is seen %d times", n, size, i,
							seen[i])
					}
				}
				require.Check(t, len(seen) == n, "%d samples seen, there are %d", len(seen), n)
			}
		}
	}
	for _, tt := range [][2]int{{-1, 4}, {5, 0}} {
		require.Fails(t, fmt.Sprintf("Evaluation%v", tt),
			require.Err(evaluation(0, 1, tt[0], tt[1])), backend.ErrArgument)
	}
}

func TestFoundSamplerNamesEachBatchOnce(t *testing.T) {
	for want, tt := range map[string][2]int{"use 64": {10, 64}, "use 2": {1, 2},
		"use 48 or 51": {50, 3}} {
		_, err := newSampler(0, tt[1], 1000, tt[0], 0)
		require.Check(t, err != nil && strings.HasSuffix(err.Error(), want),
			"the error is %v, want %q", err, want)
	}
}

func TestHashIsOfTheParametersInOrder(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		allOn(t, k, 2, func(r rank) error {
			return r.trainQuadratic(func(t *training) error {
				values, err := t.values()
				if err != nil {
					return err
				}
				want := sha256.Sum256(slices.Concat(values...))
				if got, err := t.d.Hash(); err != nil || got != hex.EncodeToString(want[:]) {
					return fmt.Errorf("the hash is %s, want %x: %v", got, want, err)
				}
				before, _ := t.d.Hash()
				if err := t.steps(1); err != nil {
					return err
				}
				if after, _ := t.d.Hash(); after == before {
					return errors.New("a step does not change the hash")
				}
				return nil
			})
		})
	})
}
