package ops

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

func sumOverRanks(comm backend.Communicator, x *gorgonia.Node) (*gorgonia.Node, error) {
	return AllReduce(comm, backend.Sum, x)
}

// TestAllReduceOfAnyLength has lengths around the widths of vectors, blocks and
// chunks.
func TestAllReduceOfAnyLength(t *testing.T) {
	lengths := []int{1, 2, 7, 8, 31, 255, 256, 257, 511, 4095, 65537, 1<<20 + 3}
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, P := range []int{2, 3, 4} {
			t.Run(fmt.Sprint(P), func(t *testing.T) {
				g := ranksOn(t, P, k)
				rng := rand.New(rand.NewPCG(23, uint64(P)))
				for i, n := range lengths {
					for d, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64, tensor.Int32,
						tensor.Int64} {
						if !full() && !k.OnGPU() && (i+d)%4 != 0 {
							continue
						}
						xs := randomArrs(rng, P, dt, n)
						s := sample{fmt.Sprintf("%d %v", n, dt), sumOverRanks, xs,
							repeat(combine(backend.Sum, dt, xs), P)}
						s.check(t, g, dt)
					}
				}
			})
		}
	})
}

// TestAllReduceOfRandomNumbers: all ranks have bitwise identical results, namely those of
// the sum but for its rounding, P+1 units in the last place of the sum of the
// magnitudes.
func TestAllReduceOfRandomNumbers(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, P := range []int{2, 3, 4} {
			t.Run(fmt.Sprint(P), func(t *testing.T) {
				trials := 50
				if k.OnGPU() || full() {
					trials = 200
				}
				checkRandom(t, ranksOn(t, P, k), trials)
			})
		}
	})
}

func checkRandom(t *testing.T, g *team, trials int) {
	P := len(g.comms)
	rng := rand.New(rand.NewPCG(24, uint64(P)))
	for trial := range trials {
		xs := make([]arr, P)
		for r := range xs {
			xs[r] = gaussian(rng, 1+trial*101)
			for i, v := range xs[r].data {
				xs[r].data[i] = float64(float32(v))
			}
		}
		ys := require.Value(g.forward(tensor.Float32, xs, sumOverRanks))(t)
		for r := range ys {
			require.That(t, ys[r].equal(ys[0]), "trial %d: rank %d has other bits than rank 0",
				trial, r)
		}
		for i, got := range ys[0].data {
			want, magnitude := 0.0, 0.0
			for _, x := range xs {
				want, magnitude = want+x.data[i], magnitude+math.Abs(x.data[i])
			}
			if math.Abs(got-want) > float64(P+1)*0x1p-24*magnitude {
				t.Fatalf("trial %d: element %d is %v, want %v", trial, i, got, want)
			}
		}
	}
}

// TestOperandsAtAnyOffset reduces slices that begin where no vector does.
func TestOperandsAtAnyOffset(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		g := ranksOn(t, 2, k)
		for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64, tensor.Uint8} {
			for offset := 1; offset <= 15; offset++ {
				err := g.run(func(comm backend.Communicator, _ sync.Locker) error {
					return reduceFrom(comm, dt, offset)
				})
				require.Check(t, err == nil, "%v from %d: %v", dt, offset, err)
			}
		}
	})
}

func reduceFrom(comm backend.Communicator, dt tensor.Dtype, offset int) error {
	const n = 37
	whole := randomArr(rand.New(rand.NewPCG(25, uint64(offset))), dt, n+15)
	x := whole.value(dt).(*tensor.Dense)
	slice := testranks.Must(x.Slice(tensor.S(offset, offset+n)))
	y := testranks.Must(newAllReduce(comm, dt, tensor.Shape{n}).Do(slice.(*tensor.Dense)))
	want := arr{[]int{n}, whole.data[offset : offset+n]}.scaled(float64(comm.Size()))
	if got := valueArr(y); !got.equal(want) {
		return fmt.Errorf("%v, want %v", got, want)
	}
	return nil
}

// TestInputMayBeChangedAtOnce: when an operation returns, its operand's memory may be filled with
// something else.
func TestInputMayBeChangedAtOnce(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		g := ranksOn(t, 2, k)
		require.NoError(t, g.run(func(comm backend.Communicator, _ sync.Locker) error {
			for i := range 1000 {
				if err := changeAtOnce(comm, i); err != nil {
					return fmt.Errorf("call %d: %w", i, err)
				}
			}
			return nil
		}))
	})
}

func changeAtOnce(comm backend.Communicator, call int) error {
	const n = 1000
	x := newArr(n)
	for i := range x.data {
		x.data[i] = float64(call + i)
	}
	v := x.value(tensor.Float32).(*tensor.Dense)
	y, err := newAllReduce(comm, tensor.Float32, tensor.Shape{n}).Do(v)
	if err != nil {
		return err
	}
	v.Zero()
	if got, want := valueArr(y), x.scaled(float64(comm.Size())); !got.equal(want) {
		return fmt.Errorf("%v, want %v", got, want)
	}
	return nil
}

// TestOverlappingGroups reduces over all ranks and over those of the same parity
// in turn, while ranks come at random times.
func TestOverlappingGroups(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, P := range []int{2, 4} {
			t.Run(fmt.Sprint(P), func(t *testing.T) { checkOverlapping(t, ranksOn(t, P, k)) })
		}
	})
}

func checkOverlapping(t *testing.T, g *team) {
	times := 250
	if full() {
		times = 1000
	}
	P := len(g.comms)
	parities := max(P/2, 1) // of two ranks, both groups are the same
	require.NoError(t, g.run(func(comm backend.Communicator, _ sync.Locker) (err error) {
		r := comm.Rank()
		part := testranks.Must(comm.Split(r%parities, 0))
		all := newLane(comm, float64(P*(P+1)/2))
		total := 0.0
		for other := r % parities; other < P; other += parities {
			total += float64(other + 1)
		}
		some := newLane(part, total)
		defer func() { err = errors.Join(err, part.Close()) }()
		rng := rand.New(rand.NewPCG(26, uint64(r)))
		for i := range times {
			if rng.IntN(4) == 0 {
				time.Sleep(time.Duration(rng.IntN(100)) * time.Microsecond)
			}
			if err := errors.Join(all.run(r), some.run(r)); err != nil {
				return fmt.Errorf("call %d: %w", i, err)
			}
		}
		return nil
	}))
}

// lane is a sum over the ranks of a group, of tensors that hold one more than the
// rank in the world.
type lane struct {
	op   *collectiveOp
	want float64
}

const laneLength = 777

func newLane(comm backend.Communicator, want float64) *lane {
	return &lane{newAllReduce(comm, tensor.Float32, tensor.Shape{laneLength}), want}
}

// run computes the sum as a rank of the world, and looks at it.
func (l *lane) run(rank int) error {
	y, err := l.op.Do(arr{[]int{laneLength}, slices.Repeat([]float64{float64(rank + 1)},
		laneLength)}.value(tensor.Float32))
	if err != nil {
		return err
	}
	if got := valueArr(y).data; slices.Min(got) != l.want || slices.Max(got) != l.want {
		return fmt.Errorf("%v, want %v", got, l.want)
	}
	return nil
}
