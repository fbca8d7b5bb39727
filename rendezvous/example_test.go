package rendezvous_test

import (
	"context"
	"fmt"
	"log"
	"strings"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/rendezvous"
)

// What a launcher says in the environment is all that a rank must know to join its job.
func ExampleReadEnv() {
	torchrun := map[string]string{
		"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
		"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "night",
		"EURYALE_TOKEN": "0123456789abcdef", "EURYALE_TIMEOUT": "90s",
	}
	env, err := rendezvous.ReadEnv(func(name string) string { return torchrun[name] })
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("started by", env.Launcher)
	fmt.Println("rank", env.Rank, "of", env.Size, "with timeout", env.Timeout)

	delete(torchrun, "WORLD_SIZE")
	_, err = rendezvous.ReadEnv(func(name string) string { return torchrun[name] })
	problem, _, _ := strings.Cut(err.Error(), ": start ")
	fmt.Println(strings.ReplaceAll(problem, ", but ", ",\nbut "))
	// Output:
	// started by torchrun
	// rank 5 of 8 with timeout 1m30s
	// rendezvous: environment of torchrun: RANK=5 is the sign of a job that torchrun has started,
	// but WORLD_SIZE is not set
}

// The ranks of a job share a store. AllGather gives every rank the value of each.
func ExampleLocal() {
	worlds, err := rendezvous.Local(3, 10*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	var ranks sync.WaitGroup
	for _, w := range worlds {
		ranks.Go(func() {
			defer w.Close()
			values, err := w.AllGather(context.Background(), "colors", fmt.Appendf(nil, "color %d",
				w.Rank))
			if err != nil {
				log.Fatal(err)
			}
			if w.Rank == 0 {
				fmt.Printf("%s\n", values)
			}
		})
	}
	ranks.Wait()
	// Output: [color 0 color 1 color 2]
}

// A rank that gives up says why, and the world of every other rank ends with its cause.
func ExampleWorld_Fail() {
	worlds, err := rendezvous.Local(2, 10*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	worlds[1].Fail(fmt.Errorf("no data"))
	<-worlds[0].Down()
	fmt.Println(worlds[0].Failure())
	for _, w := range worlds {
		w.Close()
	}
	// Output: rank 1 failed: no data
}
