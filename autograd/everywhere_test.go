package autograd

import (
	"context"
	"fmt"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// twoModels makes two models of equal shapes, whose parameters are named for them, and keeps
// each the same on all ranks.
func twoModels(r rank) (a, b *DataParallel, err error) {
	nodes := make([]gorgonia.Nodes, 2)
	r.build.Lock()
	for i, name := range []string{"a", "b"} {
		g := gorgonia.NewGraph()
		nodes[i] = gorgonia.Nodes{gorgonia.NewVector(g, tensor.Float32, gorgonia.WithName(name),
			gorgonia.WithShape(4), gorgonia.WithInit(gorgonia.Ones()))}
	}
	r.build.Unlock()
	if a, err = New(r.comm, nodes[0], WithPartial()); err != nil {
		return nil, nil, err
	}
	b, err = New(r.comm, nodes[1], WithPartial())
	return a, b, err
}

// found returns what two ranks find out when they do something with two models.
func found(t *testing.T, body func(r rank, a, b *DataParallel) error) [2]error {
	t.Helper()
	var errs [2]error
	all(t, 2, func(r rank) error {
		a, b, err := twoModels(r)
		if err == nil {
			// a rank that fails is not declared failed: the other finds out itself
			errs[r.comm.Rank()] = body(r, a, b)
		}
		return err
	})
	return errs
}

// TestFoundSaveOnOneRankSaysCallItEverywhere: as in `if rank == 0 { dp.Save(...) }`.
func TestFoundSaveOnOneRankSaysCallItEverywhere(t *testing.T) {
	var number float64
	for name, alone := range map[string]func(d *DataParallel, dir string) error{
		"DataParallel.Save": func(d *DataParallel, dir string) error {
			return d.Save(dir, nil, nil)
		},
		"DataParallel.Load": func(d *DataParallel, dir string) error {
			return d.Load(dir, nil, nil)
		},
		"DataParallel.Check":   func(d *DataParallel, _ string) error { return d.Check() },
		"DataParallel.Average": func(d *DataParallel, _ string) error { return d.AverageAll() },
		"autograd.Mean": func(d *DataParallel, _ string) error {
			return Mean(d.comm, &number)
		},
		"autograd.Sum": func(d *DataParallel, _ string) error { return Sum(d.comm, &number) },
		"autograd.Any": func(d *DataParallel, _ string) error {
			_, err := Any(d.comm, true)
			return err
		},
		"autograd.Stopped": func(d *DataParallel, _ string) error {
			_, err := Stopped(context.Background(), d.comm)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for i, err := range found(t, func(r rank, a, _ *DataParallel) error {
				if r.comm.Rank() == 0 {
					return alone(a, dir)
				}
				one := backend.Of([]float32{1})
				return backend.Run(r.comm, backend.Collective{Kind: backend.AllReduce}, one, one)
			}) {
				for _, part := range []string{"rank 0 called " + name + ": ",
					"rank 1 called allreduce(sum) of 1 f32", ": call " + name +
						" on every rank, not on some of them"} {
					require.Fails(t, fmt.Sprint("rank ", i), err, backend.ErrMismatch, part)
				}
			}
		})
	}
}

// TestBucketsOfOtherModelsAreAMismatchRaced: they are of one length.
func TestBucketsOfOtherModelsAreAMismatchRaced(t *testing.T) {
	for i, err := range found(t, func(r rank, a, b *DataParallel) error {
		return []*DataParallel{a, b}[r.comm.Rank()].Average()
	}) {
		for _, part := range []string{"of a, 4 f32", "of b, 4 f32", "bucket 0"} {
			require.Fails(t, fmt.Sprint("rank ", i), err, backend.ErrMismatch, part)
		}
	}
}
