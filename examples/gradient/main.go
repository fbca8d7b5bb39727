// Command gradient differentiates through an all-reduce: the program of the
// README.
package main

import (
	"context"
	"fmt"

	G "gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

func main() {
	comm, err := euryale.Init(context.Background())
	if err != nil {
		panic(err)
	}
	defer comm.Close()
	g := G.NewGraph()
	x := G.NewScalar(g, G.Float64, G.WithValue(float64(comm.Rank()+1)))
	total := G.Must(ops.AllReduce(comm, backend.Sum, x)) // 1 + 2 + ... + P, on every rank
	loss := G.Must(G.Square(total))
	grads, err := G.Grad(loss, x) // the gradient of the sum of all ranks' losses
	if err != nil {
		panic(err)
	}
	if err := G.NewTapeMachine(g).RunAll(); err != nil {
		panic(err)
	}
	fmt.Println("rank", comm.Rank(), "loss", loss.Value(), "gradient", grads[0].Value())
}
