package euryale_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"gorgonia.org/gorgonia"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/ops"
	"github.com/euryale-ml/euryale/rendezvous"
)

// A process that no launcher started is a job of one rank, and the same program works.
func ExampleInit() {
	os.Setenv("EURYALE_ALONE", "1") // for this example: ignore what a launcher may have set
	comm, err := euryale.Init(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	defer comm.Close()
	x := []float32{1, 2, 3}
	sum := backend.Collective{Kind: backend.AllReduce, Op: backend.Sum}
	if err := backend.Run(comm, sum, backend.Of(x), backend.Of(x)); err != nil {
		log.Fatal(err)
	}
	fmt.Println("rank", comm.Rank(), "of", comm.Size(), x)
	// Output: rank 0 of 1 [1 2 3]
}

// Four ranks as goroutines of this process. They hold the lock while they build their graphs, since
// Gorgonia builds one at a time, and never while they wait for each other.
func ExampleRun() {
	err := euryale.Run(context.Background(), 4, func(comm backend.Communicator,
		build sync.Locker) error {
		build.Lock()
		g := gorgonia.NewGraph()
		x := gorgonia.NewScalar(g, gorgonia.Float64, gorgonia.WithName("x"),
			gorgonia.WithValue(float64(comm.Rank()+1)))
		total, err := ops.AllReduce(comm, backend.Sum, x)
		build.Unlock()
		if err != nil {
			return err
		}
		machine := gorgonia.NewTapeMachine(g)
		defer machine.Close()
		if err := machine.RunAll(); err != nil {
			return ops.Cause(err)
		}
		if comm.Rank() == 0 {
			fmt.Println("1 + 2 + 3 + 4 =", total.Value())
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: 1 + 2 + 3 + 4 = 10
}

// A rank that returns an error ends the job: the others' calls fail, and Run returns its error.
func ExampleRun_failure() {
	err := euryale.Run(context.Background(), 3, func(comm backend.Communicator,
		_ sync.Locker) error {
		if comm.Rank() == 2 {
			return fmt.Errorf("no data for rank 2")
		}
		return backend.Barrier(comm)
	})
	fmt.Println(err)
	// Output: rank 2: no data for rank 2
}

// A test that needs every rank's world makes them itself, and connects them on the backend it
// names.
func ExampleConnect() {
	worlds, err := rendezvous.Local(2, 10*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	var ranks sync.WaitGroup
	for _, world := range worlds {
		ranks.Go(func() {
			comm, err := euryale.Connect(context.Background(), world, host.Backend{})
			if err != nil {
				log.Fatal(err)
			}
			defer comm.Close() // and with it the world
			mine, all := []int64{10 + int64(comm.Rank())}, make([]int64, 2)
			if err := backend.Run(comm, backend.Collective{Kind: backend.AllGather},
				backend.Of(all), backend.Of(mine)); err != nil {
				log.Fatal(err)
			}
			if comm.Rank() == 0 {
				fmt.Println(all)
			}
		})
	}
	ranks.Wait()
	// Output: [10 11]
}

// Split makes a group of the ranks that pass the same color: here the even ranks and the odd ones.
func Example_groups() {
	err := euryale.Run(context.Background(), 4, func(comm backend.Communicator,
		_ sync.Locker) error {
		group, err := comm.Split(comm.Rank()%2, comm.Rank())
		if err != nil {
			return err
		}
		defer group.Close()
		x := []float64{float64(comm.Rank())}
		if err := backend.Run(group, backend.Collective{Kind: backend.AllReduce}, backend.Of(x),
			backend.Of(x)); err != nil {
			return err
		}
		if comm.Rank() == 3 {
			fmt.Println("rank 3 is rank", group.Rank(), "of", group.Size(),
				"odd ranks, whose sum is", x[0])
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: rank 3 is rank 1 of 2 odd ranks, whose sum is 4
}
