package fit_test

import (
	"context"
	"fmt"
	"log"
	"os"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// A training on a table of one's own, with validation, clipping, early stop and checkpoints.
// Started again, it goes on; by "euryale run -n 2" it runs on two ranks.
func Example() {
	ctx := context.Background()
	comm := must(euryale.Init(ctx))
	defer comm.Close()
	samples, classes, err := data.CSV("testdata/flowers.csv", "species")
	if err != nil {
		log.Fatal(err)
	}
	train, held := data.Split(samples, 0.2, 1)

	g, batch := G.NewGraph(), 12/comm.Size()
	matrix := func(name string, init G.InitWFn, shape ...int) *G.Node {
		return G.NewMatrix(g, G.Float32, G.WithShape(shape...), G.WithName(name), G.WithInit(init))
	}
	x := matrix("x", G.Zeroes(), batch, 4)
	y := G.NewVector(g, tensor.Int, G.WithShape(batch), G.WithName("y"), G.WithInit(G.Zeroes()))
	w := matrix("w", G.Zeroes(), 4, len(classes))
	scores := G.Must(G.Mul(x, w))
	loss := G.Must(nn.CrossEntropy(nn.NoLabel, scores, y))
	must(G.Grad(loss, w))
	training := must(vm.New(g, comm.Device(), vm.WithSolver(&solver.Adam{Rate: 0.05}, w),
		vm.WithDataParallel(comm), vm.ClipNorm(1)))
	defer training.Close()
	eval := must(vm.New(g, comm.Device(), vm.Eval(), vm.Keep(scores)))
	defer eval.Close()

	result := must(fit.Run(ctx, training, fit.Data{Set: train, Inputs: G.Nodes{x, y}, Loss: loss},
		fit.Epochs(200), fit.Checkpoint(os.Getenv("CHECKPOINTS"), 0), fit.EarlyStop(20),
		fit.Validate(eval, fit.Data{Set: held, Inputs: G.Nodes{x, y}}, fit.Accuracy(scores, y)),
		fit.Watch("accuracy")))
	fmt.Println(result.Epochs[len(result.Epochs)-1].Metrics)
	// Output: map[accuracy:1]
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
