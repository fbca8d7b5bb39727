package fault_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/fault"
)

// A test of what a program does when rank 1 fails at its third collective.
func ExampleNew() {
	plan := fault.Plan{Kind: fault.Abort, Rank: 1, Call: 3}
	err := euryale.Run(context.Background(), 2, func(comm backend.Communicator,
		_ sync.Locker) error {
		comm = fault.New(comm, plan)
		for step := 1; ; step++ {
			if err := backend.Barrier(comm); err != nil {
				if comm.Rank() == 0 {
					fmt.Printf("step %d is aborted: %v\n", step, errors.Is(err, backend.ErrAborted))
				}
				return err
			}
		}
	})
	fmt.Println("the job failed:", err != nil)
	// Output:
	// step 3 is aborted: true
	// the job failed: true
}

func ExampleParse() {
	plan, err := fault.Parse("kill,rank=1,call=400")
	fmt.Println(plan.Kind, plan.Rank, plan.Call, err)
	_, err = fault.Parse("kill,rank=1")
	problem, advice, _ := strings.Cut(err.Error(), ", then ")
	fmt.Println(problem)
	fmt.Println("then", strings.ReplaceAll(advice, ", such as", ",\nsuch as"))
	// Output:
	// kill 1 400 <nil>
	// bad argument: "kill,rank=1" is no fault: write kill, stop, panic, exit or abort
	// then the rank (from 0) and the number of its collective (from 1),
	// such as kill,rank=1,call=400
}
