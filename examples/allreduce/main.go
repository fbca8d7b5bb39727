// Command allreduce adds up a vector over all ranks.
//
//	euryale run -n 4 ./examples/allreduce
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
)

func main() {
	if err := start(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "allreduce:", err)
		os.Exit(euryale.ExitStatus(err))
	}
}

func start(out io.Writer) error {
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return err
	}
	return errors.Join(run(comm, out), comm.Close())
}

// run is what every rank does.
func run(comm backend.Communicator, out io.Writer) error {
	x := []float32{1, 10, 100}
	for i := range x {
		x[i] *= float32(comm.Rank() + 1)
	}
	sum := make([]float32, len(x))
	c := backend.Collective{Kind: backend.AllReduce, Op: backend.Sum}
	if err := backend.Run(comm, c, backend.Of(sum), backend.Of(x)); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "rank %d of %d: my vector is %v, the sum of all is %v\n",
		comm.Rank(), comm.Size(), x, sum)
	return err
}
