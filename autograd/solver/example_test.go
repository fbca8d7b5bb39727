package solver_test

import (
	"errors"
	"fmt"
	"log"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// parameter is one that needs no graph, and its gradient.
type parameter struct{ value, gradient *tensor.Dense }

func (p parameter) Value() gorgonia.Value { return p.value }

func (p parameter) Grad() (gorgonia.Value, error) { return p.gradient, nil }

func newParameter(value, gradient []float64) parameter {
	return parameter{tensor.New(tensor.WithBacking(value)),
		tensor.New(tensor.WithBacking(gradient))}
}

// The first step of Adam has the length of its rate, whatever the gradient.
func ExampleAdam() {
	solver := &solver.Adam{Rate: 0.25}
	p := newParameter([]float64{1, 1, 1}, []float64{0.001, -5, 1000})
	if err := solver.Step([]gorgonia.ValueGrad{p}); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%.3f\n", p.value.Data())
	// Output: [0.750 1.250 0.750]
}

// AdamW makes weights smaller in each step, also where the gradient is zero.
func ExampleAdamW() {
	solver := &solver.AdamW{Rate: 0.5, WeightDecay: 0.1}
	p := newParameter([]float64{2, -4}, []float64{0, 0})
	if err := solver.Step([]gorgonia.ValueGrad{p}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(p.value.Data())
	// Output: [1.9 -3.8]
}

func ExampleSchedule() {
	rate := solver.Warmup(4, solver.Cosine(0.4, 0, 4))
	for step := range 9 {
		fmt.Printf("%.2f ", rate(step))
	}
	// Output: 0.10 0.20 0.30 0.40 0.40 0.34 0.20 0.06 0.00
}

func ExampleClipNorm() {
	p := newParameter([]float64{0, 0}, []float64{30, 40})
	norm, err := solver.ClipNorm([]gorgonia.ValueGrad{p}, 5)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("the norm was %v, the gradient is now %.1f\n", norm, p.gradient.Data())
	// Output: the norm was 50, the gradient is now [3.0 4.0]
}

// Weights decay and biases do not: two groups with a solver each, whose steps and states are one.
func ExampleNewGroups() {
	g := gorgonia.NewGraph()
	variable := func(name string) *gorgonia.Node {
		return gorgonia.NewVector(g, gorgonia.Float64, gorgonia.WithShape(2),
			gorgonia.WithName(name), gorgonia.WithInit(gorgonia.Ones()))
	}
	w, b := variable("w"), variable("b")
	loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Add(w, b))))
	if _, err := gorgonia.Grad(loss, w, b); err != nil {
		fmt.Println(err)
		return
	}
	solver, err := solver.NewGroups(gorgonia.Nodes{w, b},
		solver.Group{Solver: &solver.SGD{Rate: 0.5, WeightDecay: 0.5},
			Params: gorgonia.Nodes{w}},
		solver.Group{Solver: &solver.SGD{Rate: 0.25}, Params: gorgonia.Nodes{b}})
	if err != nil {
		fmt.Println(err)
		return
	}
	vm := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(w, b))
	defer vm.Close()
	err = errors.Join(vm.RunAll(), solver.Step(gorgonia.NodesToValueGrads(solver.Params())))
	fmt.Println(w.Value().Data(), b.Value().Data(), err)
	// Output:
	// [0.25 0.25] [0.75 0.75] <nil>
}

// newLion returns the solver of Chen et al., "Symbolic Discovery of Optimization Algorithms"
// (arXiv:2302.06675), Algorithm 2.
func newLion(rate, beta1, beta2, weightDecay float64) solver.Solver {
	update := func(u *solver.Update) {
		mean := func(beta float64) fuse.Value {
			return u.Do(fuse.Add, u.With(fuse.Mul, u.Kept(0), beta),
				u.With(fuse.Mul, u.Gradient(), 1-beta))
		}
		w := u.With(fuse.Mul, u.Param(), 1-u.Rate()*weightDecay)
		step := u.With(fuse.Mul, u.Do(fuse.Sign, mean(beta1)), u.Rate())
		u.SetParam(u.Do(fuse.Sub, w, step))
		u.SetKept(0, mean(beta2))
	}
	return &solver.Custom{Name: "lion", Rate: rate, Keep: []string{"m"}, Update: update}
}

// Lion is a solver that this package does not have. It is written as the update of one element,
// which Step and machines of package vm compute.
func ExampleCustom() {
	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2), gorgonia.WithName("w"),
		gorgonia.WithValue(tensor.New(tensor.WithBacking([]float64{1, -2}))))
	loss := gorgonia.Must(gorgonia.Sum(gorgonia.Must(gorgonia.Square(w))))
	if _, err := gorgonia.Grad(loss, w); err != nil {
		log.Fatal(err)
	}
	machine, solver := gorgonia.NewTapeMachine(g), newLion(0.25, 0.9, 0.99, 0)
	defer machine.Close()
	for range 3 {
		if err := machine.RunAll(); err != nil {
			log.Fatal(err)
		}
		if err := solver.Step([]gorgonia.ValueGrad{w}); err != nil {
			log.Fatal(err)
		}
		machine.Reset()
		fmt.Println(w.Value().Data())
	}
	// Output:
	// [0.75 -1.75]
	// [0.5 -1.5]
	// [0.25 -1.25]
}
