package fit_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"slices"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/autograd"
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
		fit.Watch("accuracy"), fit.TensorBoard(os.Getenv("CURVES"))))
	fmt.Println(result.Epochs[len(result.Epochs)-1].Metrics)
	// Output: map[accuracy:1]
}

// What a training has learned of its columns is in its checkpoint, so that another file is scaled
// as they were: here it lacks the species, which is predicted.
func ExamplePredict() {
	dir := must(os.MkdirTemp("", ""))
	defer os.RemoveAll(dir)
	samples, classes, err := data.CSV("testdata/flowers.csv", "species")
	if err != nil {
		log.Fatal(err)
	}
	samples = must(data.Standardize(samples))
	g, batch := G.NewGraph(), 12
	x := G.NewMatrix(g, G.Float64, G.WithShape(batch, 4), G.WithName("x"), G.WithInit(G.Zeroes()))
	y := G.NewVector(g, tensor.Int, G.WithShape(batch), G.WithName("y"), G.WithInit(G.Zeroes()))
	w := G.NewMatrix(g, G.Float64, G.WithShape(4, len(classes)), G.WithName("w"),
		G.WithInit(G.Zeroes()))
	scores := G.Must(G.Mul(x, w))
	loss := G.Must(nn.CrossEntropy(nn.NoLabel, scores, y))
	must(G.Grad(loss, w))
	training := must(vm.New(g, nil, vm.WithSolver(&solver.Adam{Rate: 0.1}, w)))
	defer training.Close()
	eval := must(vm.New(g, nil, vm.Eval(), vm.Keep(scores)))
	defer eval.Close()
	must(fit.Run(context.Background(), training, fit.Data{Set: samples, Inputs: G.Nodes{x, y},
		Loss: loss}, fit.Epochs(30), fit.Schedule(solver.OneCycle(0.1, 30*7)),
		fit.Checkpoint(dir, 0), fit.RestoreBest()))

	known := must(fit.ReadMapping(dir))
	rows, classes, err := data.CSV("testdata/new.csv", "", known)
	if err != nil {
		log.Fatal(err)
	}
	all := must(fit.Predict(autograd.Solo(), eval, fit.Data{Set: rows, Inputs: G.Nodes{x}}, scores))
	for _, row := range all {
		fmt.Println(classes[slices.Index(row, slices.Max(row))])
	}
	// Output:
	// aster
	// clover
	// bellflower
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
