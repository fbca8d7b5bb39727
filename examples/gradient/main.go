// Command gradient differentiates through an all-reduce: the program of the
// README.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	G "gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	comm, err := euryale.Init(ctx)
	if err != nil {
		return err
	}
	return errors.Join(differentiate(comm), comm.Close())
}

func differentiate(comm backend.Communicator) error {
	g := G.NewGraph()
	x := G.NewScalar(g, G.Float64, G.WithValue(float64(comm.Rank()+1)))
	total, err := ops.AllReduce(comm, backend.Sum, x) // 1 + 2 + ... + P, on every rank
	if err != nil {
		return err
	}
	loss := G.Must(G.Square(total))
	grads, err := G.Grad(loss, x) // the gradient of the sum of all ranks' losses
	if err != nil {
		return err
	}
	if err := G.NewTapeMachine(g).RunAll(); err != nil {
		return err
	}
	fmt.Println("rank", comm.Rank(), "loss", loss.Value(), "gradient", grads[0].Value())
	return nil
}
