package main

import (
	"context"
	"io"
	"math"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
)

// TestMachinesAgree: a plan trains what the tape machine trains.
func TestMachinesAgree(t *testing.T) {
	for model, epochs := range map[string]int{"mlp": 3, "cnn": 1} {
		var losses, accuracies []float64
		for machine := range machines {
			cfg := defaults(t, func(c *config) { c.model, c.machine, c.epochs = model, machine, epochs })
			err := euryale.Run(context.Background(), 2, func(comm backend.Communicator, build sync.Locker) error {
				trained, err := newTrainer(comm, build, cfg)
				if err != nil {
					return err
				}
				defer trained.close()
				trained.out = io.Discard
				if err := trained.train(context.Background(), epochs); err != nil {
					return err
				}
				accuracy, err := trained.accuracy()
				if comm.Rank() == 0 {
					losses, accuracies = append(losses, trained.past.Loss), append(accuracies, accuracy)
				}
				return err
			})
			if err != nil {
				t.Fatalf("%s on %s: %v", model, machine, err)
			}
		}
		if math.Abs(losses[0]-losses[1]) > 1e-5 || accuracies[0] != accuracies[1] {
			t.Errorf("%s: losses %v, accuracies %v", model, losses, accuracies)
		}
	}
}
