package layers_test

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// TestPaddedTrainingEqualsOneRank: a training whose samples have different numbers of targets has
// the losses of one rank on every layout.
func TestPaddedTrainingEqualsOneRank(t *testing.T) {
	want := lossesOf(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, false, true)
	require.That(t, want[len(want)-1] < want[0], "the losses of one rank are %v", want)
	for _, s := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 1, SP: 2, TP: 1},
		{DP: 1, SP: 1, TP: 2}, {DP: 4, SP: 1, TP: 1}, {DP: 2, SP: 2, TP: 1}, {DP: 2, SP: 1, TP: 2},
		{DP: 1, SP: 2, TP: 2}} {
		t.Run(s.String(), func(t *testing.T) {
			near(t, "losses", lossesOf(t, testenv.Hosts, s, s.TP > 1, true), want, 1e-10)
		})
	}
}

// TestPaddedTrainingEqualsOneRankOnDevices: so has one of ranks on devices.
func TestPaddedTrainingEqualsOneRankOnDevices(t *testing.T) {
	want := lossesOf(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1}, false, true)
	testenv.Each(t, testenv.OnDevices(), func(t *testing.T, k testenv.Kind) {
		for _, s := range []layers.Sizes{{DP: 2, SP: 1, TP: 1}, {DP: 1, SP: 2, TP: 2}} {
			t.Run(s.String(), func(t *testing.T) {
				near(t, "losses", lossesOf(t, k, s, false, true), want, 1e-10)
			})
		}
	})
}

// TestPaddedTargetsDoNotCount: the loss is the mean over all other targets, and 0 without any.
func TestPaddedTargetsDoNotCount(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, _ sync.Locker) error {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			targets := b.Tokens("targets", 1, 1, 3).Padding(9)
			embedding := b.Learn("words", layers.Constant(1), 0, 4, 2)
			logits := b.Logits(b.To(layers.Whole(variable(b, "x", tensor.Float64, 1, 3, 2)),
				layers.Sequence, layers.Split(1)), embedding)
			loss := b.CrossEntropy(logits, targets)
			if _, err := b.Grad(loss); err != nil {
				return err
			}
			m := testranks.Must(vm.New(b.Graph(), nil, vm.Keep(loss.Node)))
			for _, test := range []struct {
				ids  []int
				want float64
			}{{[]int{9, 2, 9}, math.Log(4)}, {[]int{9, 9, 9}, 0}, {[]int{0, 1, 3}, math.Log(4)}} {
				testranks.NoError(errors.Join(targets.Set(test.ids), m.RunAll()))
				near(t, fmt.Sprint(test.ids), []float64{loss.Value().Data().(float64)},
					[]float64{test.want}, 1e-12)
				for _, v := range numbers(embedding.Deriv().Value()) {
					require.Check(t, v == v, "%v: the gradient is NaN", test.ids)
				}
			}
			require.Fails(t, "token 8 of 4", targets.Set([]int{8, 0, 0}), backend.ErrArgument)
			targets.Padding(1)
			require.Fails(t, "padding after use", b.Err(), "used already")
			return m.Close()
		})
}

// TestARunOfSeveralDividesByTheTargetsOfAll: which the program counts, before the first run.
func TestARunOfSeveralDividesByTheTargetsOfAll(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, _ sync.Locker) error {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			b.Batches(2)
			targets := b.Tokens("targets", 0, 3).Padding(9)
			embedding := b.Learn("words", layers.Constant(0), 0, 4, 2)
			x := b.To(layers.Whole(variable(b, "x", tensor.Float64, 3, 2)), layers.Sequence,
				layers.Split(0))
			loss := b.CrossEntropy(b.Logits(x, embedding), targets)
			m := testranks.Must(vm.New(b.Graph(), nil, vm.Keep(loss.Node)))
			require.NoError(t, targets.Set([]int{9, 2, 1}))
			require.Fails(t, "a run that nobody has counted", m.RunAll(), "targets.count")
			for count, want := range map[int]float64{8: math.Log(4) / 4, 2: math.Log(4),
				0: 2 * math.Log(4)} {
				testranks.NoError(errors.Join(targets.Count(count), m.RunAll()))
				near(t, fmt.Sprint("of ", count), []float64{loss.Value().Data().(float64)},
					[]float64{want}, 1e-12)
			}
			require.Fails(t, "-1 targets", targets.Count(-1), backend.ErrArgument, "targets")
			return errors.Join(b.Tokens("others", 0, 3).Count(1), m.Close())
		})
}

// TestDocumentsBeginWhereTheirFirstPositionIs: along either axis, on ranks that shard positions,
// and with the numbers of the run.
func TestDocumentsBeginWhereTheirFirstPositionIs(t *testing.T) {
	for axis, kind := range []testenv.Kind{testenv.Hosts, testenv.Devices} {
		within(t, kind, layers.Sizes{DP: 1, SP: 2, TP: 1},
			func(l *layers.Layout, d backend.Device, build sync.Locker) error {
				build.Lock()
				b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
				shape := []int{3, 2}
				if axis == 1 {
					shape = []int{2, 3}
				}
				positions := b.Tokens("positions", axis, shape...)
				first, again := positions.Documents(), positions.Documents()
				starts, err := nn.Cast(tensor.Float64, first)
				m, wrong := vm.New(b.Graph(), d, vm.Keep(starts))
				build.Unlock()
				testranks.NoError(errors.Join(b.Err(), err, wrong))
				require.Check(t, first == again, "there are two nodes of the same documents")
				for _, run := range []struct{ ids, want [2][3]int }{
					{[2][3]int{{0, 1, 2}, {0, 1, 0}}, [2][3]int{{0, 0, 0}, {0, 0, 2}}},
					{[2][3]int{{0, 0, 1}, {5, 0, 0}}, [2][3]int{{0, 1, 1}, {0, 1, 2}}},
				} {
					var ids []int
					for i := range 6 {
						if sample, at := i%2, i/2; axis == 0 {
							ids = append(ids, run.ids[sample][at])
						} else {
							ids = append(ids, run.ids[i/3][i%3])
						}
					}
					var want []float64
					for i := range 6 {
						want = append(want, float64(run.want[i/3][i%3]))
					}
					testranks.NoError(errors.Join(positions.Set(ids), m.RunAll()))
					require.Slices(t, "starts", numbers(starts.Value()), want)
				}
				return m.Close()
			})
	}
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, _ sync.Locker) error {
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
			b.Tokens("positions", 0, 3).Documents()
			require.Fails(t, "one axis", b.Err(), "want two axes")
			return nil
		})
}

// TestAPaddingRowIsInTheVocabulary: on each rank that has a part of it, too.
func TestAPaddingRowIsInTheVocabulary(t *testing.T) {
	for row, refused := range map[int]bool{-6: true, -5: false, 0: false, 4: false, 5: true} {
		within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 2},
			func(l *layers.Layout, _ backend.Device, build sync.Locker) error {
				build.Lock()
				defer build.Unlock()
				b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
				embedding := b.Learn("words", layers.Normal(1), 0, 5, 2)
				b.Embedding(embedding, b.Tokens("tokens", 0, 3), row)
				if err := b.Err(); refused != errors.Is(err, backend.ErrArgument) ||
					!refused && err != nil {
					t.Errorf("padding %d: %v", row, err)
				}
				return nil
			})
	}
}

// TestLossInTiles: with logits in tiles loss and gradients are those without, also with padding.
func TestLossInTiles(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, _ sync.Locker) error {
			for _, padded := range []bool{false, true} {
				b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
				targets := b.Tokens("targets", 1, 2, 6)
				ids := []int{3, 1, 4, 1, 5, 19, 2, 6, 5, 3, 5, 8}
				if padded {
					targets.Padding(5)
				}
				embedding := b.Learn("words", layers.Normal(1), 0, 20, 3)
				x := b.To(layers.Whole(variable(b, "x", tensor.Float64, 2, 6, 3)), layers.Sequence,
					layers.Split(1))
				loss := b.CrossEntropy(b.Logits(b.LayerNorm("norm", x), embedding), targets)
				learnables := testranks.Must(b.Grad(loss))
				var want []float64
				for _, tiles := range []int{1, 3, 12} {
					m, err := vm.New(b.Graph(), nil, vm.Keep(loss.Node), vm.WithLossTiles(tiles))
					testranks.NoError(err)
					err = errors.Join(targets.Set(ids), m.RunAll())
					got := numbers(loss.Value())
					for _, n := range learnables {
						got = append(got, numbers(n.Deriv().Value())...)
					}
					if want == nil {
						want = got
					}
					near(t, fmt.Sprint(tiles, " tiles, padded: ", padded), got, want, 1e-12)
					testranks.NoError(errors.Join(err, m.Close()))
				}
			}
			return nil
		})
}

// TestRotaryTurnsByPosition: positions along either axis are turned by their angles.
func TestRotaryTurnsByPosition(t *testing.T) {
	within(t, testenv.Hosts, layers.Sizes{DP: 1, SP: 1, TP: 1},
		func(l *layers.Layout, _ backend.Device, _ sync.Locker) error {
			for axis := range 2 {
				for _, interleaved := range []bool{false, true} {
					b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
					shape := []int{2, 2, 1, 4}
					shape[axis] = 3
					x := variable(b, "x", tensor.Float64, shape...)
					y := b.Rotary(layers.Whole(x), axis, layers.RotaryOptions{First: 5, Base: 100,
						RotaryOptions: nn.RotaryOptions{Interleaved: interleaved}})
					if b.Err() != nil {
						return b.Err()
					}
					m := testranks.Must(vm.New(b.Graph(), nil, vm.Keep(y.Node)))
					for range 3 {
						testranks.NoError(m.RunAll())
						near(t, fmt.Sprint(axis, interleaved), numbers(y.Value()),
							turned(numbers(x.Value()), shape, axis, interleaved), 1e-12)
					}
					testranks.NoError(m.Close())
				}
			}
			b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float64, 1)
			x := layers.Whole(variable(b, "x", tensor.Float64, 2, 3))
			b.Rotary(x, 1, layers.RotaryOptions{})
			require.Check(t, b.Err() != nil, "positions along the last axis are accepted")
			return nil
		})
}

// turned turns the two pairs of each row, of position 5 and on, by p and p/10.
func turned(x []float64, shape []int, axis int, interleaved bool) []float64 {
	y := make([]float64, len(x))
	for row := range len(x) / 4 {
		p := 5 + row%shape[1]
		if axis == 0 {
			p = 5 + row/shape[1]
		}
		for pair := range 2 {
			first, second := 4*row+pair, 4*row+pair+2
			if interleaved {
				first, second = 4*row+2*pair, 4*row+2*pair+1
			}
			sin, cos := math.Sincos(float64(p) * math.Pow(10, -float64(pair)))
			y[first], y[second] = x[first]*cos-x[second]*sin, x[first]*sin+x[second]*cos
		}
	}
	return y
}
