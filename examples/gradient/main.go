// Command gradient differentiates through an all-reduce: the program of
// docs/porting.md.
package main

import (
	"context"
	"fmt"
	"log"

	G "gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/ops"
)

func main() {
	comm, err := euryale.Init(context.Background())
	check(err)
	defer comm.Close()
	g := G.NewGraph()
	x := G.NewScalar(g, G.Float64, G.WithValue(float64(comm.Rank()+1)))
	total, err := ops.AllReduce(comm, backend.Sum, x) // 1 + 2 + ... + P, on every rank
	check(err)
	loss := G.Must(G.Square(total))
	grads, err := G.Grad(loss, x) // the gradient of the sum of all ranks' losses
	check(err)
	check(ops.Cause(G.NewTapeMachine(g).RunAll()))
	fmt.Println("rank", comm.Rank(), "loss", loss.Value(), "gradient", grads[0].Value())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
