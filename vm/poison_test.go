package vm_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// indexed is an operation by integers, of which the last one is out of range. Where it is NaN then:
// an N for each element of the result, and of the gradients of the operands.
type indexed struct {
	name     string
	shapes   [][]int // of the operands
	integers []int   // shape of the integers
	nan      []string
	build    func(x nodes, integers node) (node, error)
}

func indexedOperations() []indexed {
	table, rows, scores := []int{3, 2}, []int{2, 2}, []int{2, 3}
	list := []int{2}
	all := []indexed{
		{"Embedding", [][]int{table}, list, []string{"..NN", "NNNNNN"},
			func(x nodes, i node) (node, error) {
				return nn.Embedding(x[0], i)
			}},
		{"gorgonia.ByIndices", [][]int{table}, list, []string{"..NN", "NNNNNN"},
			func(x nodes, i node) (node, error) {
				return gorgonia.ByIndices(x[0], i, 0)
			}},
		{"ScatterAdd", [][]int{rows}, list, []string{"NNNNNN", "..NN"},
			func(x nodes, i node) (node, error) {
				return nn.ScatterAdd(0, 3, x[0], i)
			}},
		{"IndexCopy", [][]int{table, rows}, list, []string{"NNNNNN", "NNNNNN", "..NN"},
			func(x nodes, i node) (node, error) {
				return nn.IndexCopy(0, x[0], i, x[1])
			}},
		{"GatherElements", [][]int{table}, []int{1, 2}, []string{".N", ".N.N.N"},
			func(x nodes, i node) (node, error) {
				return nn.GatherElements(0, x[0], i)
			}},
		{"KeyLengths", [][]int{{2, 1, 1, 1}, {2, 1, 2, 1}, {2, 1, 2, 1}}, list, []string{".N", ".N",
			"..NN", "..NN"}, func(x nodes, i node) (node, error) {
			return nn.Attention(x[0], x[1], x[2], nn.AttentionOptions{KeyLengths: i})
		}},
	}
	for _, o := range []nn.CrossEntropyOptions{{}, {Reduction: nn.SumOfRows}, {Smoothing: 0.25},
		{Reduction: nn.EachRow}} {
		nan := []string{"N", "...NNN"}
		if o.Reduction == nn.EachRow {
			nan[0] = ".N"
		}
		all = append(all, indexed{fmt.Sprintf("CrossEntropy %+v", o), [][]int{scores}, list, nan,
			func(x nodes, i node) (node, error) {
				return nn.CrossEntropyWith(o, x[0], i)
			}})
	}
	return append(all, indexed{"CrossEntropy, weighted", [][]int{scores}, list,
		[]string{"N", "NNNNNN"}, // the mean is over the weight of a class that nobody knows
		func(x nodes, i node) (node, error) {
			w := tensor.Ones(x[0].Dtype(), 3)
			return nn.CrossEntropyWith(nn.CrossEntropyOptions{
				Weights: gorgonia.NodeFromAny(x[0].Graph(), w, gorgonia.WithName("w"))}, x[0], i)
		}})
}

// graph builds the operation with its integers, 1 and wrong: a variable, or what the graph
// computes.
func (o indexed) graph(t *testing.T, dt tensor.Dtype, wrong int, computed bool) (m *model, y node) {
	m = &model{g: gorgonia.NewGraph()}
	for i, shape := range o.shapes {
		m.params = append(m.params, m.variable(fmt.Sprint("x", i), dt, shape...))
	}
	of := func(name string, values ...int) node {
		v := tensor.New(tensor.WithShape(o.integers...), tensor.WithBacking(values))
		return gorgonia.NodeFromAny(m.g, v, gorgonia.WithName(name))
	}
	integers := of("integers", 1, wrong)
	if computed {
		integers = add(integers, of("zeros", 0, 0))
	}
	y = must(o.build(m.params, integers))
	loss := y
	if !y.IsScalar() {
		loss = sum(y)
	}
	m.grad(t, loss)
	return m, y
}

// TestIntegersThatTheGraphComputesPoisonWhatTheyWouldHaveChanged: out of range, they are NaN in
// every result that they would have changed, forward and backward, and in no other one.
func TestIntegersThatTheGraphComputesPoisonWhatTheyWouldHaveChanged(t *testing.T) {
	integersPoison(t, devices)
}

func integersPoison(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	for where, device := range devices {
		d := device(t)
		for _, o := range indexedOperations() {
			for dt := range tolerances {
				for _, wrong := range []int{-1, 4, 1 << 40, math.MinInt} {
					m, y := o.graph(t, dt, wrong, true)
					v := machineOn(t, d, m.g, vm.Keep(y))
					run(t, v)
					got := []string{nans(t, y.Value())}
					for _, x := range m.params {
						got = append(got, nans(t, gradient(t, x)))
					}
					require.Check(t, slices.Equal(got, o.nan), "%s %v: %s by %d: %v, want %v",
						where, dt, o.name, wrong, got, o.nan)
					require.Report(t, v.Close())
				}
			}
		}
	}
}

// nans has an N for each NaN.
func nans(t *testing.T, v gorgonia.Value) string {
	var s strings.Builder
	for _, x := range floats(t, v) {
		s.WriteByte(".N"[map[bool]int{true: 1}[math.IsNaN(x)]])
	}
	return s.String()
}

// TestVariablesOutOfRangeAreErrors in package vm and in the tape machine, and name the integer.
func TestVariablesOutOfRangeAreErrors(t *testing.T) {
	for where, device := range devices {
		d := device(t)
		for _, o := range indexedOperations() {
			for _, wrong := range []int{-1, 4, math.MinInt} {
				m, _ := o.graph(t, tensor.Float64, wrong, false)
				v, err := vm.New(m.g, d)
				require.NoError(t, err)
				err = v.RunAll()
				says := fmt.Sprintf("1 is %d, out of range", wrong)
				require.Fails(t, fmt.Sprintf("%s: %s by %d", where, o.name, wrong), err,
					backend.ErrArgument, says)
				require.Report(t, v.Close())
				if strings.HasPrefix(o.name, "gorgonia") {
					continue
				}
				tape := gorgonia.NewTapeMachine(m.g)
				require.Check(t, tape.RunAll() != nil, "tape machine: %s by %d: no error", o.name,
					wrong)
				_ = tape.Close()
			}
		}
	}
}

// TestFloatsThatAreNoLabelsAreErrors: of a variable that the graph casts to labels. What the graph
// computes poisons, NaN as well, which is no label 0.
func TestFloatsThatAreNoLabelsAreErrors(t *testing.T) { noLabels(t, devices) }

func noLabels(t *testing.T, devices map[string]func(testing.TB) backend.Device) {
	casts := map[string]func(x node) (node, error){
		"nn.Cast": func(x node) (node, error) { return nn.Cast(tensor.Int, x) },
		"ConvType": func(x node) (node, error) {
			return gorgonia.ConvType(x, x.Dtype(), tensor.Int)
		},
	}
	for where, device := range devices {
		d := device(t)
		for name, cast := range casts {
			for dt := range tolerances {
				for _, wrong := range []float64{0, 2, 1.5, -1, 3, math.NaN(), math.Inf(1),
					math.Inf(-1)} {
					for _, computed := range []bool{false, true} {
						m := &model{g: gorgonia.NewGraph()}
						m.params = nodes{m.variable("x", dt, 2, 3)}
						y := m.variable("y", dt, 2)
						set(y.Value().(*tensor.Dense), 0, 1)
						set(y.Value().(*tensor.Dense), 1, wrong)
						labels := y
						if computed {
							labels = mul(y, constant(dt, 1))
						}
						labels = reshape(must(cast(labels)), tensor.Shape{2})
						loss := must(nn.CrossEntropy(nn.NoLabel, m.params[0], labels))
						m.grad(t, loss)
						v, err := vm.New(m.g, d)
						require.NoError(t, err)
						err = v.RunAll()
						right := wrong == 0 || wrong == 2
						_, says, _ := strings.Cut(fmt.Sprint(err), "label 1 is ")
						switch good := right || computed && wrong == 1.5; {
						case good || computed:
							if err != nil || math.IsNaN(floats(t, loss.Value())[0]) == good {
								t.Errorf("%s, %s, %v: %v: %v, %v", where, name, dt, wrong,
									loss.Value(), err)
							}
						case !errors.Is(err, backend.ErrArgument) ||
							!strings.HasPrefix(says, fmt.Sprint(wrong)):
							t.Errorf("%s, %s, %v: %v: %v", where, name, dt, wrong, err)
						}
						require.Report(t, v.Close())
					}
				}
			}
		}
	}
}

// TestFloatsAreLabelsWhereTheyAreNot0: a cast to Bool makes labels 0 and 1 of any floats.
func TestFloatsAreLabelsWhereTheyAreNot0(t *testing.T) {
	m := &model{g: gorgonia.NewGraph()}
	m.params = nodes{m.variable("x", tensor.Float64, 2, 2)}
	y := m.variable("y", tensor.Float64, 2)
	set(y.Value().(*tensor.Dense), 0, 0)
	set(y.Value().(*tensor.Dense), 1, 2.5)
	labels := must(nn.Cast(tensor.Int, must(nn.Cast(tensor.Bool, y))))
	m.grad(t, must(nn.CrossEntropy(nn.NoLabel, m.params[0], labels)))
	v, err := vm.New(m.g, nil)
	if err == nil {
		err = errors.Join(v.RunAll(), v.Close())
	}
	require.NoError(t, err)
}

// TestLengthsThatRunsChangePoison: of what is out of range in a state the host knows, since it has
// the integers of each run; of what a run computes it does not.
func TestLengthsThatRunsChangePoison(t *testing.T) {
	for where, device := range devices {
		m := &model{g: gorgonia.NewGraph()}
		q := m.variable("q", tensor.Float32, 1, 1, 1, 1)
		k := m.variable("k", tensor.Float32, 1, 1, 2, 1)
		one := func(name string) node {
			return gorgonia.NodeFromAny(m.g, tensor.New(tensor.WithShape(1),
				tensor.WithBacking([]int{1})), gorgonia.WithName(name))
		}
		lengths := one("lengths")
		next := add(lengths, one("one"))
		y := must(nn.Attention(q, k, k, nn.AttentionOptions{KeyLengths: lengths}))
		z := must(nn.Attention(q, k, k, nn.AttentionOptions{KeyLengths: next}))
		v := machineOn(t, device(t), m.g, vm.Keep(y, z), vm.WithState(lengths, next))
		for step, want := range []string{"..", ".N", ""} {
			if err := v.RunAll(); want == "" {
				require.Fails(t, fmt.Sprintf("%s: step %d", where, step), err, backend.ErrArgument)
			} else if err != nil || nans(t, y.Value())+nans(t, z.Value()) != want {
				t.Errorf("%s: step %d: %v, %v, %v", where, step, y.Value(), z.Value(), err)
			}
			if got := lengths.Value().Data().([]int)[0]; got != min(2+step, 3) {
				t.Errorf("%s: after step %d the host has %d", where, step, got)
			}
		}
		require.Report(t, v.Close())
	}
}
