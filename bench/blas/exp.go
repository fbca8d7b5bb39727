package main

import (
	"fmt"
	"time"

	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// expElements is a vector that fits into a second-level cache.
const expElements = 1 << 16

// expName names the exponential function for -only.
var expName = fmt.Sprintf("exp_f32/%d/1", expElements)

// compareExp measures the exponential function of f32, as a loop of a plan has it, in turns with
// that of Gorgonia's tensors, both on one thread. An element counts as one operation.
func compareExp(rounds int, budget time.Duration) (result, error) {
	x, y := make([]float32, expElements), make([]float32, expElements)
	for i := range x {
		x[i] = float32(i%2000)/100 - 10
	}
	from := tensor.New(tensor.WithShape(expElements), tensor.WithBacking(x))
	to := tensor.New(tensor.WithShape(expElements), tensor.WithBacking(y))
	p := &fuse.Program{Shape: []int{expElements}}
	p.Store(p.Do(fuse.Exp, p.Load(backend.F32, 1)), backend.F32, 1)
	loop, err := fuse.Host(p, nil)
	if err != nil {
		return result{}, fmt.Errorf("exp: %w", err)
	}
	programs := [2]func() error{
		func() error {
			_, err := tensor.Exp(from, tensor.WithReuse(to))
			return err
		},
		func() error {
			return loop.Run([]backend.Buffer{backend.Of(y)}, []backend.Buffer{backend.Of(x)},
				backend.Buffer{})
		},
	}
	pairs, err := bench.Turns(rounds, func(program int) (map[int]float64, error) {
		micros, err := median(budget, programs[program])
		return map[int]float64{expElements: micros}, err
	})
	if err != nil {
		return result{}, fmt.Errorf("exp: %w", err)
	}
	pair := pairs[0]
	return result{
		Op: "exp_f32", N: expElements, Threads: 1, Shape: fmt.Sprint(expElements),
		Gflops: rounded(expElements / pair.Micros[1] / 1e3), PeerGflops: rounded(
			expElements / pair.Micros[0] / 1e3), Ratio: rounded(1 / pair.Ratio),
	}, nil
}
