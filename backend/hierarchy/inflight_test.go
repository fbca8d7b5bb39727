package hierarchy

import (
	"fmt"
	"testing"
)

func TestCallsInFlightAreForSeveralMachines(t *testing.T) {
	for _, tt := range []struct {
		layout Layout
		mode   Mode
		want   int
	}{
		{Grid(2, 2, MachineMajor), Always, inFlight},
		{Grid(2, 2, MachineMajor), Auto, inFlight},
		{Grid(2, 2, MachineMajor), Never, 1},
		{Grid(1, 4, MachineMajor), Auto, 1},
	} {
		ranks(t, tt.layout, Options{Mode: tt.mode}, func(c *Communicator) error {
			if n := c.Capabilities().InFlight; n != tt.want {
				return fmt.Errorf("%v, %v: %d in flight, want %d", tt.layout, tt.mode, n, tt.want)
			}
			return nil
		})
	}
}
