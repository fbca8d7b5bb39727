package main

import (
	"context"
	"errors"
	"io"
	"math"
	"path/filepath"
	"sync"
	"testing"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/host"
	"github.com/euryale-ml/euryale/internal/testing/fakedevice"
)

// TestMachinesAgree: a plan trains what the tape machine trains; on one rank, with the solver in
// the plan.
func TestMachinesAgree(t *testing.T) {
	for model, epochs := range map[string]int{"mlp": 3, "cnn": 1} {
		for _, ranks := range []int{1, 2} {
			machinesAgree(t, model, epochs, ranks)
		}
	}
}

func machinesAgree(t *testing.T, model string, epochs, ranks int) {
	var losses, accuracies []float64
	for machine := range machines {
		cfg := defaults(t, func(c *config) {
			c.model, c.machine, c.epochs = model, machine, epochs
		})
		trainEach(t, ranks, cfg, func(trained *trainer) error {
			trained.out = io.Discard
			if err := trained.train(context.Background(), epochs); err != nil {
				return err
			}
			accuracy, err := trained.accuracy()
			if trained.comm.Rank() == 0 {
				losses, accuracies = append(losses, trained.past.Loss), append(accuracies, accuracy)
			}
			return err
		})
	}
	if math.Abs(losses[0]-losses[1]) > 1e-5 || accuracies[0] != accuracies[1] {
		t.Errorf("%s on %d ranks: losses %v, accuracies %v", model, ranks, losses, accuracies)
	}
}

// TestSolverOnADeviceResumes: with the solver in the plan of a device, a training that was stopped
// after an epoch ends with the bits of one that was not, and with the accuracy of the host.
func TestSolverOnADeviceResumes(t *testing.T) {
	onHost := defaults(t, func(c *config) { c.epochs, c.device = 2, "cpu" })
	onDevice := defaults(t, func(c *config) { c.epochs, c.device = 2, "gpu" })
	resumed := onDevice
	resumed.checkpoint = filepath.Join(t.TempDir(), "state")
	want := alone(t, onDevice, 2)
	if host := alone(t, onHost, 2); host.accuracy != want.accuracy {
		t.Errorf("the accuracy on a device is %v, on the host %v", want.accuracy, host.accuracy)
	}
	alone(t, resumed, 1)
	if got := alone(t, resumed, 2); got != want {
		t.Errorf("resumed, it ends with %+v, want %+v", got, want)
	}
}

// end is what a training of one rank ends with.
type end struct {
	loss, accuracy float64
	params         string // their hash
}

// alone trains on one rank, whose backend has a device that the host cannot touch.
func alone(t *testing.T, cfg config, epochs int) (e end) {
	t.Helper()
	device, err := fakedevice.New(host.Device{})
	if err != nil {
		t.Fatal(err)
	}
	err = euryale.Run(t.Context(), 1, func(comm backend.Communicator, build sync.Locker) error {
		tr, err := newTrainer(fakedevice.Over(comm, device), build, cfg)
		if err != nil {
			return err
		}
		err = tr.train(t.Context(), epochs)
		if err == nil {
			e.accuracy, err = tr.accuracy()
		}
		if err == nil {
			e.params, err = tr.parallel.Hash()
		}
		e.loss = tr.past.Loss
		return errors.Join(err, tr.close())
	})
	if err = errors.Join(err, device.Close()); err != nil {
		t.Fatal(err)
	}
	return e
}
