package autograd

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/testenv"
)

// clipLinear clips the gradients of one step, which are known integers, and checks norm and
// gradients.
func clipLinear(r rank, limit func(norm float64) float64) error {
	m, err := newLinear(r)
	if err != nil {
		return err
	}
	d, err := New(r.comm, m.params, WithSum())
	if err != nil {
		return err
	}
	vm, err := m.build(d, true)
	if err != nil {
		return err
	}
	defer vm.Close()
	err = m.clip(d, vm, limit)
	return errors.Join(err, d.Close())
}

func (m *linear) clip(d *DataParallel, vm gorgonia.VM, limit func(norm float64) float64) error {
	total, want := 0.0, make([][]float32, len(m.params))
	for p, n := range m.params {
		for i := range n.Shape().TotalSize() {
			g := 0.0
			for r := range m.comm.Size() {
				g += m.gradient(p, i, 0, r)
			}
			want[p] = append(want[p], float32(g))
			total += g * g
		}
	}
	if err := m.run(vm, 0); err != nil {
		return err
	}
	grads, err := d.Sync()
	if err != nil {
		return err
	}
	most := limit(math.Sqrt(total))
	norm, err := solver.ClipNorm(grads, most)
	if err != nil || norm != math.Sqrt(total) {
		return fmt.Errorf("the norm is %v, want %v: %v", norm, math.Sqrt(total), err)
	}
	for p, g := range grads {
		v, _ := g.Grad()
		got, err := copied(v)
		if err != nil {
			return err
		}
		for i := range want[p] {
			if norm > most {
				want[p][i] *= float32(most / norm)
			}
		}
		if !slices.Equal(backend.View[float32](got), want[p]) {
			return fmt.Errorf("gradient %d is %v, want %v", p, backend.View[float32](got), want[p])
		}
	}
	return nil
}

func TestClipNormIsOfAllGradientsTogether(t *testing.T) {
	testenv.Each(t, testenv.OnHosts(), func(t *testing.T, k testenv.Kind) {
		for _, limit := range []func(norm float64) float64{
			func(float64) float64 { return 0.125 },
			func(norm float64) float64 { return norm },
			func(norm float64) float64 { return math.Inf(1) },
		} {
			allOn(t, k, 2, func(r rank) error { return clipLinear(r, limit) })
		}
	})
}
