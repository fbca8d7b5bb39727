//go:build gpu

package gpu

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/proctest"
)

// reduceByKernels is a process of a job, named by its algorithm: it reduces until that fails,
// then uses its device, and closes.
func reduceByKernels(c *Communicator) error {
	if c.Refused() != "" {
		return errors.New(c.Refused())
	}
	x := make([]float32, 1<<14)
	err := holding(c, x, func(b backend.Buffer) error {
		for i := 0; ; i++ {
			if i == 10 {
				fmt.Println("under way")
			}
			if err := backend.Run(c, sum, b, b); err != nil {
				fmt.Println("error:", strings.ReplaceAll(err.Error(), "\n", " "))
				return nil // and copy the memory, which uses the device
			}
		}
	})
	if err != nil {
		return err
	}
	fmt.Println("device usable")
	if err := c.Close(); err != nil {
		return err
	}
	for deadline := time.Now().Add(10 * time.Second); c.Kept() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("%d bytes are kept for a rank that is dead", c.Kept())
		}
	}
	fmt.Println("memory given back")
	return nil
}

func TestKilledRankIsNamedAmongKernels(t *testing.T) {
	size := len(needGPUs(t, 2).all)
	for _, a := range Algorithms()[1:] {
		t.Run(a.String(), func(t *testing.T) {
			ranks := proctest.Start(t, a.String(), size)
			for _, rank := range ranks {
				rank.Says(t, "under way")
			}
			if t.Failed() {
				return
			}
			began, victim := time.Now(), size-1
			if err := ranks[victim].Process.Kill(); err != nil {
				t.Fatal(err)
			}
			for r, rank := range ranks[:victim] {
				rank.Says(t, fmt.Sprintf("rank %d is down", victim))
				if took := time.Since(began); took > 2*time.Second {
					t.Errorf("rank %d took %v", r, took)
				}
				rank.Says(t, "device usable")
				rank.Says(t, "memory given back")
			}
		})
	}
}
