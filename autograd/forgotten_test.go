package autograd

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// TestAForgottenResetIsAnError: of Sync and of a micro-batch, with and without dual values, and
// with gradients of the program. Gradients that are zero are none.
func TestAForgottenResetIsAnError(t *testing.T) {
	for _, how := range []string{"", "dual values", "UseGradients"} {
		for _, forgotten := range []string{"", "Reset", "RunAll", "Reset of a micro-batch"} {
			allOn(t, testenv.Hosts, 2, func(r rank) error {
				err := r.forget(how, forgotten)
				if forgotten == "" {
					return err
				}
				if !errors.Is(err, backend.ErrArgument) ||
					!strings.Contains(err.Error(), "no run has computed gradients") {
					return fmt.Errorf("%s, without %s: %v", how, forgotten, err)
				}
				return nil
			})
		}
	}
}

func (r rank) forget(how, what string) error {
	r.build.Lock()
	g := gorgonia.NewGraph()
	vector := func(name string, values ...float32) *gorgonia.Node {
		return gorgonia.NewVector(g, gorgonia.Float32, gorgonia.WithShape(2),
			gorgonia.WithName(name), gorgonia.WithValue(tensor.New(tensor.WithBacking(values))))
	}
	x, w := vector("x", 1, 2), vector("w", 1, 1)
	loss := gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Mul(x, w))))
	grads, err := gorgonia.Grad(loss, w)
	r.build.Unlock()
	if err != nil {
		return err
	}
	d, err := New(r.comm, gorgonia.Nodes{w})
	if err != nil {
		return err
	}
	defer d.Close()
	if how == "UseGradients" {
		r.build.Lock()
		grads[0], err = gorgonia.HadamardProd(grads[0], grads[0])
		r.build.Unlock()
		if err = errors.Join(err, d.UseGradients(grads)); err != nil {
			return err
		}
	}
	var options []gorgonia.VMOpt
	if how == "dual values" {
		options = append(options, gorgonia.BindDualValues(w))
	}
	vm := gorgonia.NewTapeMachine(g, options...)
	defer vm.Close()
	if what == "Reset of a micro-batch" {
		if err := errors.Join(vm.RunAll(), d.Step(&solver.SGD{Rate: 0.01})); err != nil {
			return err
		}
		return d.Accumulate(2, func(int) error { return vm.RunAll() })
	}
	for i := range 4 {
		if i == 2 { // gradients of zeros are gradients
			clear(x.Value().Data().([]float32))
		}
		if what != "RunAll" || i == 0 {
			if err := vm.RunAll(); err != nil {
				return err
			}
		}
		if err := d.Step(&solver.SGD{Rate: 0.01}); err != nil {
			return err
		}
		if what != "Reset" {
			vm.Reset()
		}
	}
	return nil
}
