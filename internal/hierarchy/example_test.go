package hierarchy_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Four ranks of this process as two machines of two: between these, each rank sends a half of
// its operand instead of all.
func ExampleNew() {
	worlds, err := rendezvous.Local(4, 0)
	if err != nil {
		log.Fatal(err)
	}
	ctx, layout := context.Background(), hierarchy.Grid(2, 2)
	var ranks sync.WaitGroup
	for _, world := range worlds {
		ranks.Go(func() {
			defer world.Close()
			flat, err := host.Backend{}.Connect(ctx, world)
			if err != nil {
				log.Fatal(err)
			}
			comm, err := hierarchy.New(ctx, world, flat, layout,
				hierarchy.Options{Mode: hierarchy.Always})
			if err != nil {
				log.Fatal(err)
			}
			defer comm.Close()
			x := []float32{1, 2, 3, float32(comm.Rank())}
			sum := backend.Collective{Kind: backend.AllReduce, Op: backend.Sum}
			if err := backend.Run(comm, sum, backend.Of(x), backend.Of(x)); err != nil {
				log.Fatal(err)
			}
			if s := comm.Stats(); comm.Rank() == 3 {
				fmt.Println(x, "with", s.Between(), "bytes to other machines and", s.Inside(),
					"inside")
			}
		})
	}
	ranks.Wait()
	// Output: [4 8 12 6] with 8 bytes to other machines and 16 inside
}
