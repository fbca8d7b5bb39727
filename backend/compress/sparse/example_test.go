package sparse_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/compress/sparse"
)

// Two ranks send the largest of four elements each. What stays behind is added to the next
// operand with the same State.
func ExampleWrap() {
	compress := sparse.Wrap(sparse.TopK(0.25))
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		thin, err := compress(comm)
		if err != nil {
			return err
		}
		for step := range 2 {
			gradient := [][]float32{{4, 1, 0, 3}, {0, 2, 8, 1}}[comm.Rank()]
			sum := backend.Collective{Kind: backend.AllReduce, Op: backend.Sum, State: 1}
			if err := backend.Run(thin, sum, backend.Of(gradient),
				backend.Of(gradient)); err != nil {
				return err
			}
			if comm.Rank() == 0 {
				fmt.Println("step", step, gradient)
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// step 0 [4 0 8 0]
	// step 1 [0 0 8 6]
}
